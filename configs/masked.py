"""Masked-byte prediction on this machine's Python library, for bidirectional mechanisms.

python train.py --config configs/masked.py [--model.attention colt5]

The quickstart's text, sizes and optimizer; needs some minutes on a CPU. 15% of the bytes are
masked. Expected: a loss on the masked bytes below 3.3, the unigram baseline.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("quickstart.py"))
    model = replace(base.model, attention="linformer", block="standard", is_causal=False)
    return replace(base, model=model, training=replace(base.training, sample_tokens=0))
