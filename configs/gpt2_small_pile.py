"""GPT-2 small trained as the 125M model of Heinsen (2024): the same data and recipe.

python train.py --config configs/gpt2_small_pile.py

A peer for heinsen_125m_pile.py with GPT-2's sizes: 12 layers with 12 heads of softmax attention,
MLPs and learned positions, 124,475,904 parameters. Not trained by us.

References:
  Radford et al., 2019, Language Models are Unsupervised Multitask Learners.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("heinsen_125m_pile.py"))
    return replace(
        base,
        model=replace(
            base.model,
            num_layers=12,
            num_heads=12,
            attention="softmax",
            block="standard",
            positions="learned",
            max_length=base.data.sequence_length,
        ),
    )
