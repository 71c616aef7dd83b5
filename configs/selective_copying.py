"""Selective copying: repeat letters that are mixed with noise tokens.

python train.py --config configs/selective_copying.py [--model.attention softmax]

Needs some minutes on a CPU, with the model of configs/recall.py: 800 updates of 64 sequences.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.data import SelectiveCopying


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("recall.py"))
    data = SelectiveCopying(num_copied=8, input_length=64, test_lengths=(64, 128, 256))
    return replace(base, data=data, model=replace(base.model, vocab_size=data.vocab_size))
