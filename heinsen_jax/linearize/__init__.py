"""Linearization: from softmax attention to a mechanism with a state of constant size.

Names are imported at first use: `--help` should not wait for the trainer.
"""

from typing import TYPE_CHECKING

from heinsen_jax.runtime.lazy import attributes

if TYPE_CHECKING:
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

__getattr__ = attributes(__name__, __all__, ("plan", "run"))
