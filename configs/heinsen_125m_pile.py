"""The 125M model of Heinsen (2024) on The Pile: GPT-2 tokens, length 1024, 300B tokens.

python -m heinsen_jax.data.prepare pile/train --tokenizer gpt2 --output data/pile-gpt2
python train.py --config configs/heinsen_125m_pile.py

where pile/train contains The Pile's *.jsonl.zst files, which you must provide. Needs 20 to 80 hours
on a node of 8 H100s (an estimate); on fewer devices increase training.accumulation_steps. The paper
reports a loss of 2.47. Learning rates, length and number of tokens follow the paper; batch size,
warm-up and clipping are not in the paper and are nanoGPT's, as are sequences in which documents are
not separated. Never trained to the end by us.
"""

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

TOKENS = 300_000_000_000
SEQUENCE_LENGTH = 1024
BATCH_SIZE = 512


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        model=LanguageModelConfig(dtype="bfloat16", remat=True),
        data=DataConfig(
            corpus="data/pile-gpt2",
            tokenizer="gpt2",
            documents="continuous",
            sequence_length=SEQUENCE_LENGTH,
            batch_size=BATCH_SIZE,
        ),
        optimizer=OptimizerConfig(
            learning_rate=6e-4, end_learning_rate=6e-5, warmup_steps=2000, weight_decay=0.1
        ),
        training=TrainingConfig(
            steps=TOKENS // (SEQUENCE_LENGTH * BATCH_SIZE),
            evaluate_every=2000,
            evaluation_batches=100,
            checkpoint_every=500,
        ),
    )
