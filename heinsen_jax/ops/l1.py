"""Attention by L1 distance, one tile of queries and keys at a time.

A tile of scores is summed feature by feature: nothing larger is stored, and tiles of future keys
are skipped. The softmax is accumulated from tile to tile, with the running maximum m and the sum Z
of exp(S - m); the backward pass recomputes the scores (Dao et al., 2022, arXiv:2205.14135):

    P = exp(S - m) / Z,    dS = P (dY V^T - sum_v dY Y),    dV = P^T dY
    dQ_tc = -scale sum_s dS_ts sign(Q_tc - K_sc),    dK_sc = scale sum_t dS_ts sign(Q_tc - K_sc)

where sign(0) = 0: equal features of a query and a key have no gradient.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import (
    check_array,
    check_bias,
    check_heads,
    check_segments,
    check_tokens,
    int32_lengths,
    valid_tokens,
    without_padding,
)
from heinsen_jax.ops.layout import fold_heads, unfold_heads
from heinsen_jax.ops.numerics import share
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
)

SCORES = 2**18  # scores of a tile, to fit a CPU's cache
SCORES_ELSEWHERE = 2**22
SMALLEST = 48**2  # scores per head below which overhead exceeds the savings of a tile
UNROLLED = 16  # features per pass over a tile, and the same in the backward pass
UNROLLED_BACK = 4


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
    differentiation is supported, and second derivatives, by `grad` of `grad`, only if not causal.
    Otherwise JAX raises "can't apply forward-mode autodiff (jvp) to a custom_vjp function" or
    "Reverse-mode differentiation does not work for lax.while_loop"; `l1_sparse_attention` has
    second derivatives, given the causal edges.

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
    offset = jnp.asarray(query_offset)
    check_array("query_offset", offset, ((),), jnp.integer)
    offset = int32_lengths(offset)
    check_segments(segment_ids, query, key)
    *batch, length, heads, _ = query.shape
    dtype = jnp.result_type(query, key, value)
    if 0 in (*batch, length, heads, key.shape[-3], value.shape[-1]):
        return jnp.zeros((*batch, length, heads, value.shape[-1]), dtype)
    query, key, value = (x.astype(jnp.promote_types(dtype, "float32")) for x in (query, key, value))
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    valid = jnp.ones(key.shape[:-2], bool)
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), key.shape[-3])
    scale = 1 / math.sqrt(max(query.shape[-1], 1))
    problem = _Problem(scale, denominator_bias, is_causal, *_sizes(query, key))
    y = _compiled(problem, query, key, value, valid, segment_ids, offset)
    y = jnp.moveaxis(y, 0, 2)
    y = y.reshape(*y.shape[:2], -1, y.shape[-1])[:, :, :length]
    return unfold_heads(y, query, value).astype(dtype)


@dataclass(frozen=True)
class _Problem:
    """Configuration of a call, static under tracing."""

    scale: float
    bias: float
    is_causal: bool
    rows: int  # C, queries per tile
    columns: int  # L, keys per tile


class _L1Tiles(NamedTuple):
    """Operands: I tiles of C queries and J tiles of L keys, for X batch entries and key/value heads
    of R query heads each."""

    query: Float[Array, "I K X R C"]
    key: Float[Array, "J K X L"]
    value: Float[Array, "J X L V"]


class _MaskData(NamedTuple):
    """Data of the mask: valid keys of the same segment, up to the query if causal."""

    valid: Bool[Array, "J X L"]
    query_ids: Integer[Array, "I X C"] | None
    key_ids: Integer[Array, "J X L"] | None
    offset: Integer[Array, ""]


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


@partial(jax.jit, static_argnums=0, inline=True)  # compiled once outside another `jit`
def _compiled(problem: _Problem, *arrays: Any) -> Array:
    return _attention(problem, *_tiled(problem, *arrays))


def _tiled(
    problem: _Problem,
    query: Array,
    key: Array,
    value: Array,
    valid: Array,
    segment_ids: Array | None,
    offset: Array,
) -> tuple[_L1Tiles, _MaskData]:
    groups = key.shape[-2]

    def token_tiles(x: Array, size: int) -> Array:
        return _tiles(jnp.repeat(x.reshape(-1, x.shape[-1]), groups, 0), size, 1)

    query_ids = key_ids = None
    if segment_ids is not None:
        query_ids = token_tiles(segment_ids, problem.rows)
        key_ids = token_tiles(segment_ids, problem.columns)
    tiles = _L1Tiles(
        jnp.moveaxis(_tiles(fold_heads(query, groups), problem.rows, 2), -1, 1),
        jnp.moveaxis(_tiles(fold_heads(key, groups)[:, 0], problem.columns, 1), -1, 1),
        _tiles(fold_heads(value, groups)[:, 0], problem.columns, 1),
    )
    return tiles, _MaskData(token_tiles(valid, problem.columns), query_ids, key_ids, offset)


def _tiles(x: Array, size: int, axis: int) -> Array:
    """Split an axis into tiles, the first axis of the result; the last tile is padded with
    zeros."""
    tiles = -(-x.shape[axis] // size)
    x = jnp.pad(x, [(0, tiles * size - n if i == axis else 0) for i, n in enumerate(x.shape)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], tiles, size, *x.shape[axis + 1 :]), axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(problem: _Problem, tiles: _L1Tiles, mask_data: _MaskData) -> Array:
    """Y `[I, X, R, C, V]`."""
    return _forward(problem, tiles, mask_data)[0]


def _scores(problem: _Problem, tiles: _L1Tiles, mask_data: _MaskData, i: Array, j: Array) -> Array:
    """Return scores `[X, R, C, C']` of a tile of queries and one of keys, -inf where masked."""
    query, key = tiles.query[i], tiles.key[j]

    def add(distance, feature):
        q, k = feature
        return distance + jnp.abs(q[..., None] - k[:, None, None]), None

    distance = jnp.zeros((*query.shape[1:], problem.columns), query.dtype)
    distance, _ = lax.scan(add, distance, (query, key), unroll=UNROLLED)
    visible = mask_data.valid[j][:, None, None]
    if mask_data.query_ids is not None and mask_data.key_ids is not None:
        same = mask_data.query_ids[i][..., None] == mask_data.key_ids[j][:, None]
        visible = visible & same[:, None]
    if problem.is_causal:
        queries = mask_data.offset + i * problem.rows + jnp.arange(problem.rows)
        keys = j * problem.columns + jnp.arange(problem.columns)
        visible = visible & (keys[None] <= queries[:, None])[None, None]
    return jnp.where(visible, -problem.scale * distance, -jnp.inf)


def _visible_tiles(problem: _Problem, mask_data: _MaskData, i: Array):
    """Return the number of key tiles visible to a tile of queries."""
    count = len(mask_data.valid)
    if not problem.is_causal:
        return count
    positions = mask_data.offset + (i + 1) * problem.rows
    return jnp.clip(-(-positions // problem.columns), 0, count)


def _weights(scores: Array, largest: Array) -> Array:
    """Return exp(scores - largest). A recomputed score may be rounded up from its maximum."""
    return share(jnp.minimum(scores, largest), largest)


def _forward(problem: _Problem, tiles: _L1Tiles, mask_data: _MaskData):
    value = tiles.value
    log_bias = math.log(problem.bias) if problem.bias else -math.inf

    def one(i):
        rows = tiles.query.shape[2:]

        def add(j, sums):
            largest, total, y = sums
            scores = _scores(problem, tiles, mask_data, i, j)
            new = jnp.maximum(largest, jnp.max(scores, -1, keepdims=True))
            weights, kept = _weights(scores, new), share(largest, new)
            total = kept * total + jnp.sum(weights, -1, keepdims=True)
            return new, total, kept * y + jnp.einsum("xrcs,xsv->xrcv", weights, value[j])

        largest = jnp.full((*rows, 1), log_bias, value.dtype)
        empty = largest, jnp.ones_like(largest), jnp.zeros((*rows, value.shape[-1]), value.dtype)
        largest, total, y = lax.fori_loop(0, _visible_tiles(problem, mask_data, i), add, empty)
        total = jnp.where(total == 0, 1.0, total)
        return y / total, largest, total

    y, largest, total = lax.map(one, jnp.arange(len(tiles.query)))
    return y, (tiles, mask_data, y, largest, total)


def _backward(problem: _Problem, saved, d_y: Array):
    tiles, mask_data, y, largest, total = saved

    def one(key_sums, i):
        query, d_row = tiles.query[i], d_y[i]
        mean = jnp.sum(d_row * y[i], -1, keepdims=True)

        def add(j, sums):
            d_query, d_key, d_value = sums
            key, value = tiles.key[j], tiles.value[j]
            weights = _weights(_scores(problem, tiles, mask_data, i, j), largest[i]) / total[i]
            d_weights = jnp.einsum("xrcv,xsv->xrcs", d_row, value)
            d_scores = problem.scale * weights * (d_weights - mean)

            def feature(_, pair):
                q, k = pair
                d = jnp.sign(q[..., None] - k[:, None, None]) * d_scores
                return None, (-jnp.sum(d, -1), jnp.sum(d, (1, 2)))

            _, (more_query, more_key) = lax.scan(feature, None, (query, key), unroll=UNROLLED_BACK)
            more_value = jnp.einsum("xrcs,xrcv->xsv", weights, d_row)
            return d_query + more_query, d_key.at[j].add(more_key), d_value.at[j].add(more_value)

        d_query, *key_sums = lax.fori_loop(
            0, _visible_tiles(problem, mask_data, i), add, (jnp.zeros_like(query), *key_sums)
        )
        return tuple(key_sums), d_query

    zeros = jnp.zeros_like(tiles.key), jnp.zeros_like(tiles.value)
    (d_key, d_value), d_query = lax.scan(one, zeros, jnp.arange(len(tiles.query)))
    return _L1Tiles(d_query, d_key, d_value), None


_attention.defvjp(_forward, _backward)
