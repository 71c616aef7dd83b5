"""Attention by L1 distance along the edges of a graph, in time and memory linear in their number.

Only the score and the weight of each edge are stored; features are gathered and summed for one
block of edges at a time, in the backward pass as well.
"""

import math
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from heinsen_jax.ops.arguments import check_array, check_bias, check_heads
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.typing import Array, Float, Integer, Keys, Mixed, Query, Values, common_dtype, wide

NUMBERS = 2**18  # gathered at a time, to fit a CPU's cache
NUMBERS_ELSEWHERE = 2**24


Edges = Integer[Array, "E _"] | Integer[np.ndarray, "E _"]  # E pairs, or rows of 4


@overload
def l1_sparse_attention(
    query: Query,
    key: Keys,
    value: Values,
    edges: Edges,
    *,
    denominator_bias: float = 0.0,
    normalize: bool = True,
    value_back: None = None,
) -> Mixed: ...


@overload
def l1_sparse_attention(
    query: Query,
    key: Keys,
    value: Values,
    edges: Edges,
    *,
    denominator_bias: float = 0.0,
    normalize: bool = True,
    value_back: Float[Array, "*B T N W"],
) -> tuple[Mixed, Float[Array, "*B S N W"]]: ...


@over_devices
def l1_sparse_attention(
    query: Query,
    key: Keys,
    value: Values,
    edges: Edges,
    *,
    denominator_bias: float = 0.0,
    normalize: bool = True,
    value_back: Float[Array, "*B T N W"] | None = None,
) -> Mixed | tuple[Mixed, Float[Array, "*B S N W"]]:
    r"""`l1_attention` between the pairs of queries and keys in a list of edges.

        S_e = -1/sqrt(K) sum_c |Q_dc - K_sc|        for edge e = (d, s)
        P_e = exp(S_e) / (b + sum_{e' to d} exp(S_e'))
        Y_d = sum_{e to d} P_e V_s

    where K is the head dimension of keys and b the denominator bias. An edge listed twice counts
    twice; the order of edges affects only rounding. Only reverse-mode differentiation is supported,
    for second derivatives `grad` of `grad`; in forward mode JAX raises "can't apply forward-mode
    autodiff (jvp) to a custom_vjp function".

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, S, num_kv_heads, value_depth]`.
      edges: `[E, 2]`, integers: destination d in [0, T) and source s in [0, S), the same for all
        batch entries and heads. Or `[E, 4]`, as returned by `edge_counts`; the counts are ignored.
      denominator_bias: b, at least 0. With 0 weights are a softmax; 1 acts as an additional key at
        distance 0 with value 0.
      normalize: whether weights are normalized; otherwise they are exp(S_e).
      value_back: V' `[*B, T, num_heads, depth]`, values of destinations that sources receive with
        the same weights: Y'_s = sum_{e from s} P_e V'_d.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, or a pair of it and Y' `[*B, S, num_heads, depth]` if
      `value_back` is given. Rows of tokens without edges are 0, with zero gradients. If `edges` is
      traced, as under `jit`, its range cannot be checked: an edge out of range then makes all
      results NaN.

    Raises:
      ValueError: shapes or dtypes do not fit, or an edge or the bias is out of range; the message
        says which.
      NotImplementedError: denominator_bias is given with normalize=False.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> edges = jnp.array([[0, 0], [1, 0], [1, 2]])  # destinations and sources
      >>> l1_sparse_attention(key, key, value, edges).ravel().round().tolist()
      [2.0, 7.0, 0.0]
    """
    check_heads(query, key, value)
    check_bias(denominator_bias)
    if denominator_bias and not normalize:
        raise NotImplementedError(
            "denominator_bias: unsupported with normalize=False; pass normalize=True"
        )
    if value_back is not None:
        expected = *query.shape[:-1], *value_back.shape[-1:]
        check_array("value_back", value_back, (expected,), jnp.floating)
    edges, in_range = _checked(edges, query.shape[-3], key.shape[-3])
    y, *back = _attend(
        float(denominator_bias), bool(normalize), (query, key, value, value_back), edges, in_range
    )
    return (y, *back) if back else y


