"""Tiny Shakespeare, byte by byte, in nanoGPT's CPU budget: the best log-attention found so far.

python train.py --config configs/shakespeare_char_fading.py

The fading block: a convolution of 4 tokens before each branch, and log-attention over values of any
sign that forgets, head by head; every other layer is a sliding window of 16 tokens, with rotary
positions. 0.83M parameters, 2000 updates of 12 x 64 characters, as in shakespeare_char_cpu.py. What
to expect, and what softmax attention reaches with the same help: configs/studies/language_model.py.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("shakespeare_char_cpu.py"))
    model = replace(
        base.model,
        block="fading",
        attention=("log", "sliding_window"),
        attention_options=(("sliding_window.window_size", 16),),
        num_layers=4,
        num_heads=4,
        remat=False,
    )
    optimizer = replace(base.optimizer, learning_rate=3e-3, end_learning_rate=3e-4)
    return replace(base, model=model, optimizer=optimizer)
