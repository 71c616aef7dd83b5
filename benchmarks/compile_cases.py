"""Cases of all public ops, with the arguments used by the layers of `heinsen_jax.attention`.

1024 tokens, batch 1, 8 heads, head dimension 32, float32. `lower` returns the program of an op's
value and gradient with respect to all its floating-point arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from heinsen_jax import ops

LENGTH, HEADS, DEPTH = 1024, 8, 32
WIDTH = HEADS * DEPTH
BLOCK = 16  # tokens that `tglobal_attention` summarizes
ROUTED = 64  # tokens in the heavy branches of CoLT5
DEFAULT, LARGER, LARGEST = 6.0, 8.0, 14.0  # maximum multiples of the baseline


@dataclass(frozen=True)
class Case:
    """Op, and the shapes for which it is compiled.

    Attributes:
      op: function to compile.
      shapes: shapes of its float32 arrays.
      limit: maximum CPU-seconds of compilation, in multiples of the baseline.
      integers: shapes of its int32 arrays, passed by keyword.
      max_bytes: maximum bytes of StableHLO.
    """

    op: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    limit: float = DEFAULT
    integers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    max_bytes: int | None = None


def lower(case: Case) -> jax.stages.Lowered:
    """Trace and lower the value and gradient of an op."""

    def differentiate(arrays: list[jax.Array], integers: dict[str, jax.Array], cotangent: Any):
        output, pullback = jax.vjp(lambda *arrays: case.op(*arrays, **integers), *arrays)
        return output, pullback(cotangent)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
    integers = {n: jax.ShapeDtypeStruct(s, jnp.int32) for n, s in case.integers.items()}
    output = jax.eval_shape(case.op, *arrays, **integers)
    return jax.jit(differentiate).lower(arrays, integers, output)


def decayed(attention: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    *tokens, log_decay = arrays
    return attention(*tokens, log_decay=log_decay)


def gated(query: jax.Array, key: jax.Array, value: jax.Array, *gates: jax.Array) -> jax.Array:
    """Gated delta rule with log decays and, if given, the share that is erased and written."""
    log_decay, *share = gates
    options: dict[str, Any] = {"erase": share[0], "write": share[0]} if share else {}
    return ops.gated_delta_rule(query, key, value, log_decay=log_decay, **options)


def delta(query: jax.Array, key: jax.Array, value: jax.Array, share: jax.Array) -> jax.Array:
    return ops.gated_delta_rule(query, key, value, erase=share, write=share)


def apart(*arrays: jax.Array) -> jax.Array:
    """Gated delta rule that erases along other keys than it writes."""
    query, key, value, log_decay, share, erase_key = arrays
    options: dict[str, Any] = {"erase": share, "erase_key": erase_key}
    return ops.gated_delta_rule(query, key, value, log_decay=log_decay, **options)


def in_two_steps(*arrays: jax.Array) -> jax.Array:
    query, key, value, log_decay, share = arrays
    options: dict[str, Any] = {"erase": share, "write": share, "num_steps": 2}
    return ops.gated_delta_rule(query, key, value, log_decay=log_decay, **options)


def mlstm(*arrays: jax.Array) -> jax.Array:
    *tokens, log_input, log_forget = arrays
    return ops.mlstm_attention(*tokens, log_input_gate=log_input, log_forget_gate=log_forget)


def forgetting(*arrays: jax.Array) -> jax.Array:
    *tokens, log_decay = arrays
    return ops.dot_product_attention(*tokens, log_decay=log_decay, is_causal=True)


def sharded(*arrays: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, "context")
    attention = jax.shard_map(
        ops.sharded_log_attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    return attention(*arrays)


def longformer(*arrays: jax.Array) -> jax.Array:
    query, key, value, *heads = arrays
    options: Any = {
        "local_window_size": 256,
        "global_positions": (0,),
        "global_heads": tuple(heads),
    }
    return ops.longformer_attention(query, key, value, **options)


def log_window(*arrays: jax.Array) -> jax.Array:
    names = "log_weight", "log_decay"
    options: Any = dict(zip(names, arrays[5:], strict=False))
    return ops.log_window_attention(*arrays[:5], local_window_size=64, **options)


def compressed(*arrays: jax.Array) -> jax.Array:
    query, key, value, kernel, bias, null = arrays
    compression = ops.Compression(kernel, bias, null)
    return ops.memory_compressed_attention(
        query, key, value, compression, compression, is_causal=True
    )


def tglobal(*arrays: jax.Array) -> jax.Array:
    *tokens, local_bias, global_bias = arrays
    return ops.tglobal_attention(
        *tokens,
        radius=127,
        block_size=BLOCK,
        local_bias=local_bias,
        global_bias=global_bias,
        is_causal=True,
    )


def recurrence(x: jax.Array, memory: jax.Array) -> jax.Array:
    """Recurrence over segments of a layer that is a single product, to measure the recurrence
    alone."""
    return ops.segment_recurrence(jnp.tanh, x, memory, segment_length=64)


def routing(weights: jax.Array) -> ops.Routing:
    return ops.route(ops.soft_top_k(weights, 9 / 8 * ROUTED), ROUTED)


def light_and_heavy_attention(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Conditional layers with branches of one operation each, to measure the routing alone."""
    query_routing, key_value_routing = map(routing, weights)
    return ops.conditional_attention(
        x,
        jnp.tanh,
        lambda queries, sources, mask: queries + jnp.mean(sources, -2, keepdims=True),
        query_routing,
        key_value_routing,
    )


