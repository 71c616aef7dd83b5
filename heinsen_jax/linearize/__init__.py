"""Linearization: from softmax attention to a mechanism with a state of constant size.

Names are imported at first use: `--help` should not wait for the trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f"{__name__}.{module}") for module in ("plan", "run"))
    return next(getattr(module, name) for module in modules if hasattr(module, name))
