"""A small language model of this machine's Python library.

python train.py --config configs/quickstart.py

Needs about a minute on 2 CPU cores. Expected: a validation loss of about 1.7 nats per byte.
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
        # remat: on a CPU, recomputation is faster than allocating residuals at every update
        model=LanguageModelConfig(
            vocab_size=264, model_dim=128, num_layers=4, num_heads=4, remat=True
        ),
        data=DataConfig(
            corpus="python-stdlib", tokenizer="bytes", sequence_length=128, batch_size=8
        ),
        optimizer=OptimizerConfig(
            learning_rate=4e-3, end_learning_rate=1e-4, warmup_steps=50, beta2=0.99
        ),
        training=TrainingConfig(
            steps=700,
            log_every=50,
            evaluate_every=350,
            evaluation_batches=20,
            sample_prompt="def ",
        ),
    )
