"""Copying a string of letters, as in Repeat After Me: learned at 5 to 20, tested at up to 60.

python train.py --config configs/copying.py [--model.attention softmax]

On a CPU, some minutes, with the model of configs/recall.py: 800 updates of 64 texts.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.data import Copying


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("recall.py"))
    data = Copying(test_lengths=(10, 20, 30, 40, 60))
    return replace(base, data=data, model=replace(base.model, vocab_size=data.vocab_size))
