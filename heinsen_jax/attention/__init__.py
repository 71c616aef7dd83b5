"""Attention: the public ops, and every mechanism as a Flax module."""

from heinsen_jax.attention.base import Attention, Capabilities
from heinsen_jax.attention.log import LogAttention
from heinsen_jax.attention.registry import build, names
from heinsen_jax.ops.log_attention import (
    Chunked,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)

__all__ = [
    "Attention",
    "Capabilities",
    "Chunked",
    "LogAttention",
    "LogAttentionState",
    "build",
    "heinsen_attention",
    "log_attention",
    "names",
]
