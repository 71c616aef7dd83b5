"""Softmax attention over the last tokens, merged with log-attention over all earlier ones."""

import math
from typing import Literal, overload

import jax.numpy as jnp

from heinsen_jax.ops.arguments import (
    check_array,
    check_decay,
    check_heads,
    check_same_length,
    check_tokens,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.log_attention import mosaic
from heinsen_jax.ops.log_attention.call import resolve_implementation
from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.variants import AttentionPasses
from heinsen_jax.ops.log_window.merged import attend
from heinsen_jax.ops.log_window.state import LogWindowState
from heinsen_jax.ops.masks import reach
from heinsen_jax.typing import (
    Array,
    Float,
    Keys,
    Mixed,
    Query,
    Segments,
    Values,
    common_dtype,
    wide,
)

Implementation = Literal["scan", "chunked", "gpu"] | Chunked
NAMES = ("scan", "chunked", "gpu")


@overload
def log_window_attention(
    query: Query,
    key: Keys,
    value: Values,
    query_features: Float[Array, "*B T N F"],
    key_features: Float[Array, "*B S G F"],
    *,
    local_window_size: int | tuple[int, int],
    log_weight: Float[Array, "*B T N"] | None = None,
    log_decay: Float[Array, "*B S G"] | None = None,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    initial_state: LogWindowState | None = None,
    return_state: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Mixed: ...


@overload
def log_window_attention(
    query: Query,
    key: Keys,
    value: Values,
    query_features: Float[Array, "*B T N F"],
    key_features: Float[Array, "*B S G F"],
    *,
    local_window_size: int | tuple[int, int],
    log_weight: Float[Array, "*B T N"] | None = None,
    log_decay: Float[Array, "*B S G"] | None = None,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    initial_state: LogWindowState | None = None,
    return_state: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Mixed, LogWindowState]: ...


@over_devices
def log_window_attention(
    query: Query,
    key: Keys,
    value: Values,
    query_features: Float[Array, "*B T N F"],
    key_features: Float[Array, "*B S G F"],
    *,
    local_window_size: int | tuple[int, int],
    log_weight: Float[Array, "*B T N"] | None = None,
    log_decay: Float[Array, "*B S G"] | None = None,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    initial_state: LogWindowState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Mixed | tuple[Mixed, LogWindowState]:
    """Softmax attention over the last tokens and log-attention over all earlier ones, with one sum.

        Y_t = sum_s softmax_s(A_ts) V_s
        A_ts = scale Q_t . K_s                                      if t - s < w
        A_ts = LSE_f(P_tf + C_sf) + g_t + sum_(s<r<=t-w) D_r        if t - s >= w

    over the tokens s up to t. Q, K and V are the queries, keys and values of a head; P and C are
    log features of queries and keys, indexed by f; g is the log weight of earlier tokens; w is the
    window size; and D_r is the log decay of all tokens before r, applied when r leaves the window.
    Both parts are averages, and merge exactly:

        Y = (Z_1 Y_1 + exp(g) Z_2 Y_2) / (Z_1 + exp(g) Z_2)

    where Y_1 is the average and Z_1 the normalizer of softmax attention over the window, and Y_2
    and Z_2 are the same for log-attention over the earlier tokens. Causal only. The cost per token
    does not depend on the number of tokens. Nothing overflows for finite scores; sums and states
    are at least float32. Products of float32 in Y_1 have the precision that
    `jax.default_matmul_precision` sets, as in `dot_product_attention`: by default TF32 on GPUs and
    bfloat16 on TPUs. Products in Y_2 have the precision of `log_attention`.

    Args:
      query: Q `[*B, T, num_heads, key_depth]`.
      key: K `[*B, T, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: V `[*B, T, num_kv_heads, value_depth]`, of any sign.
      query_features: P `[*B, T, num_heads, num_features]`.
      key_features: C `[*B, T, num_kv_heads, num_features]`.
      local_window_size: w, the number of tokens of the window, including the query's; or a pair,
        the numbers of tokens before and after the query; the latter are never visible.
      log_weight: g `[*B, T, num_heads]`; 0 when None.
      log_decay: D `[*B, T, num_kv_heads]`, at most 0, may be -inf: before token r is added to the
        sums over earlier tokens, when it leaves the window, they are multiplied by exp(D_r). No
        decay when None.
      scale: factor of the dot products; 1 / sqrt(key_depth) when None.
      segment_ids: `[*B, T]`, integers: tokens attend only within their own segment, a run of equal
        ids. `initial_state` belongs to the first segment, the returned state to the last.
      initial_state: state after the preceding tokens; the empty state when None.
      return_state: whether to also return the state after all T tokens, in the dtype of the initial
        state.
      implementation: of log-attention, as in `log_attention`; without "reference". For second and
        forward-mode derivatives, give "scan", which stores the scores of all T x T pairs.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, or a pair of it and a `LogWindowState`.

    Raises:
      ValueError: local_window_size is invalid, the implementation is unknown, or shapes, dtypes or
        the state do not fit.
      NotImplementedError: the named implementation does not support the call.

    Examples:
      A window of one token. All scores are 0, so each output is the average of the values so far.

      >>> key = jnp.zeros((3, 1, 1))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> y = log_window_attention(key, key, value, key, key, local_window_size=1)
      >>> y.ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843; Zhang et al.,
      2024, LoLCATs, arXiv:2410.10254, which merges a window with linear attention.
    """
    arrays = query, key, value, query_features, key_features
    window_size = reach(local_window_size, is_causal=True)[0] + 1
    _check(arrays, log_weight, log_decay, segment_ids, window_size, initial_state)
    attention = _resolve_implementation(implementation, *arrays)
    *batch, length, groups, key_depth = key.shape
    state = initial_state
    if return_state and state is None:
        dtype = wide(*arrays)
        sizes = groups, key_depth, value.shape[-1], key_features.shape[-1], window_size
        state = LogWindowState.empty(batch, *sizes, dtype, has_decay=log_decay is not None)
    if 0 in (*batch, length):
        y = jnp.zeros((*query.shape[:-1], value.shape[-1]), common_dtype(query, value))
    else:
        scale = 1 / math.sqrt(max(key_depth, 1)) if scale is None else scale
        options = log_weight, log_decay, segment_ids, state, scale
        y, state = attend(window_size, attention, arrays, *options)
    return (y, state) if return_state and state is not None else y


def _check(
    arrays: tuple[Array, Array, Array, Array, Array],
    log_weight: Array | None,
    log_decay: Array | None,
    segment_ids: Array | None,
    window_size: int,
    state: LogWindowState | None,
) -> None:
    query, key, value, query_features, key_features = arrays
    check_heads(query, key, value)
    check_same_length(query, key, "log_window_attention", "it is causal only")
    num_features = key_features.shape[-1:]
    for name, x, of in (
        ("query_features", query_features, query),
        ("key_features", key_features, key),
    ):
        check_array(name, x, ((*of.shape[:-1], *num_features),), jnp.floating)
    check_array("log_weight", log_weight, (query.shape[:-1],), jnp.floating)
    check_array("log_decay", log_decay, (key.shape[:-1],), jnp.floating)
    check_decay("log_decay", log_decay)
    check_tokens(key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=None)
    if state is None:
        return
    decays = state.log_decay, state.earlier.log_decay
    if log_decay is None and any(x is not None for x in decays):
        raise ValueError("initial_state: it has decay, but log_decay is None; give log_decay")
    if log_decay is not None and any(x is None for x in decays):
        raise ValueError(
            "initial_state: it has no decay, but log_decay is given; pass the state of a call with "
            "log_decay, or LogWindowState.empty(..., has_decay=True)"
        )
    heads = *key.shape[:-3], key.shape[-2]
    for name, x in (("key", key), ("value", value), ("key_features", key_features)):
        shape = *heads, window_size, x.shape[-1]
        check_array(f"initial_state.{name}", getattr(state, name), (shape,), jnp.floating)
    features = *heads, *num_features
    mean = *features, value.shape[-1]
    check_array("initial_state.earlier.mean", state.earlier.mean, (mean,), jnp.floating)
    check_array("initial_state.earlier.log_z", state.earlier.log_z, (features,), jnp.floating)
    for name, x, shape in (
        ("log_decay", decays[0], (*heads, window_size, 1)),
        ("earlier.log_decay", decays[1], features),
    ):
        check_array(f"initial_state.{name}", x, (shape,), jnp.floating)
    check_array("initial_state.num_tokens", state.num_tokens, (heads,), jnp.integer)


def _resolve_implementation(
    chosen: Implementation | None, query: Array, key: Array, value: Array, *features: Array
) -> AttentionPasses:
    """Return the implementation of log-attention, for several tokens or, if None is chosen, one."""
    if not (chosen is None or isinstance(chosen, Chunked) or chosen in NAMES):
        raise ValueError(
            f"implementation must be a Chunked, None or one of {[*NAMES]}, not {chosen!r}"
        )
    dtype = common_dtype(query, key, value, *features)
    if chosen == "gpu":
        depths = features[0].shape[-1], value.shape[-1]
        mosaic.check(depths=depths, dtype=wide(dtype), is_causal=True)
    attention = resolve_implementation(chosen, dtype, is_one=query.shape[-3] == 1)
    assert attention is not None
    return attention
