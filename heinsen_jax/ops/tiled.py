"""Exact softmax attention, one block of scores at a time, over visible keys only.

One loop runs over blocks of scores, each of one tile of queries and a few of the key tiles visible
to it; nothing of quadratic size is stored. The softmax is accumulated from block to block, with the
running maximum m and the sum Z of exp(S - m). The backward pass recomputes the scores (Dao et al.,
2022, arXiv:2205.14135),

    P = exp(S - m) / Z,    dS = P (dY V^T - sum_v dY Y + d log Z),    dV = P^T dY

The visible tiles are derived from a `Mask` at trace time. If the position of the queries among the
keys is traced, as with a cache, or the number of tokens is symbolic, blocks cover all tiles, and
those without visible keys are skipped, except under `vmap` over that position.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.ops.layout import is_symbolic, varying_like
from heinsen_jax.ops.masks import Mask
from heinsen_jax.ops.numerics import share
from heinsen_jax.typing import Array

SIZE = 128  # queries or keys of a tile
OVERHEAD = 1.0  # fixed cost of a block on a CPU, in key tiles computed in the same time
OVERHEAD_ELSEWHERE = 8.0
PARTS = 3  # that represent a sum of decays
WIDTH = 2  # key tiles of a block that may be skipped


@dataclass(frozen=True)
class Products:
    """Scores S = Q K^T.

    Attributes:
      features_first: whether the layout of queries and keys is `[K, X, Q]` and `[K, X, L]` instead
        of `[X, Q, K]` and `[X, L, K]`.
    """

    features_first: ClassVar = False

    def __call__(self, query: Array, key: Array) -> Array:
        """Return the scores `[X, Q, L]`."""
        return jnp.einsum("xrk,xlk->xrl", query, key)

    def gradients(self, query: Array, key: Array, d_scores: Array) -> tuple[Array, Array]:
        """Return the gradients of the query, and of the key with its tokens on the last axis."""
        # Transposing the gradient of the key, a result, is cheap.
        return d_scores @ key, jnp.einsum("xrk,xrl->xkl", query, d_scores)


@dataclass(frozen=True)
class Problem:
    """Configuration of a call, static under tracing.

    Attributes:
      mask: visible keys of each query.
      queries: number of queries.
      keys: number of keys.
      offset: position of the first query; None if it is traced.
      scores: function of queries and keys, with gradients.
      bias: added to the sum of exp(S).
      rows: queries of a tile.
      columns: keys of a tile.
      max_width: maximum number of key tiles in a block.
    """

    mask: Mask
    queries: int
    keys: int
    offset: int | None
    scores: Any = Products()
    bias: float = 0.0
    rows: int = SIZE
    columns: int = SIZE
    max_width: int | None = None

    @property
    def is_symbolic(self) -> bool:
        """Whether the number of queries or keys is a symbolic dimension of `jax.export`."""
        return is_symbolic(self.queries) or is_symbolic(self.keys)

    @property
    def tokens_axis(self) -> int:
        """Axis of tokens in tiles of queries and keys."""
        return 3 if self.scores.features_first else 2


class _Tiles(NamedTuple):
    """Operands in I tiles of C queries and J of L keys, for X batch entries and key/value heads of
    R query heads each.

    query `[I, X, R C, K]` and key `[J + 1, X, L, K]`, or `[I, K, X, R C]` and `[J + 1, K, X, L]` if
    scores have the features first; value `[J + 1, X, L, V]`; segment ids
    `[I, X, C]` and `[J + 1, X, L]`, or None; sums of decays in parts, `[I, X, R C, 3]` and
    `[J + 1, X, L, 3 R]`, or None; and the position of the first query, if it is traced. The last
    tile of keys is padding, if blocks need it.
    """

    query: Array
    key: Array
    value: Array
    query_ids: Array | None = None
    key_ids: Array | None = None
    query_decay: Array | None = None
    key_decay: Array | None = None
    offset: Array | None = None


@partial(jax.jit, static_argnums=0)  # compiled once outside another `jit`
def attention(
    problem: Problem,
    query: Array,
    key: Array,
    value: Array,
    query_ids: Array | None,
    key_ids: Array | None,
    query_decay: Array | None = None,
    key_decay: Array | None = None,
    offset: Array | None = None,
) -> tuple[Array, Array]:
    """Return Y `[X, R, T, V]` and the log of the sum of exp(S), log Z `[X, R, T]`, for query
    `[X, R, T, K]`, key `[X, S, K]`, value `[X, S, V]`: a query with id `[X, T]` attends to the keys
    with the same id `[X, S]` that the mask allows; Y = 0 and log Z = -inf if none. The difference
    of the sums of decays `[X, R, T, 3]` and `[X, R, S, 3]`, each in three parts, is added to the
    scores; only the last part is differentiated. `offset` is the position of the first query,
    used if the problem has none."""
    length = query.shape[2]
    query_tiles = partial(_tiles, size=problem.rows)
    key_tiles = partial(_tiles, size=problem.columns, more=0 if problem.max_width == 1 else 1)
    if query_decay is not None and key_decay is not None:
        query_decay = query_tiles(query_decay)
        folds, heads, sources, _ = key_decay.shape
        keys = jnp.moveaxis(key_decay, 1, 2).reshape(folds, 1, sources, PARTS * heads)
        key_decay = key_tiles(keys)
    operands = query_tiles(query), key_tiles(key[:, None])
    if problem.scores.features_first:
        operands = (jnp.moveaxis(x, -1, 1) for x in operands)
    tiles = _Tiles(
        *operands,
        key_tiles(value[:, None]),
        None if query_ids is None else query_tiles(query_ids[:, None, :, None])[..., 0],
        None if key_ids is None else key_tiles(key_ids[:, None, :, None])[..., 0],
        query_decay,
        key_decay,
        offset,
    )
    outputs: tuple[Array, Array] = _attention(problem, tiles)
    y, log_z = (_untiled(x, problem.rows)[:, :, :length] for x in outputs)
    return y, log_z[..., 0]


def _tiles(x: Array, size: int, more: int = 0) -> Array:
    """`[X, R, T, F]` -> `[ceil(T / C) + more, X, R C, F]` with C = size, and zeros at the end."""
    folds, heads, length, features = x.shape
    tiles = -(-length // size) + more
    x = jnp.pad(x, [(0, 0), (0, 0), (0, tiles * size - length), (0, 0)])
    x = x.reshape(folds, heads, tiles, size, features)
    return jnp.moveaxis(x, 2, 0).reshape(tiles, folds, heads * size, features)


def _untiled(x: Array, size: int) -> Array:
    """`[I, X, R C, F]` -> `[X, R, I C, F]`"""
    count, folds, rows, features = x.shape
    x = jnp.moveaxis(x.reshape(count, folds, rows // size, size, features), 0, 2)
    return x.reshape(folds, rows // size, count * size, features)


class _VisibleTiles(NamedTuple):
    """Query tile of each block of scores `[blocks]`, and its key tiles `[blocks, B]`, filled up
    with J, the padding tile."""

    row: np.ndarray
    columns: np.ndarray


@lru_cache(maxsize=256)
def _visible_tiles(problem: Problem, overhead: float) -> _VisibleTiles:
    tiles = -(-problem.keys // problem.columns)
    visible = []
    for start in range(0, problem.queries, problem.rows):
        if problem.offset is None:
            visible.append(np.arange(tiles))
        else:
            first = problem.offset + start
            last = problem.offset + min(start + problem.rows, problem.queries) - 1
            visible.append(_visible_to(first, last, problem))
    most = max(1, *map(len, visible))
    limit = problem.max_width or (most if problem.offset is not None else WIDTH)
    widths = np.arange(1, 1 + min(most, limit))
    counts = -(-np.array([*map(len, visible)])[None] // widths[:, None])  # blocks per row
    best = np.argmin(counts.sum(1) * (widths + overhead))
    width = widths[best]
    row = np.repeat(np.arange(len(visible)), counts[best])
    blocks = [np.pad(x, (0, -len(x) % width), constant_values=tiles) for x in visible]
    blocks = np.concatenate(blocks).reshape(-1, width)
    return _VisibleTiles(row.astype(np.int32), blocks.astype(np.int32))


def _visible_to(first: int, last: int, problem: Problem) -> np.ndarray:
    """The tiles with keys that are visible to queries at positions from `first` to `last`."""
    mask, columns = problem.mask, problem.columns
    spans = [(max(low, 0), min(high, problem.keys - 1)) for low, high in mask.spans(first, last)]
    ranges = [np.arange(low // columns, high // columns + 1) for low, high in spans if low <= high]
    tiles = np.unique(np.concatenate([np.zeros(0, int), *ranges]).astype(int))
    if mask.is_exact:
        return tiles
    keys = tiles[:, None] * columns + np.arange(columns)
    queries = np.arange(first, last + 1)[:, None, None]
    return tiles[np.any(mask(queries, keys) & (keys < problem.keys), (0, 2))]


def _over_blocks(problem: Problem, step, sums, tiles: _Tiles):
    """Scan `step(sums, row, columns)` over all blocks and return the sums."""
    sums = varying_like(sums, tiles)

    def add(sums, block: tuple[Array, Array]):
        if problem.offset is None or problem.is_symbolic:
            is_any = jnp.any(_visible(problem, tiles, *block))
            return lax.cond(is_any, step, lambda sums, *_: sums, sums, *block), None
        return step(sums, *block), None

    return lax.scan(add, sums, _blocks(problem))[0]


def _blocks(problem: Problem) -> tuple[Array, Array]:
    """Return the query tile of each block of scores `[blocks]`, and its key tiles `[blocks, B]`."""
    if not problem.is_symbolic:
        overhead = OVERHEAD if jax.default_backend() == "cpu" else OVERHEAD_ELSEWHERE
        row, columns = _visible_tiles(problem, overhead)
        return jnp.asarray(row), jnp.asarray(columns)
    rows, columns = -(-problem.queries // problem.rows), -(-problem.keys // problem.columns)
    block = jnp.arange(rows * columns)
    return block // columns, (block % columns)[:, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(problem: Problem, tiles: _Tiles) -> tuple[Array, Array]:
    return _forward(problem, tiles)[0]


def _forward(problem: Problem, tiles: _Tiles):
    def step(sums, row: Array, columns: Array):
        largest, total, y = _row(sums, row)
        scores, _, value = _scores(problem, tiles, row, columns)
        new = jnp.maximum(largest, jnp.max(scores, -1, keepdims=True))
        weights, kept = share(scores, new), share(largest, new)
        total = kept * total + jnp.sum(weights, -1, keepdims=True)
        y = kept * y + weights @ value
        return jax.tree.map(partial(_set_row, row), sums, (new, total, y))

    _, folds, _, value_depth = tiles.value.shape
    shape = tiles.query.shape[0], folds, tiles.query.shape[problem.tokens_axis]
    zeros = jnp.zeros((*shape, 1), tiles.query.dtype)
    y = jnp.zeros((*shape, value_depth), tiles.query.dtype)
    log_bias = math.log(problem.bias) if problem.bias else -jnp.inf
    empty = jnp.full_like(zeros, log_bias), jnp.ones_like(zeros), y
    largest, total, y = _over_blocks(problem, step, empty, tiles)
    inverse = 1 / jnp.where(total == 0, 1.0, total)
    y = inverse * y
    return (y, largest + jnp.log(total)), (tiles, y, largest, inverse)


def _backward(problem: Problem, residuals, cotangents: tuple[Array, Array]):
    tiles, y, largest, inverse = residuals
    d_y, d_log_z = (inverse * x for x in cotangents)  # so that the weights need not be divided
    mean = jnp.sum(d_y * y, -1, keepdims=True) - d_log_z

    def step(sums: _Tiles, row: Array, columns: Array) -> _Tiles:
        scores, key, value = _scores(problem, tiles, row, columns)
        query, d_y_row, mean_row, m, d_query, d_query_decay = _row(
            (tiles.query, d_y, mean, largest, sums.query, sums.query_decay), row
        )
        # A recomputed score may be rounded up from the maximum. Where they are equal, `minimum`
        # would have half of the derivative.
        weights = share(jnp.where(scores > m, m, scores), m)
        d_scores = weights * (jnp.einsum("xrv,xlv->xrl", d_y_row, value) - mean_row)
        more_query, more_key = problem.scores.gradients(query, key, d_scores)
        d_value = jnp.einsum("xrv,xrl->xvl", d_y_row, weights)
        d_key_decay = sums.key_decay
        if d_key_decay is not None and sums.query_decay is not None:
            # The sums of a query are nearly 0, but they cancel the rounding errors of the others.
            more = jnp.pad(jnp.sum(d_scores, -1, keepdims=True), _only_last(3, 2))
            d_query_decay = _set_row(row, sums.query_decay, d_query_decay + more)
            d_fine = -jnp.sum(_by_head(problem, d_scores), 2)
            more = jnp.pad(d_fine[:, :, None], _only_last(4, 2))
            more = lax.collapse(more, 1, 3)
            d_key_decay = _add_columns(columns, d_key_decay, more)
        return _Tiles(
            _set_row(row, sums.query, d_query + more_query),
            _add_columns(columns, sums.key, more_key, problem.tokens_axis),
            _add_columns(columns, sums.value, d_value),
            query_decay=d_query_decay,
            key_decay=d_key_decay,
        )

    floats = tiles._replace(query_ids=None, key_ids=None, offset=None)
    zeros = jax.tree.map(jnp.zeros_like, floats)
    return (_over_blocks(problem, step, zeros, tiles),)


def _only_last(ndim: int, axis: int) -> list[tuple[int, int]]:
    """Widths that pad a single part of decays with zeros before it."""
    widths = [(0, 0)] * ndim
    widths[axis] = PARTS - 1, 0
    return widths


def _row(tree, row: Array):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, 0, keepdims=False), tree)


def _set_row(row: Array, x: Array, new: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, new, row, 0)


def _add_columns(columns: Array, x: Array, more: Array, axis: int = 2) -> Array:
    """Add `[..., B L]` to the B columns of `[J + 1, ...]`, whose tokens are on the given axis."""
    more = more.reshape(*more.shape[:-1], len(columns), x.shape[axis])
    return x.at[columns].add(jnp.moveaxis(more, (-2, -1), (0, axis)))


def _columns(x: Array, columns: Array, axis: int = 2) -> Array:
    """Return the B columns of `[J + 1, ...]`, whose tokens are on the given axis, joined there."""
    return lax.collapse(jnp.moveaxis(x[columns], 0, axis - 1), axis - 1, axis + 1)


def _by_head(problem: Problem, scores: Array) -> Array:
    """`[X, R C, B L]` -> `[X, R, C, B L]`"""
    folds, rows, num_keys = scores.shape
    return scores.reshape(folds, rows // problem.rows, problem.rows, num_keys)


def _visible(problem: Problem, tiles: _Tiles, row: Array, columns: Array) -> Array:
    """Visibility of the keys of a block under the mask, `[C, B L]`."""
    offset = tiles.offset if problem.offset is None else problem.offset
    assert offset is not None
    queries = offset + row * problem.rows + jnp.arange(problem.rows, dtype=jnp.int32)
    within = jnp.arange(problem.columns, dtype=jnp.int32)
    keys = (columns[:, None] * problem.columns + within[None]).reshape(-1)
    return problem.mask(queries[:, None], keys[None]) & (keys < problem.keys)[None]


def _scores(problem: Problem, tiles: _Tiles, row: Array, columns: Array):
    """Return a block of scores `[X, R C, B L]`, -inf for masked keys, with its keys and values."""
    query, value = _row(tiles.query, row), _columns(tiles.value, columns)
    key = _columns(tiles.key, columns, problem.tokens_axis)
    visible = _visible(problem, tiles, row, columns)[None, None]
    if tiles.query_ids is not None and tiles.key_ids is not None:
        key_ids = _columns(tiles.key_ids[..., None], columns)
        same = _row(tiles.query_ids, row)[..., None] == jnp.swapaxes(key_ids, -1, -2)
        visible = visible & same[:, None]
    scores = problem.scores(query, key)
    by_head = _by_head(problem, scores)
    if tiles.query_decay is not None and tiles.key_decay is not None:
        query_decay = _row(tiles.query_decay, row).reshape(*by_head.shape[:3], 1, PARTS)
        key_decay = _columns(tiles.key_decay, columns).reshape(
            query.shape[0], by_head.shape[3], by_head.shape[1], PARTS
        )
        key_decay = jnp.transpose(key_decay, (3, 0, 2, 1))[:, :, :, None]
        large, small, rest = jnp.moveaxis(query_decay, -1, 0) - key_decay
        by_head = by_head + (large + small) + rest
    return jnp.where(visible, by_head, -jnp.inf).reshape(scores.shape), key, value


_attention.defvjp(_forward, _backward)