def light_and_heavy_feed_forward(x: jax.Array, weights: jax.Array) -> jax.Array:
    return ops.conditional_feed_forward(x, jnp.tanh, jnp.tanh, routing(weights))


TOKENS = (1, LENGTH, HEADS, DEPTH)
QKV = (TOKENS,) * 3
TWICE = 1, 2 * LENGTH, HEADS, DEPTH
FEATURES = (1, LENGTH, HEADS, 2 * DEPTH)
LOGITS = (1, LENGTH, HEADS)
ROW: tuple[int, ...] = (1, LENGTH)
SEGMENTS = {"segment_ids": ROW}
X = (1, LENGTH, WIDTH)
LATENT, ROTATED = (1, LENGTH, WIDTH // 4), (1, LENGTH, DEPTH // 2)
UP = (HEADS, WIDTH // 4, DEPTH)
SUMMARIES = (1, LENGTH // BLOCK, HEADS, DEPTH)
SOFTMAX_BASELINE = Case(partial(jax.nn.dot_product_attention, is_causal=True), QKV, 1.0)

LOG_ATTENTION = {
    "heinsen_attention": Case(ops.heinsen_attention, QKV, max_bytes=115_000),
    "heinsen_attention, decay": Case(
        partial(decayed, ops.heinsen_attention), (*QKV, LOGITS), LARGEST, max_bytes=150_000
    ),
    "heinsen_attention, segments": Case(
        ops.heinsen_attention, QKV, LARGEST, SEGMENTS, max_bytes=155_000
    ),
    "log_attention": Case(ops.log_attention, QKV, LARGER, max_bytes=165_000),
    "log_attention, decay by head": Case(
        partial(decayed, ops.log_attention), (*QKV, LOGITS), LARGEST, max_bytes=195_000
    ),
    "log_attention, decay by feature": Case(
        partial(decayed, ops.log_attention), (*QKV, TOKENS), LARGEST, max_bytes=215_000
    ),
    "log_attention, segments": Case(ops.log_attention, QKV, LARGEST, SEGMENTS, max_bytes=200_000),
    "log_attention, window": Case(
        partial(ops.log_attention, local_window_size=256), QKV, LARGEST, max_bytes=395_000
    ),
    "log_attention, bidirectional": Case(
        partial(ops.log_attention, is_causal=False), QKV, LARGER, max_bytes=115_000
    ),
    "log_attention, scan": Case(
        partial(ops.log_attention, implementation="scan"), QKV, LARGER, max_bytes=120_000
    ),
    "log_attention, reference": Case(
        partial(ops.log_attention, implementation="reference"), QKV, LARGER
    ),
    "sharded_log_attention": Case(sharded, QKV, LARGEST, max_bytes=275_000),
    "performer_attention": Case(ops.performer_attention, (*QKV, (2 * DEPTH, DEPTH)), LARGER),
    "log_window_attention": Case(
        log_window, (*QKV, FEATURES, FEATURES, LOGITS), LARGEST, max_bytes=180_000
    ),
    "log_window_attention, decay": Case(
        log_window, (*QKV, FEATURES, FEATURES, LOGITS, LOGITS), LARGEST, max_bytes=210_000
    ),
}

GATED_DELTA_RULE = {
    "gated_delta_rule": Case(ops.gated_delta_rule, QKV, max_bytes=42_000),
    "gated_delta_rule, decay by head": Case(gated, (*QKV, LOGITS), max_bytes=70_000),
    "gated_delta_rule, decay by feature": Case(gated, (*QKV, TOKENS), max_bytes=85_000),
    "gated_delta_rule, erasure": Case(delta, (*QKV, LOGITS), max_bytes=70_000),
    "gated_delta_rule, decay by head, erasure": Case(
        gated, (*QKV, LOGITS, LOGITS), max_bytes=95_000
    ),
    "gated_delta_rule, decay by feature, erasure": Case(
        gated, (*QKV, TOKENS, LOGITS), max_bytes=115_000
    ),
    "gated_delta_rule, erasure of another key": Case(
        apart, (*QKV, TOKENS, TOKENS, TOKENS), LARGER, max_bytes=140_000
    ),
    "gated_delta_rule, two steps": Case(
        in_two_steps, (TOKENS, *(TWICE,) * 2, LOGITS, TWICE[:-1]), LARGER, max_bytes=105_000
    ),
    "mlstm_attention": Case(mlstm, (*QKV, LOGITS, LOGITS), LARGER, max_bytes=110_000),
}

OTHERS = {
    "taylor_attention": Case(
        ops.taylor_attention, ((1, LENGTH, HEADS, 8), (1, LENGTH, HEADS, 8), TOKENS)
    ),
    "dot_product_attention, decay": Case(forgetting, (*QKV, LOGITS)),
    "log_linear_recurrence": Case(ops.log_linear_recurrence, ((8, LENGTH, DEPTH),) * 2),
    "linear_attention": Case(ops.linear_attention, QKV),
    "linear_attention, segments": Case(ops.linear_attention, QKV, integers=SEGMENTS),
    "linear_attention, bidirectional": Case(partial(ops.linear_attention, is_causal=False), QKV),
    "performer_attention, relu": Case(
        partial(ops.performer_attention, kernel="relu"), (*QKV, (2 * DEPTH, DEPTH))
    ),
    "additive_pooling": Case(ops.additive_pooling, (TOKENS, LOGITS)),
    "additive_pooling, window": Case(
        partial(ops.additive_pooling, local_window_size=256), (TOKENS, LOGITS)
    ),
    "additive_pooling, bidirectional": Case(
        partial(ops.additive_pooling, is_causal=False), (TOKENS, LOGITS)
    ),
    "additive_weights": Case(ops.additive_weights, (LOGITS,)),
    "dot_product_attention": Case(partial(ops.dot_product_attention, is_causal=True), QKV),
    "dot_product_attention, segments": Case(
        partial(ops.dot_product_attention, is_causal=True), QKV, integers=SEGMENTS
    ),
    "dot_product_attention, xla": Case(
        partial(ops.dot_product_attention, is_causal=True, implementation="xla"), QKV
    ),
    "sliding_window_attention": Case(
        partial(ops.sliding_window_attention, local_window_size=256), QKV
    ),
    "dilated_attention": Case(
        partial(ops.dilated_attention, local_window_size=64, dilation=4), QKV
    ),
    "longformer_attention": Case(longformer, 2 * QKV),
    "block_sparse_attention, fixed": Case(partial(ops.block_sparse_attention, block_size=64), QKV),
    "block_sparse_attention, strided": Case(
        partial(ops.block_sparse_attention, block_size=64, pattern="strided"), QKV
    ),
    "memory_compressed_attention": Case(
        compressed, (*QKV, (HEADS, 3, DEPTH, DEPTH), (HEADS, DEPTH), (HEADS, DEPTH))
    ),
    "linformer_attention": Case(ops.linformer_attention, (*QKV, (LENGTH, 64), (LENGTH, 64))),
    "mla_attention": Case(
        partial(ops.mla_attention, is_causal=True),
        (TOKENS, (1, LENGTH, HEADS, DEPTH // 2), LATENT, ROTATED, UP, UP),
    ),
    "mla_attention, absorbed": Case(
        partial(ops.mla_attention, is_causal=True, form="absorbed"),
        (TOKENS, (1, LENGTH, HEADS, DEPTH // 2), LATENT, ROTATED, UP, UP),
    ),
    "l1_attention": Case(partial(ops.l1_attention, is_causal=True), QKV),
    "l1_sparse_attention": Case(ops.l1_sparse_attention, QKV, integers={"edges": (16 * LENGTH, 2)}),
    "tglobal_attention": Case(tglobal, (*QKV, SUMMARIES, SUMMARIES, (32, HEADS), (32, HEADS))),
    "block_sums": Case(lambda x: ops.block_sums(x, BLOCK, is_causal=True)[0], (X,)),
    "segment_recurrence": Case(recurrence, (X, (16, WIDTH))),
    "soft_top_k": Case(partial(ops.soft_top_k, k=ROUTED), (ROW,)),
    "conditional_attention": Case(light_and_heavy_attention, (X, ROW, ROW)),
    "conditional_feed_forward": Case(light_and_heavy_feed_forward, (X, ROW)),
    "rotary": Case(lambda x: ops.rotary(x, jnp.arange(LENGTH)), (TOKENS,)),
}

CASES: dict[str, Case] = LOG_ATTENTION | GATED_DELTA_RULE | OTHERS
