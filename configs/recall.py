"""Multi-query associative recall (MQAR): key/value pairs, then queries.

python train.py --config configs/recall.py [--model.attention softmax]

Small enough for a CPU: 8 pairs with a vocabulary of 128 at length 64, 2 layers of width 64, 800
updates of 32 sequences. Only answers count in loss and accuracy. Results are in the report of the
study studies/grids/recall.py. For Zoology's settings, use --data.vocab-size 8192
--model.vocab-size 8192, and --data.num-pairs 4, 8, 16 or 64 with --data.sequence-length 64, 128,
256 or 512.
"""

from heinsen_jax.config import (
    ExperimentConfig,
    LanguageModelConfig,
    Layers,
    OptimizerConfig,
    TrainingConfig,
)
from heinsen_jax.data import Recall


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=128,
            model_dim=64,
            num_layers=2,
            num_heads=2,
            attention=Layers("log", options={"values": "linear"}),
            block="standard",
            mlp_ratio=2,
            positions="none",
            convolution_size=4,
        ),
        data=Recall(vocab_size=128, num_pairs=8, sequence_length=64, batch_size=32),
        optimizer=OptimizerConfig(
            learning_rate=1e-2, end_learning_rate=1e-3, warmup_steps=100, beta2=0.99
        ),
        training=TrainingConfig(steps=800, log_every=100, evaluate_every=400, sample_tokens=0),
    )
