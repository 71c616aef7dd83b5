"""Attention by L1 distance, one tile of queries and keys at a time.

The softmax over tiles is computed by `tiled`. A tile of scores is summed feature by feature:
nothing larger is stored. Gradients, given the gradient dS of scores, are

    dQ_tc = -scale sum_s dS_ts sign(Q_tc - K_sc),    dK_sc = scale sum_t dS_ts sign(Q_tc - K_sc)

where sign(0) = 0: equal features of a query and a key have no gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops import masks, tiled
from heinsen_jax.ops.arguments import (
    check_array,
    check_bias,
    check_heads,
    check_segments,
    check_tokens,
    int32_lengths,
    without_padding,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import fold_heads, unfold_heads, varying_like
from heinsen_jax.ops.softmax import folded_ids
from heinsen_jax.typing import (
    Array,
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

SCORES = 2**18  # scores of a tile, to fit a CPU's cache
SCORES_ELSEWHERE = 2**22
SMALLEST = 48**2  # scores per head below which overhead exceeds the savings of a tile
UNROLLED = 16  # features per pass over a tile, and the same in the backward pass
UNROLLED_BACK = 4


@over_devices
def l1_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    is_causal: bool = False,
    denominator_bias: float = 0.0,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    query_offset: int | Integer[Array, ""] = 0,
) -> Mixed:
    r"""Softmax attention whose scores are negative L1 distances, exact.

        S_ts = -1/sqrt(K) sum_c |Q_tc - K_sc|
        Y_t = sum_s exp(S_ts) V_s / (b + sum_s exp(S_ts))

    over the keys s visible to t, where K is the head dimension of keys and b the denominator bias.
    Time is proportional to the number of visible pairs, memory linear in T and S. Only reverse-mode
    differentiation is supported, for second derivatives `grad` of `grad`; in forward mode JAX
    raises "can't apply forward-mode autodiff (jvp) to a custom_vjp function".

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, S, num_kv_heads, value_depth]`.
      is_causal: whether tokens attend only to themselves and earlier tokens.
      denominator_bias: b, at least 0. With 0 weights are a softmax; 1 acts as an additional key at
        distance 0 with value 0: a query far from all keys attends to none of them.
      segment_ids: `[*B, S]`: tokens attend only to tokens of equal id. T must equal S.
      key_value_seq_lengths: `[*B]`, the number of valid keys, the rest being padding; or `[*B, 2]`,
        the first valid key and the one past the last. Values at padding, NaN included, have no
        effect.
      query_offset: if causal, position of the first query among the keys: the number of keys before
        it in a cache. May be traced.

    Returns:
      Y `[*B, T, num_heads, value_depth]`. Rows without visible keys are 0, with zero gradients.

    Raises:
      ValueError: shapes, dtypes or the bias do not fit; the message says which.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> l1_attention(key, key, value, is_causal=True).ravel().round().tolist()
      [2.0, 3.0, 6.0]
    """
    check_heads(query, key, value)
    check_tokens(
        key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths
    )
    check_bias(denominator_bias)
    offset: Any = query_offset if is_causal else 0
    check_array("query_offset", jnp.asarray(query_offset), ((),), jnp.integer)
    check_segments(segment_ids, query, key)
    *batch, length, heads, _ = query.shape
    dtype = common_dtype(query, key, value)
    if 0 in (*batch, length, heads, key.shape[-3], value.shape[-1]):
        return jnp.zeros((*batch, length, heads, value.shape[-1]), dtype)
    query, key, value = (x.astype(wide(dtype)) for x in (query, key, value))
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    is_static = isinstance(offset, int)
    problem = tiled.Problem(
        masks.Causal() if is_causal else masks.Everything(),
        length,
        key.shape[-3],
        offset if is_static else None,
        _Distances(1 / math.sqrt(max(query.shape[-1], 1))),
        denominator_bias,
        *_sizes(query, key),
        max_width=1,
    )
    groups = key.shape[-2]
    y, _ = tiled.attention(
        problem,
        fold_heads(query, groups),
        fold_heads(key, groups)[:, 0],
        fold_heads(value, groups)[:, 0],
        *(folded_ids(query, key, segment_ids, key_value_seq_lengths) or (None, None)),
        offset=None if is_static else int32_lengths(offset),
    )
    return unfold_heads(y, query, value).astype(dtype)


@dataclass(frozen=True)
class _Distances:
    """Scores S = -scale sum_c |Q_c - K_c|, summed feature by feature, as `tiled.Products`."""

    features_first: ClassVar = True
    scale: float

    def __call__(self, query: Array, key: Array) -> Array:
        def add(distance, feature):
            return distance + _differences(jnp.abs, feature), None

        distance = jnp.zeros((*query.shape[1:], key.shape[-1]), query.dtype)
        distance = varying_like(distance, (query, key))
        return -self.scale * lax.scan(add, distance, (query, key), unroll=UNROLLED)[0]

    def gradients(self, query: Array, key: Array, d_scores: Array) -> tuple[Array, Array]:
        d_scores = self.scale * d_scores

        def one(_, feature):
            d = _differences(jnp.sign, feature) * d_scores
            return None, (-jnp.sum(d, -1), jnp.sum(d, 1))

        return lax.scan(one, None, (query, key), unroll=UNROLLED_BACK)[1]


def _differences(function: Callable[[Array], Array], feature: tuple[Array, Array]) -> Array:
    """Return a function of the differences `[X, Q, L]` of one feature `[X, Q]` and `[X, L]`."""
    query, key = feature
    return function(query[..., None] - key[:, None])


def _sizes(query: Array, key: Array) -> tuple[int, int]:
    """Return the numbers of queries and keys in a tile."""
    *batch, length, heads, _ = query.shape
    scores = SCORES if jax.default_backend() == "cpu" else SCORES_ELSEWHERE
    pairs = max(scores // (math.prod(batch) * heads), SMALLEST)
    rows = _even(length, math.isqrt(pairs))
    return rows, _even(key.shape[-3], pairs // rows)


def _even(length: int, size: int) -> int:
    """Return the size of the equal tiles, at most `size` each, into which a length is split."""
    return -(-length // -(-length // size))
