"""Tiny Shakespeare, byte by byte, with nanoGPT's CPU budget: 2000 steps of 12 x 64 characters.

python train.py --config configs/shakespeare_char_cpu.py

The paper's block with 0.76M parameters, about as many as nanoGPT's model with the same budget,
whose validation loss is 1.88 (its README). Results are in docs/results.md. Blocks are recomputed in
the backward pass (`remat`): on a CPU, this is faster than allocating memory at every step.
"""

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        seed=1337,
        model=LanguageModelConfig(
            vocab_size=264, model_dim=128, num_layers=7, num_heads=4, remat=True
        ),
        data=DataConfig(
            corpus="tinyshakespeare", tokenizer="bytes", sequence_length=64, batch_size=12
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, end_learning_rate=1e-4, warmup_steps=100, beta2=0.99
        ),
        training=TrainingConfig(steps=2000, log_every=50, evaluate_every=500),
    )
