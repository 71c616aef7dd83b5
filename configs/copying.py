"""Copying strings, as in Repeat After Me: trained on 5 to 20 letters, tested on up to 60.

python train.py --config configs/copying.py [--model.attention softmax]

Needs some minutes on a CPU, with the model of configs/recall.py: 800 updates of 64 sequences.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.data import Copying


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("recall.py"))
    data = Copying(test_lengths=(10, 20, 30, 40, 60))
    return replace(base, data=data, model=replace(base.model, vocab_size=data.vocab_size))
