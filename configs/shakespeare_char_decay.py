"""Tiny Shakespeare, byte by byte, with nanoGPT's CPU budget: our best log-attention model.

python train.py --config configs/shakespeare_char_decay.py

The decay block: a convolution of 4 tokens before each branch, and log-attention over values of any
sign, with decay by head. 0.83M parameters, 2000 updates of 12 x 64 characters, as in
shakespeare_char_cpu.py; also evaluated on sequences of 256 and 1024 characters, longer than in
training. Results, also of softmax attention in the same block, are in the report of the study
studies/grids/language_model.py.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("shakespeare_char_cpu.py"))
    return replace(
        base,
        model=replace(base.model, block="decay", num_layers=4, remat=False),
        data=replace(base.data, test_lengths=(256, 1024)),
        optimizer=replace(base.optimizer, learning_rate=5e-3, end_learning_rate=5e-4),
        training=replace(base.training, evaluate_every=1000),
    )
