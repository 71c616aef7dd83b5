"""A language model of Python code: tokens of several characters, separate files, longer contexts.

python train.py --config configs/python_code.py

This machine's Python library with a byte-level BPE of 2048 tokens, which was trained on the library
of Python 3.11: python -m heinsen_jax.data.train_tokenizer python-stdlib --vocab-size 2048
--output configs/tokenizers/python_2048. The decay block with 1.1M parameters, 600 updates of 8 x
512 tokens. Also evaluated on sequences of 2048 tokens, by position.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config

TOKENIZER = Path("configs/tokenizers/python_2048")  # the same in every checkout
if not TOKENIZER.exists():
    TOKENIZER = Path(__file__).parent / "tokenizers" / TOKENIZER.name


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("quickstart.py"))
    return replace(
        base,
        model=replace(base.model, vocab_size=2048, block="decay"),
        data=replace(
            base.data,
            tokenizer=str(TOKENIZER),
            documents="separate",
            validation_fraction=0.05,
            sequence_length=512,
            test_lengths=(2048,),
        ),
        optimizer=replace(base.optimizer, end_learning_rate=4e-4, warmup_steps=60),
        training=replace(
            base.training,
            steps=600,
            evaluate_every=600,
            evaluation_batches=None,
            loss_by_position=True,
        ),
    )
