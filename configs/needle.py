"""Four words to be found in a heap of others, which grows to 16 times what was learned.

python train.py --config configs/needle.py [--model.attention softmax]

On a CPU, some minutes, with the model of configs/recall.py: 800 updates of 64 texts.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.data import Needle


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("recall.py"))
    data = Needle(sequence_length=64, test_lengths=(64, 128, 256, 512, 1024))
    return replace(base, data=data, model=replace(base.model, vocab_size=data.vocab_size))
