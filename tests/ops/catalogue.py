"""Catalogue of ops that map tokens to tokens, with the capabilities checked by
`conformance_test.py`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops import (
    AdditiveState,
    CompressedCache,
    Compression,
    HeinsenAttentionState,
    LinearAttentionState,
    LogWindowState,
    MLSTMState,
    SegmentState,
    additive_pooling,
    block_sparse_attention,
    block_sums,
    dilated_attention,
    dot_product_attention,
    gated_delta_rule,
    l1_attention,
    l1_sparse_attention,
    linear_attention,
    linformer_attention,
    log_window_attention,
    longformer_attention,
    memory_compressed_attention,
    mla_attention,
    mlstm_attention,
    performer_attention,
    segment_recurrence,
    sliding_window_attention,
    taylor_attention,
    tglobal_attention,
)

BATCH, LENGTH = 2, 131  # more than a block of 64 or 128 tokens, and odd
QUERY_KEY_VALUE = (4, 3), (2, 3), (2, 2)
HEADS = (2, 3), (2, 3), (2, 2)  # as many query heads as key/value heads


@dataclass(frozen=True)
class Op:
    """Function of arrays `[BATCH, LENGTH, *features]`, then of constants without these axes."""

    function: Callable[..., Any]
    features: tuple[tuple[int, ...], ...] = QUERY_KEY_VALUE
    constants: tuple[tuple[int, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    is_causal: bool = True
    has_segments: bool = False
    padding: str | None = None
    """None, or "right" (with positions that padding on the left would shift), or "both" sides."""
    first_masked: int = 0
    """Arrays from this one on may hold NaN at padding."""
    finite_constants: bool = True
    """Whether the gradients of constants are finite, too, with NaN at padding."""
    empty_row: str = "zero"
    """Output of a query without visible keys: "zero" or "other"."""
    state: Callable[..., Any] | None = None
    """Constructor `state(batch shape, dtype, *constants)` of the empty state, for an op that
    streams."""
    largest: float = 1000.0
    """Standard deviation of inputs for which outputs and gradients must be finite."""
    half_error: float = 0.0
    """Tolerance of outputs in bfloat16, relative to the largest; 0 if all is computed in
    float32."""

    def __call__(self, arrays: Any, constants: Any, **options: Any) -> Any:
        return self.function(*arrays, *constants, **self.options, **options)


def pooling_state(*, size: int | None) -> Callable[..., Any]:
    def empty(batch: tuple[int, ...], dtype: Any) -> AdditiveState:
        return AdditiveState.empty(batch, 2, 3, size, dtype)

    return empty


def linear_state(batch: tuple[int, ...], dtype: Any, *_: Any) -> LinearAttentionState:
    return LinearAttentionState.empty(batch, 2, 3, 2, dtype)


def gated(
    query: Any,
    key: Any,
    value: Any,
    decay: Any,
    erase: Any = None,
    write: Any = None,
    **options: Any,
) -> Any:
    """Gated delta rule with gates from arrays of any values; small shares are erased, so that the
    state remains bounded."""
    if erase is not None:
        options["erase"] = jnp.clip(erase, 0, 0.25)
    if write is not None:
        options["write"] = write
    return gated_delta_rule(query, key, value, log_decay=jnp.minimum(decay, 0), **options)


def matrix_state(batch: tuple[int, ...], dtype: Any, *_: Any, heads: int = 2) -> Any:
    return jnp.zeros((*batch, heads, 3, 2), dtype)


def mlstm(query: Any, key: Any, value: Any, inputs: Any, forget: Any, **options: Any) -> Any:
    options |= {"log_input_gate": inputs, "log_forget_gate": jnp.minimum(forget, 0)}
    return mlstm_attention(query, key, value, **options)


def mlstm_state(batch: tuple[int, ...], dtype: Any, *_: Any) -> MLSTMState:
    return MLSTMState.empty(batch, 2, 3, 2, dtype)


def taylor_state(batch: tuple[int, ...], dtype: Any, *_: Any) -> LinearAttentionState:
    return LinearAttentionState.empty(batch, 2, 10, 2, dtype)


def log_window(*arrays: Any, **options: Any) -> Any:
    options |= {"log_weight": arrays[5], "log_decay": jnp.minimum(arrays[6], 0)}
    return log_window_attention(*arrays[:5], **options)


def log_window_state(batch: tuple[int, ...], dtype: Any, *_: Any) -> LogWindowState:
    return LogWindowState.empty(batch, 2, 3, 2, 5, 9, dtype, has_decay=True)


def forgetting(query: Any, key: Any, value: Any, decay: Any, **options: Any) -> Any:
    options |= {"is_causal": True, "log_decay": jnp.minimum(decay, 0)}
    return dot_product_attention(query, key, value, **options)


NUM_FEATURES = 5


def relu_state(batch: tuple[int, ...], dtype: Any, *_: Any) -> LinearAttentionState:
    return LinearAttentionState.empty(batch, 2, NUM_FEATURES, 2, dtype)


def performer_state(batch: tuple[int, ...], dtype: Any, *_: Any) -> HeinsenAttentionState:
    return HeinsenAttentionState.empty(batch, 2, NUM_FEATURES, 2, dtype)


RADIUS, BLOCK = 3, 5


def summarized(x: Any, *, is_causal: bool, key_value_seq_lengths: Any = None) -> Any:
    """Transient global attention of one head whose queries, keys and values are the input."""
    options = {"is_causal": is_causal, "key_value_seq_lengths": key_value_seq_lengths}
    sums, _ = block_sums(x, BLOCK, **options)
    heads = (y.astype(x.dtype)[..., None, :] for y in (x, x, x, sums, sums))
    return tglobal_attention(*heads, radius=RADIUS, block_size=BLOCK, **options)[..., 0, :]


def compressed(query: Any, key: Any, value: Any, *constants: Any, **options: Any) -> Any:
    """Memory-compressed attention, with the arrays of its two `Compression`s."""
    pair = Compression(*constants[:3]), Compression(*constants[3:])
    if options.get("return_state") and options.get("initial_state") is None:
        batch, dtype = query.shape[:-3], query.dtype
        options["initial_state"] = compressed_state(batch, dtype, *constants)
    return memory_compressed_attention(query, key, value, *pair, **options)


def compressed_state(batch: tuple[int, ...], dtype: Any, *constants: Any) -> CompressedCache:
    pair = Compression(*constants[:3]), Compression(*constants[3:])
    return CompressedCache.empty(batch, *pair, capacity=LENGTH, dtype=dtype)


COMPRESSIONS = (2, 3, 3, 3), (2, 3), (2, 3), (2, 3, 2, 2), (2, 2), (2, 2)


def causal_layer(x: Any) -> Any:
    """Softmax attention with positions and fixed weights, in the precision of its input."""
    length, width = x.shape[-2:]
    position = np.sin(np.arange(length)[:, None] * (1 + np.arange(width)))
    weights = np.random.default_rng(0).standard_normal((3, width, width)).astype(x.dtype)
    h = x + jnp.broadcast_to(position.astype(x.dtype), x.shape)
    query, key, value = (h @ w for w in weights)
    scores = jnp.einsum("...td,...sd->...ts", query, key)
    scores = jnp.where(np.broadcast_to(np.tri(length) > 0, scores.shape), scores, -1e30)
    return x + jnp.tanh(jax.nn.softmax(scores, -1) @ value)


SEGMENT = 16


def recurrent(x: Any, memory: Any, **options: Any) -> Any:
    """The recurrence of RMT over segments, around `causal_layer`."""
    memory = None if options.get("initial_state") is not None else memory
    return segment_recurrence(causal_layer, x, memory, segment_length=SEGMENT, **options)


def recurrent_state(batch: tuple[int, ...], dtype: Any, memory: Any) -> SegmentState:
    memory = jnp.broadcast_to(memory.astype(dtype), (*batch, *memory.shape))
    return SegmentState.start(memory, SEGMENT)


def with_global_tokens(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Longformer attention with two global tokens, if the sequence is not empty."""
    positions = (0, 50) if query.shape[-3] else ()
    options |= {"local_window_size": 4, "global_positions": positions, "is_causal": True}
    return longformer_attention(query, key, value, **options)


