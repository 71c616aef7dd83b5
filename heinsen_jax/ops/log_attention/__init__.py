"""Log-attention (Heinsen, 2024): state, implementations and dispatch."""

from heinsen_jax.ops.log_attention.api import heinsen_attention, log_attention
from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.sharded import sharded_log_attention
from heinsen_jax.ops.log_attention.state import HeinsenAttentionState, LogAttentionState

__all__ = [
    "Chunked",
    "HeinsenAttentionState",
    "LogAttentionState",
    "heinsen_attention",
    "log_attention",
    "sharded_log_attention",
]
