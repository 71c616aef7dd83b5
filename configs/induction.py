"""Induction: what followed a special token when it came first. Tested at 16 times the length.

python train.py --config configs/induction.py [--model.attention softmax]

On a CPU, some minutes, with the model of configs/recall.py: 800 updates of 64 texts.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.data import Induction


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("recall.py"))
    data = Induction(sequence_length=64, test_lengths=(64, 128, 256, 512, 1024))
    return replace(base, data=data, model=replace(base.model, vocab_size=data.vocab_size))