def near_edges(query: Any, key: Any, value: Any) -> Any:
    """L1 attention along edges from each token to itself and the 3 before."""
    tokens = np.arange(query.shape[-3])
    distance = tokens[:, None] - tokens
    return l1_sparse_attention(query, key, value, np.argwhere((distance >= 0) & (distance < 4)))


def both_directions(op: Op, name: str) -> dict[str, Op]:
    """An op that has the argument `is_causal`, causal and bidirectional."""
    fields = vars(op)
    causal = Op(**fields | {"options": op.options | {"is_causal": True}})
    other = {"options": op.options | {"is_causal": False}, "is_causal": False, "state": None}
    return {name: causal, f"{name}, bidirectional": Op(**fields | other)}


PACKED = {"has_segments": True, "padding": "both"}
MLA = {
    "features": ((4, 3), (4, 4), (6,), (4,)),
    "constants": ((4, 6, 3), (4, 6, 5)),
    "first_masked": 2,
    "half_error": 0.05,
    **PACKED,
}
OPS: dict[str, Op] = {
    **both_directions(Op(linear_attention, **PACKED, state=linear_state, largest=1e15), "linear"),
    **both_directions(
        Op(performer_attention, constants=((NUM_FEATURES, 3),), **PACKED, state=performer_state),
        "performer",
    ),
    "performer, relu": Op(
        partial(performer_attention, kernel="relu"),
        constants=((NUM_FEATURES, 3),),
        **PACKED,
        state=relu_state,
    ),
    "gated, by head": Op(gated, (*HEADS, (2,)), **PACKED, state=matrix_state),
    "gated, by feature": Op(gated, (*HEADS, (2, 3)), **PACKED, state=matrix_state),
    "delta rule, by head": Op(
        gated, (*HEADS, (2,), (2,), (2,)), **PACKED, state=matrix_state, largest=1
    ),
    "delta rule, by feature": Op(
        gated, (*HEADS, (2, 3), (2, 3), (2, 2)), **PACKED, state=matrix_state, largest=1
    ),
    "delta rule, shared keys": Op(
        gated,
        ((2, 3), (2, 3), (4, 2), (4,), (4,), (4,)),
        **PACKED,
        state=partial(matrix_state, heads=4),
        largest=1,
    ),
    "mlstm": Op(mlstm, (*HEADS, (2,), (2,)), **PACKED, state=mlstm_state),
    **both_directions(Op(taylor_attention, **PACKED, state=taylor_state), "taylor"),
    "log_window": Op(  # segments: tests/ops/log_window_test.py
        log_window,
        (*QUERY_KEY_VALUE, (4, 5), (2, 5), (4,), (2,)),
        options={"local_window_size": 9},
        state=log_window_state,
        half_error=0.01,
    ),
    "forgetting, xla": Op(
        forgetting, (*QUERY_KEY_VALUE, (4,)), options={"implementation": "xla"}, **PACKED
    ),
    "forgetting, tiled": Op(
        forgetting, (*QUERY_KEY_VALUE, (4,)), options={"implementation": "tiled"}, **PACKED
    ),
    **both_directions(Op(l1_attention, **PACKED), "l1"),
    "l1_sparse": Op(near_edges),
    **both_directions(
        Op(partial(dot_product_attention, implementation="xla"), **PACKED), "softmax, xla"
    ),
    **both_directions(
        Op(partial(dot_product_attention, implementation="tiled"), **PACKED), "softmax, tiled"
    ),
    "sliding_window": Op(sliding_window_attention, options={"local_window_size": 9}, **PACKED),
    "dilated": Op(dilated_attention, options={"local_window_size": 5, "dilation": 8}, **PACKED),
    "longformer": Op(with_global_tokens, has_segments=True, padding="right"),
    "block_sparse": Op(
        block_sparse_attention, options={"block_size": 6}, has_segments=True, padding="right"
    ),
    **both_directions(Op(summarized, ((4,),), padding="right", half_error=0.02), "tglobal"),
    **both_directions(
        Op(additive_pooling, ((2, 3), (2,)), **PACKED, state=pooling_state(size=None)),
        "additive",
    ),
    "additive, window": Op(
        additive_pooling,
        ((2, 3), (2,)),
        options={"local_window_size": 41},
        **PACKED,
        state=pooling_state(size=41),
    ),
    "rmt": Op(recurrent, ((4,),), ((3, 4),), state=recurrent_state, half_error=0.1),
    **both_directions(
        Op(mla_attention, options={"form": "expanded"}, finite_constants=False, **MLA),
        "mla, expanded",
    ),
    "mla, absorbed": Op(mla_attention, options={"form": "absorbed", "is_causal": True}, **MLA),
    "memory_compressed": Op(
        compressed,
        constants=COMPRESSIONS,
        options={"is_causal": True, "pad": "right"},
        empty_row="other",  # the value of the null token
        state=compressed_state,
    ),
    "memory_compressed, bidirectional": Op(
        compressed,
        constants=COMPRESSIONS,
        options={"is_causal": False, "pad": "left"},
        is_causal=False,
        padding="both",
        empty_row="other",
    ),
    "linformer": Op(
        linformer_attention, constants=((LENGTH, 6),) * 2, is_causal=False, padding="right"
    ),
}
