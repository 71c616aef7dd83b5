"""Fills in masked bytes of this machine's own Python library: for mechanisms that see both sides.

python train.py --config configs/masked.py [--model.attention colt5]

The quickstart's text, sizes and optimizer, on a CPU some minutes; 15% of the bytes are to be
filled in. Expected: a loss on these below 3.3, which is what the bytes' frequencies alone give.
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
        model=LanguageModelConfig(
            vocab_size=264,
            model_dim=128,
            num_layers=4,
            num_heads=4,
            attention="linformer",
            block="standard",
            is_causal=False,
            remat=True,
        ),
        data=DataConfig(
            corpus="python-stdlib", tokenizer="bytes", sequence_length=128, batch_size=16
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, end_learning_rate=2e-4, warmup_steps=50, beta2=0.99
        ),
        training=TrainingConfig(
            steps=1000,
            report_every=50,
            evaluate_every=500,
            evaluation_batches=20,
            sample_tokens=0,
        ),
    )