@partial(jax.jit, static_argnums=(0, 1))  # compiled once outside another `jit`
def _attend(
    denominator_bias: float,
    normalize: bool,
    tokens: tuple[Array, Array, Array, Array | None],
    edges: Array,
    in_range: Any,  # 1, or NaN
) -> tuple[Array, ...]:
    query, key, value, value_back = tokens
    *batch, length, heads, depth = query.shape
    sources = key.shape[-3]
    given = [x for x in (query, key, value, value_back) if x is not None]
    dtype = common_dtype(*given)
    query, key, value, *back = (_by_token(x.astype(wide(dtype)), heads) for x in given)
    widest = max(x.shape[-1] for x in given)
    destination, source = _blocks(edges, query.shape[1] * widest, max(length, sources))
    distances = _distances(query, key, destination, source)
    scale = 1 / math.sqrt(max(depth, 1))
    if normalize:
        weights: Any = _softmax(length, scale, denominator_bias, distances, destination)
    else:
        weights = jnp.exp(-scale * distances)

    def result(values: Array, take: Array, put: Array, tokens: int) -> Array:
        y = _weighted_sums(tokens, weights, values, take, put) * in_range
        y = y.reshape(tokens, math.prod(batch), heads, values.shape[-1])
        return jnp.swapaxes(y, 0, 1).reshape(*batch, tokens, heads, values.shape[-1]).astype(dtype)

    y = result(value, source, destination, length)
    return (y, *(result(x, destination, source, sources) for x in back))


def edge_counts(edges: Edges) -> tuple[np.ndarray, int, int]:
    """Return edges with the counts by which the published kernels lay out their work.

    Args:
      edges: `[E, 2]`, destination and source; not traced.

    Returns:
      `[E, 4]` int32: destination, source, and the numbers of preceding edges with the same
        destination and with the same source; then the maximum number of edges to one destination,
        and from one source (1 for an empty list).

    Raises:
      ValueError: edges are not `[E, 2]` integers.

    Examples:
      >>> counts, max_to_one, max_from_one = edge_counts(np.array([[0, 0], [1, 0]]))
      >>> counts.tolist(), max_to_one, max_from_one
      ([[0, 0, 0, 0], [1, 0, 0, 1]], 1, 2)
    """
    _check_edges(edges, 2)
    pairs = np.asarray(edges)
    counts = [_earlier_equals(x) for x in pairs.T]
    largest = [int(np.max(x, initial=0)) + 1 for x in counts]
    return np.stack([*pairs.T, *counts], 1).astype(np.int32), largest[0], largest[1]


