"""Attention mechanisms as pure functions of arrays, without Flax, configurations or globals.

Shape letters are defined in `heinsen_jax.typing`. Examples assume that these functions, `jax`,
`jax.numpy` as `jnp` and `numpy` as `np` are imported.
"""

from heinsen_jax.ops.additive import AdditiveState, additive_pooling, additive_weights
from heinsen_jax.ops.colt5 import (
    Routing,
    conditional_attention,
    conditional_feed_forward,
    route,
    soft_top_k,
)
from heinsen_jax.ops.context import over_context
from heinsen_jax.ops.gated_delta_rule import MatrixState, gated_delta_rule
from heinsen_jax.ops.l1 import l1_attention
from heinsen_jax.ops.l1_sparse import edge_counts, l1_sparse_attention
from heinsen_jax.ops.linear import LinearAttentionState, linear_attention
from heinsen_jax.ops.linear_recurrence import log_linear_recurrence
from heinsen_jax.ops.linformer import linformer_attention
from heinsen_jax.ops.local import (
    block_sparse_attention,
    dilated_attention,
    longformer_attention,
    sliding_window_attention,
)
from heinsen_jax.ops.log_attention import (
    Chunked,
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
    sharded_log_attention,
)
from heinsen_jax.ops.log_window import LogWindowState, log_window_attention
from heinsen_jax.ops.memory_compressed import (
    CompressedCache,
    Compression,
    memory_compressed_attention,
)
from heinsen_jax.ops.mla import latent_attention, mla_attention
from heinsen_jax.ops.mlstm import MLSTMState, mlstm_attention
from heinsen_jax.ops.performer import orthogonal_features, performer_attention
from heinsen_jax.ops.rmt import SegmentState, segment_recurrence
from heinsen_jax.ops.rotary import rotary
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.ops.taylor import taylor_attention, taylor_features
from heinsen_jax.ops.tglobal import block_sums, relative_position_bucket, tglobal_attention

__all__ = [
    "AdditiveState",
    "Chunked",
    "CompressedCache",
    "Compression",
    "HeinsenAttentionState",
    "LinearAttentionState",
    "LogAttentionState",
    "LogWindowState",
    "MLSTMState",
    "MatrixState",
    "Routing",
    "SegmentState",
    "additive_pooling",
    "additive_weights",
    "block_sparse_attention",
    "block_sums",
    "conditional_attention",
    "conditional_feed_forward",
    "dilated_attention",
    "dot_product_attention",
    "edge_counts",
    "gated_delta_rule",
    "heinsen_attention",
    "l1_attention",
    "l1_sparse_attention",
    "latent_attention",
    "linear_attention",
    "linformer_attention",
    "log_attention",
    "log_linear_recurrence",
    "log_window_attention",
    "longformer_attention",
    "memory_compressed_attention",
    "mla_attention",
    "mlstm_attention",
    "orthogonal_features",
    "over_context",
    "performer_attention",
    "relative_position_bucket",
    "rotary",
    "route",
    "segment_recurrence",
    "sharded_log_attention",
    "sliding_window_attention",
    "soft_top_k",
    "taylor_attention",
    "taylor_features",
    "tglobal_attention",
]
