"""Softmax attention with arbitrary masks."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from heinsen_jax.ops import masks, tiled
from heinsen_jax.ops.arguments import (
    check_array,
    check_decay,
    check_heads,
    check_scores,
    check_segments,
    check_tokens,
    int32_lengths,
    segment_starts,
    signed_ids,
    valid_tokens,
    without_padding,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import fold_heads, is_at_most, unfold_heads
from heinsen_jax.ops.linear_recurrence import linear_recurrence
from heinsen_jax.ops.masks import Mask
from heinsen_jax.ops.numerics import running_sums, safe_log, where_empty
from heinsen_jax.typing import (
    Array,
    Bool,
    Float,
    Integer,
    Keys,
    Lengths,
    Mixed,
    Query,
    Segments,
    Values,
    common_dtype,
    wide,
)

Implementation = Literal["xla", "tiled", "cudnn"]
Pair = tuple[Array, Array]  # for queries and for keys
NAMES = ("xla", "tiled", "cudnn")

QUANTUM = 2.0**-8  # unit of the parts of sums of decays whose differences are exact
SMALL = 256 * 256  # scores per head up to which storing them all is fastest


@over_devices
def dot_product_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    bias: Float[Array, "*#B #N #T #S"] | Float[Array, "#T #S"] | Float[Array, "#S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"]
    | Bool[Array, "#T #S"]
    | Bool[Array, "#S"]
    | Mask
    | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Segments | None = None,
    query_seq_lengths: Integer[Array, "*B"] | None = None,
    key_value_seq_lengths: Lengths | None = None,
    query_offset: int | Integer[Array, ""] = 0,
    log_decay: Float[Array, "*B S N"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Mixed:
    r"""Softmax attention, exact.

        Y_t = sum_s P_ts V_s,    P_ts = softmax_s(scale Q_t . K_s + bias_ts + D_ts)       (1)

    over the keys s visible to t, where D_ts is the sum of the log decays of the tokens after s, up
    to t. It has these differences from `jax.nn.dot_product_attention`: it accepts any number of
    batch axes, masks as rules, and decays; an integer `local_window_size` counts the query itself;
    and a query without visible keys has the output 0, not the average of all values.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, S, num_kv_heads, value_depth]`.
      bias: added to the scores; broadcasts to `[*B, num_heads, T, S]`.
      mask: True where a key is visible to a query; broadcasts to `[*B, num_heads, T, S]`. Or a rule
        of `heinsen_jax.ops.masks`, which needs no memory; the work of fully masked tiles is
        skipped.
      is_causal: whether tokens attend only to themselves and earlier tokens.
      local_window_size: w: a query attends to the w nearest tokens on each side, itself included
        (only on the left if causal); or a pair, the numbers of tokens before and after it.
      segment_ids: `[*B, S]`: tokens attend only to tokens of equal id. T must equal S. With
        log_decay, ids must not recur: each segment is one run of equal ids.
      query_seq_lengths: `[*B]`, the number of valid queries; the others have the output 0.
      key_value_seq_lengths: `[*B]`, the number of valid keys, the rest being padding; or `[*B, 2]`,
        the first valid key and the one past the last.
      query_offset: position of the first query among the keys. May be traced, as with a cache.
      log_decay: `[*B, S, num_heads]`, <= 0, for causal attention: a forget gate (FoX), or constant,
        as in ALiBi. D is accurate to rounding in float32, whatever the sum of all decays is, for
        at most 2,097,152 keys. Decays are clipped to max(-4e9 / S, -4e6).
      scale: factor of the scores; 1 / sqrt(key_depth) when None.
      implementation: "xla" (stores all scores), "tiled" (memory linear in T and S, time
        proportional to the visible pairs, but not under `vmap` over a traced offset; no
        forward-mode differentiation, for which JAX raises "can't apply forward-mode autodiff (jvp)
        to a custom_vjp function"; second derivatives by `grad` of `grad`), "cudnn" (a fused kernel;
        half precision on GPUs), or None to choose between the first two. A named
        implementation never falls back to another.

    Returns:
      Y `[*B, T, num_heads, value_depth]`. Rows without visible keys are 0, with zero gradients.

    Raises:
      ValueError: shapes or dtypes do not fit; `log_decay` is given without `is_causal=True`, is
        above 0, or does not cover all queries; or the implementation is unknown. The message says
        which.
      NotImplementedError: the named implementation does not support the call.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> dot_product_attention(key, key, value, is_causal=True).ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Vaswani et al., 2017, Attention Is All You Need, arXiv:1706.03762; Lin et al., 2025,
      Forgetting Transformer, arXiv:2503.02130.
    """
    check_heads(query, key, value)
    check_tokens(
        key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths
    )
    check_segments(segment_ids, query, key)
    check_array("query_seq_lengths", query_seq_lengths, (query.shape[:-3],), jnp.integer)
    heads = *key.shape[:-2], query.shape[-2]
    check_array("log_decay", log_decay, (heads,), jnp.floating)
    check_decay("log_decay", log_decay)
    full = *query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3]
    check_scores("bias", bias, full)
    if not (mask is None or isinstance(mask, Mask)):
        check_scores("mask", mask, full)
        check_array("mask", mask, (mask.shape,), jnp.bool_)
    if log_decay is not None:
        _check_decay(query, key, is_causal, query_offset)
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    query = _valid_rows(query, query_seq_lengths)
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    if 0 in (query.shape[-3], key.shape[-3]):
        y = jnp.zeros((*query.shape[:-1], value.shape[-1]))
        return y.astype(common_dtype(query, value))
    if not isinstance(query_offset, int):
        query_offset = int32_lengths(query_offset)
    window = None if local_window_size is None else masks.reach(local_window_size, is_causal)
    if implementation == "cudnn":
        given = {"segment_ids": segment_ids is not None, "mask as a rule": isinstance(mask, Mask)}
        given["query_offset"] = not isinstance(query_offset, int) or query_offset != 0
        given["log_decay"] = log_decay is not None
        _refuse("cudnn", given)
        y = _cudnn(query, key, value, bias, mask, is_causal, window, key_value_seq_lengths, scale)
        return _valid_rows(y, query_seq_lengths)

    rule, mask = (mask, None) if isinstance(mask, Mask) else (masks.Everything(), mask)
    rule = rule & masks.Causal() if is_causal else rule
    rule = rule & masks.Window(*window) if window is not None else rule
    given = {"bias": bias is not None, "mask as an array": mask is not None}
    if implementation == "tiled":
        _refuse("tiled", given)
    if implementation is None and any(given.values()):
        implementation = "xla"
    groups = key.shape[-2]
    y, _ = folded_attention(
        scale * fold_heads(query, groups),
        fold_heads(key, groups)[:, 0],
        fold_heads(value, groups)[:, 0],
        rule=rule,
        ids=folded_ids(query, key, segment_ids, key_value_seq_lengths),
        decays=_decays(log_decay, query, key, segment_ids, key_value_seq_lengths, query_offset),
        bias=None if bias is None else jnp.broadcast_to(bias, full),
        mask=None if mask is None else jnp.broadcast_to(mask, full),
        offset=query_offset,
        implementation=implementation,
    )
    return _valid_rows(unfold_heads(y, query, value), query_seq_lengths)


def _valid_rows(y: Mixed, lengths: Integer[Array, "*B"] | None) -> Mixed:
    """y, with 0 beyond the number of valid queries."""
    if lengths is None:
        return y
    is_valid = valid_tokens(lengths, y.shape[:-3], y.shape[-3])
    return jnp.where(is_valid[..., None, None], y, 0)


def folded_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X S K"],
    value: Float[Array, "X S V"],
    *,
    rule: Mask,
    ids: Pair | None = None,
    decays: Pair | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    offset: int | Array = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "X R T V"], Float[Array, "X R T"]]:
    """Return the output, and log Z: the logarithm of the sum of the exponentials of a query's
    scores. `query` is scaled, heads are folded, ids are `[X, T]` and `[X, S]`, decays
    `[X, R, T, 3]` and `[X, R, S, 3]`; bias and mask are of any shape with `X R T S` elements."""
    floats = query, key, value, decays, bias
    dtype = wide(*jax.tree.leaves(floats))
    query, key, value, decays, bias = jax.tree.map(lambda x: x.astype(dtype), floats)
    is_static = isinstance(offset, int)
    if implementation is None:
        length, sources = query.shape[2], key.shape[1]
        is_dense = is_at_most(length * sources, SMALL)
        if not is_static:  # elsewhere, branches that skip tiles wait for the device
            is_dense |= is_at_most(length, tiled.SIZE - 1) or jax.default_backend() != "cpu"
        implementation = "xla" if is_dense else "tiled"
    if implementation == "xla":
        return _dense(query, key, value, rule, ids, decays, bias, mask, offset)
    if implementation != "tiled":
        raise ValueError(
            f"implementation must be None or one of {[*NAMES]}, not {implementation!r}"
        )
    sizes = query.shape[2], key.shape[1]
    problem = tiled.Problem(rule, *sizes, offset if is_static else None)
    pairs = *(ids or (None, None)), *(decays or (None, None))
    return tiled.attention(problem, query, key, value, *pairs, None if is_static else offset)


def _check_decay(query: Array, key: Array, is_causal: bool, offset: int | Array) -> None:
    if not is_causal:
        raise ValueError("log_decay: decays need causal attention; pass is_causal=True")
    if isinstance(offset, int) and offset + query.shape[-3] > key.shape[-3]:
        raise ValueError(
            f"log_decay: {query.shape[-3]} queries from query_offset={offset} on are not among the "
            f"{key.shape[-3]} keys, whose decays are given; pass the decays of all tokens"
        )


def _refuse(implementation: str, given: dict[str, bool]) -> None:
    if names := [name for name, is_given in given.items() if is_given]:
        raise NotImplementedError(
            f'implementation="{implementation}" has no {", ".join(names)}; "xla" has'
        )


def folded_ids(
    query: Array, key: Array, segment_ids: Array | None, key_value_seq_lengths: Array | None
) -> Pair | None:
    """Return segment ids of queries `[X, T]` and keys `[X, S]`: only equal ids attend to each
    other."""
    if segment_ids is None and key_value_seq_lengths is None:
        return None
    *batch, length, groups = key.shape[:-1]
    size = math.prod(batch)
    if segment_ids is None:
        ids = jnp.zeros((*batch, length), jnp.int32)
        query_ids = jnp.zeros((*batch, query.shape[-3]), ids.dtype)
    else:
        ids = query_ids = signed_ids(segment_ids)
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)
        ids = jnp.where(valid, ids, _unused(query_ids))
    query_ids = jnp.repeat(query_ids.reshape(size, query.shape[-3]), groups, 0)
    return query_ids, jnp.repeat(ids.reshape(size, length), groups, 0)


def _unused(ids: Array) -> Array:
    """Return an id `[*B, 1]` that does not occur in the same row `[*B, S]`."""
    least, most = (f(ids, -1, keepdims=True, initial=0) for f in (jnp.min, jnp.max))
    return jnp.where(least > jnp.iinfo(ids.dtype).min, least - 1, most + 1)


def _decays(
    log_decay: Array | None,
    query: Array,
    key: Array,
    segment_ids: Array | None,
    key_value_seq_lengths: Array | None,
    offset: int | Array,
) -> Pair | None:
    """Return the sums of decays up to each query `[X, R, T, 3]` and each key `[X, R, S, 3]`, in
    parts: two of multiples of a quantum, whose differences are exact, and the sums of the rests."""
    if log_decay is None:
        return None
    log_decay = log_decay.astype(wide(log_decay))
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, log_decay.shape[:-2], log_decay.shape[-2])
        log_decay = jnp.where(valid[..., None], log_decay, 0)
    axis = log_decay.ndim - 2
    large, small, rest = running_sums(log_decay, axis, QUANTUM)
    if segment_ids is None:
        rest = jnp.cumsum(rest, axis)
    else:  # per segment, so that cotangents of other segments are not added
        starts = segment_starts(segment_ids, None)[..., None]
        rest = linear_recurrence(1 - starts.astype(rest.dtype), rest, axis=axis)
    key_sums = jnp.stack([large, small, rest], -1)
    query_sums = jax.lax.dynamic_slice_in_dim(key_sums, offset, query.shape[-3], axis)
    return fold_heads(query_sums, key.shape[-2]), fold_heads(key_sums, key.shape[-2])


def _dense(query, key, value, rule, ids, decays, bias, mask, offset) -> tuple[Array, Array]:
    scores = jnp.einsum("xrtk,xsk->xrts", query, key)
    if decays is not None:
        query_sums, key_sums = (jnp.moveaxis(x, -1, 0) for x in decays)
        large, small, rest = query_sums[..., :, None] - key_sums[..., None, :]
        scores = scores + (large + small) + rest
    if bias is not None:
        scores = scores + bias.reshape(scores.shape)
    length, sources = scores.shape[2:]
    positions = jnp.arange(length, dtype=jnp.int32), jnp.arange(sources, dtype=jnp.int32)
    visible = rule(offset + positions[0][:, None], positions[1][None])
    visible = jnp.broadcast_to(visible, scores.shape)
    if mask is not None:
        visible = visible & mask.reshape(scores.shape)
    if ids is not None:
        visible = visible & (ids[0][:, :, None] == ids[1][:, None, :])[:, None]
    # Computed once: a score of 1e9, if rounded differently, could exceed the maximum by far.
    scores = jax.lax.optimization_barrier(jnp.where(visible, scores, -jnp.inf))
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - where_empty(largest, 0.0))
    total = jnp.sum(weights, -1, keepdims=True)
    y = jnp.einsum("xrts,xsv->xrtv", weights / jnp.where(total == 0, 1.0, total), value)
    return y, (safe_log(total) + largest)[..., 0]


def _cudnn(query, key, value, bias, mask, is_causal, window, lengths, scale) -> Array:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(
            f'implementation="cudnn" needs a GPU, here is {jax.default_backend()}; use "tiled"'
        )
    if lengths is not None and lengths.ndim == query.ndim - 2:
        raise NotImplementedError('implementation="cudnn" has no padding on the left; "tiled" has')
    batch = query.shape[:-3]
    one = math.prod(batch)

    def flat(x: Array | None, axes: int) -> Any:
        if x is None:
            return None
        x = x.reshape((1,) * (axes - x.ndim) + x.shape)
        x = jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - axes :]))
        return x.reshape(one, *x.shape[len(batch) :])

    y = jax.nn.dot_product_attention(
        flat(query, 3),
        flat(key, 3),
        flat(value, 3),
        flat(bias, 3),
        flat(mask, 3),
        scale=scale,
        is_causal=is_causal,
        key_value_seq_lengths=flat(lengths, 0),
        local_window_size=window,
        implementation="cudnn",
    )
    return y.reshape(*batch, *y.shape[1:])