def _earlier_equals(x: np.ndarray) -> np.ndarray:
    order = np.argsort(x, kind="stable")
    ordered, index = x[order], np.arange(len(x))
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(x)]
    counts = np.empty_like(index)
    counts[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    return counts


def _check_edges(edges: Any, *columns: int) -> None:
    check_array("edges", edges, tuple((*edges.shape[:1], n) for n in columns), jnp.integer)


def _checked(edges: Any, length: int, sources: int) -> tuple[Array, Any]:
    """Return edges `[E, 2]`, and 1 if all are in range, otherwise NaN."""
    _check_edges(edges, 2, 4)
    edges, limits = edges[:, :2], np.array([length, sources])
    if isinstance(edges, Tracer):
        numbers = edges.astype(jnp.promote_types(edges.dtype, jnp.int32))
        inside = jnp.all((numbers >= 0) & (numbers < jnp.asarray(limits, numbers.dtype)[None]))
        return edges.astype(jnp.int32), jnp.where(inside, 1.0, jnp.nan)
    edges = np.asarray(edges)
    wrong = np.any((edges < 0) | (edges >= limits), 1)
    if wrong.any():
        edge = tuple(edges[wrong][0].tolist())
        raise ValueError(
            f"edges must be (destination, source) with destination < {length} and source < "
            f"{sources}, none negative; edge {np.argmax(wrong)} is {edge}"
        )
    return jnp.asarray(edges, jnp.int32), 1.0


def _blocks(edges: Array, features: int, nothing: int) -> tuple[Array, Array]:
    """Return destinations and sources `[J, C]`, the last block padded with an index out of
    range."""
    numbers = NUMBERS if jax.default_backend() == "cpu" else NUMBERS_ELSEWHERE
    blocks = -(-len(edges) // max(64, numbers // max(features, 1)))
    size = -(-len(edges) // max(blocks, 1))
    edges = jnp.pad(edges, [(0, blocks * size - len(edges)), (0, 0)], constant_values=nothing)
    edges = edges.reshape(blocks, size, 2)
    return edges[..., 0], edges[..., 1]


def _by_token(x: Array, heads: int) -> Array:
    """`[*B, T, G, F]` -> `[T, X, F]`, X = B N."""
    *batch, length, groups, features = x.shape
    x = jnp.repeat(x, heads // groups, -2).reshape(math.prod(batch), length, heads, features)
    return jnp.swapaxes(x, 0, 1).reshape(length, math.prod(batch) * heads, features)


def _take(x: Array, index: Array, otherwise: float = 0.0) -> Array:
    return x.at[index].get(mode="fill", fill_value=otherwise)


def _put(x: Array, index: Array, more: Array) -> Array:
    return x.at[index].add(more, mode="drop")


@jax.custom_vjp
def _distances(query: Array, key: Array, destination: Array, source: Array) -> Array:
    """Return sum_c |Q_dc - K_sc| `[J, C, X]` for query `[T, X, K]` and key `[S, X, K]`."""

    def block(ends):
        return jnp.sum(jnp.abs(_take(query, ends[0]) - _take(key, ends[1])), -1)

    return lax.map(block, (destination, source))


def _distances_forward(query, key, destination, source):
    return _distances(query, key, destination, source), (query, key, destination, source)


def _distances_backward(saved, d_distances):
    query, key, *ends = saved

    def block(sums, edges):
        destination, source, d_distance = edges
        # The derivative of |x| at 0 is 0 here, but 1 for jnp.abs.
        d = jnp.sign(_take(query, destination) - _take(key, source)) * d_distance[..., None]
        return (_put(sums[0], destination, d), _put(sums[1], source, -d)), None

    zeros = varying_like((jnp.zeros_like(query), jnp.zeros_like(key)), d_distances)
    sums, _ = lax.scan(block, zeros, (*ends, d_distances))
    return *sums, None, None


_distances.defvjp(_distances_forward, _distances_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _softmax(length: int, scale: float, bias: float, distances: Array, destination: Array) -> Array:
    """Return exp(-scale distance), divided by its sum per destination plus the bias,
    `[J, C, X]`."""
    return _softmax_forward(length, scale, bias, distances, destination)[0]


def _softmax_forward(length, scale, bias, distances, destination):
    phantom = -math.log(bias) / scale if bias else math.inf
    nearest = jnp.full((length, distances.shape[-1]), phantom, distances.dtype)
    nearest = nearest.at[destination].min(lax.stop_gradient(distances), mode="drop")
    # Scaled after the difference, so that rounding of large scores does not enter. Weights do not
    # depend on the bound, which therefore needs no derivative.
    bound = _take(nearest, destination)
    is_far = bound == math.inf
    weights = jnp.exp(-scale * jnp.where(is_far, 0.0, distances - jnp.where(is_far, 0.0, bound)))
    total = jnp.exp(-scale * (phantom - jnp.where(nearest == math.inf, 0.0, nearest)))
    weights = weights / _take(_put(total, destination, weights), destination, 1.0)
    return weights, (weights, destination)


def _softmax_backward(length, scale, bias, saved, d_weights):
    weights, destination = saved
    mean = jnp.zeros((length, weights.shape[-1]), weights.dtype)
    mean = _put(mean, destination, weights * d_weights)
    return -scale * weights * (d_weights - _take(mean, destination)), None


_softmax.defvjp(_softmax_forward, _softmax_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sums(tokens: int, weights: Array, values: Array, take: Array, put: Array) -> Array:
    """Sum P_e V_take(e) over the edges of each `put`: `[tokens, X, V]` for weights `[J, C, X]`."""

    def block(sums, edges):
        weight, take, put = edges
        return _put(sums, put, weight[..., None] * _take(values, take)), None

    empty = jnp.zeros((tokens, *values.shape[1:]), values.dtype)
    return lax.scan(block, varying_like(empty, values), (weights, take, put))[0]


def _weighted_sums_forward(tokens, weights, values, take, put):
    return _weighted_sums(tokens, weights, values, take, put), (weights, values, take, put)


def _weighted_sums_backward(_, saved, d_sums):
    weights, values, take, put = saved

    def block(ends):
        return jnp.sum(_take(d_sums, ends[1]) * _take(values, ends[0]), -1)

    d_weights = lax.map(block, (take, put))
    return d_weights, _weighted_sums(len(values), weights, d_sums, put, take), None, None


_weighted_sums.defvjp(_weighted_sums_forward, _weighted_sums_backward)
