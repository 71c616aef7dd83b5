"""Log-attention (Heinsen, 2024), and the attention mechanisms that it is compared with.

Subpackages and the main functions are attributes that are imported on first use, such as
`heinsen_jax.log_attention` and `heinsen_jax.attention.build`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBPACKAGES = (
    *("attention", "config", "data", "generate", "goom", "interop", "linearize", "models"),
    *("objectives", "ops", "runs", "runtime", "sharding", "storage", "training"),
)
_OF_ATTENTION = ("heinsen_attention", "log_attention", "log_attention_fn")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OF_ATTENTION:
        return getattr(importlib.import_module(f"{__name__}.attention"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, *_OF_ATTENTION})
