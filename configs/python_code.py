"""A language model of Python code: tokens of several characters, separate files, longer contexts.

python train.py --config configs/python_code.py

This machine's Python library with a byte-level BPE of 2048 tokens, which was trained on that of
Python 3.11: python -m heinsen_jax.data.train_tokenizer python-stdlib --vocab-size 2048
--output configs/tokenizers/python_2048. The decay block with 1.1M parameters, 600 updates of 8 x
512 tokens, an estimated quarter of an hour on two CPU cores. Also evaluated on sequences of 2048
tokens, by position.
"""

from pathlib import Path

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

TOKENIZER = Path("configs/tokenizers/python_2048")  # the same in every checkout
if not TOKENIZER.exists():
    TOKENIZER = Path(__file__).parent / "tokenizers" / TOKENIZER.name


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        # remat: on a CPU, recomputation is faster than allocating residuals at every update
        model=LanguageModelConfig(
            vocab_size=2048, model_dim=128, num_layers=4, num_heads=4, block="decay", remat=True
        ),
        data=DataConfig(
            corpus="python-stdlib",
            tokenizer=str(TOKENIZER),
            documents="separate",
            validation_fraction=0.05,
            sequence_length=512,
            batch_size=8,
            test_lengths=(2048,),
        ),
        optimizer=OptimizerConfig(
            learning_rate=4e-3, end_learning_rate=4e-4, warmup_steps=60, beta2=0.99
        ),
        training=TrainingConfig(
            steps=600,
            log_every=50,
            evaluate_every=600,
            loss_by_position=True,
            sample_prompt="def ",
        ),
    )
