"""Linearization: from softmax attention to a mechanism with a state of constant size."""

from heinsen_jax.linearize.plan import TRANSFER_SUFFIX, Options, Stage, attention_transfer
from heinsen_jax.linearize.run import RESULTS_FILE, linearize

__all__ = [
    "RESULTS_FILE",
    "TRANSFER_SUFFIX",
    "Options",
    "Stage",
    "attention_transfer",
    "linearize",
]
