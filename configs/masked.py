"""Fills in masked bytes of this machine's own Python library: for mechanisms that see both sides.

python train.py --config configs/masked.py [--model.attention colt5]

The quickstart's text, sizes and optimizer, on a CPU some minutes; 15% of the bytes are to be
filled in. Expected: a loss on these below 3.3, which is what the bytes' frequencies alone give.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("quickstart.py"))
    model = replace(base.model, attention="linformer", block="standard", is_causal=False)
    return replace(base, model=model, training=replace(base.training, sample_tokens=0))
