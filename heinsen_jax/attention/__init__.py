"""Attention: the public ops, and every mechanism as a Flax module.

Examples assume that these names, `jax.numpy` as `jnp` and `flax.nnx` as `nnx` are imported.
"""

from heinsen_jax.attention.base import Attention, AttentionConfig, Capabilities
from heinsen_jax.attention.flax_fn import log_attention_fn
from heinsen_jax.attention.heads import HeadsConfig
from heinsen_jax.attention.log import LogAttention
from heinsen_jax.attention.registry import build, configure, mechanism, names
from heinsen_jax.ops.log_attention import (
    Chunked,
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
    sharded_log_attention,
)
from heinsen_jax.ops.log_window import LogWindowState, log_window_attention

__all__ = [
    "Attention",
    "AttentionConfig",
    "Capabilities",
    "Chunked",
    "HeadsConfig",
    "HeinsenAttentionState",
    "LogAttention",
    "LogAttentionState",
    "LogWindowState",
    "build",
    "configure",
    "heinsen_attention",
    "log_attention",
    "log_attention_fn",
    "log_window_attention",
    "mechanism",
    "names",
    "sharded_log_attention",
]
