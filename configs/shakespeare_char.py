"""Tiny Shakespeare, byte by byte, with nanoGPT's GPU budget: 5000 steps of 64 x 256 characters.

python train.py --config configs/shakespeare_char.py

The paper's block with 10.2M parameters, for one recent GPU. nanoGPT's model with this budget (10.7M
parameters, dropout 0.2) has a best validation loss of 1.4697 (its README). This one, without
dropout, overfits: on an H100, its lowest validation loss was 1.67, after 1250 updates, of a run
that was stopped after 2906. Never trained to the end by us.
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
            vocab_size=264, model_dim=384, num_layers=11, num_heads=6, dtype="bfloat16"
        ),
        data=DataConfig(
            corpus="tinyshakespeare", tokenizer="bytes", sequence_length=256, batch_size=64
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, end_learning_rate=1e-4, warmup_steps=100, beta2=0.99
        ),
        training=TrainingConfig(steps=5000, evaluate_every=250),
    )
