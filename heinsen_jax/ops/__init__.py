"""The mechanisms as pure functions of arrays: no Flax, no config, no globals."""

from heinsen_jax.ops.linear_recurrence import log_linear_recurrence
from heinsen_jax.ops.log_attention import (
    Chunked,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)

__all__ = [
    "Chunked",
    "LogAttentionState",
    "heinsen_attention",
    "log_attention",
    "log_linear_recurrence",
]
