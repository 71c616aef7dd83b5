"""Exact softmax attention a tile of queries at a time, against only the tiles of keys that it sees.

A tile of queries holds its scores with all the keys it sees, and nothing else of quadratic size is
ever held: backward forms them again from log Z (Dao et al., 2022, arXiv:2205.14135),

    P = exp(S - log Z),    dS = P (dY V^T - sum_v dY Y)
    dQ = dS K,             dK = dS^T Q,                    dV = P^T dY

Which tiles are seen follows from a `Mask` when a call is traced; tiles of queries that see about as
many are computed by one loop.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.ops.masks import Mask
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array

SIZE = 128  # of a tile


@dataclass(frozen=True)
class Problem:
    """What is known when a call is traced.

    Attributes:
      mask: which positions see which.
      scale: of the scores.
      queries: how many there are, in multiples of `SIZE` with padding.
      keys: how many there are, without padding.
      offset: the position of the first query.
    """

    mask: Mask
    scale: float
    queries: int
    keys: int
    offset: int


class Arrays(NamedTuple):
    """In tiles of C tokens, X batch entries and key/value heads, R query heads of each.

    query `[I, X, R C, K]`, key `[J + 1, X, C, K]`, value `[J + 1, X, C, V]`, and ids, of which a
    query sees only its own: `[I, X, C]` and `[J + 1, X, C]`, or None. The last tile of keys is one
    that nothing sees.
    """

    query: Array
    key: Array
    value: Array
    query_ids: Array | None
    key_ids: Array | None


@partial(jax.jit, static_argnums=0, inline=True)  # outside another `jit`, compiled once
def attention(
    problem: Problem,
    query: Array,
    key: Array,
    value: Array,
    query_ids: Array | None,
    key_ids: Array | None,
) -> Array:
    """Y `[X, R, T, V]` of query `[X, R, T, K]`, key `[X, S, K]`, value `[X, S, V]`; a query sees
    what the mask lets it see among keys `[X, S]` of its own id `[X, T]`; 0 if that is nothing."""
    length = query.shape[2]
    arrays = Arrays(
        _tiles(query, 0),
        _tiles(key[:, None], 1),
        _tiles(value[:, None], 1),
        None if query_ids is None else _tiles(query_ids[:, None, :, None], 0)[..., 0],
        None if key_ids is None else _tiles(key_ids[:, None, :, None], 1)[..., 0],
    )
    y: Array = _attention(problem, arrays)
    tiles, folds, rows, depth = y.shape
    y = y.reshape(tiles, folds, rows // SIZE, SIZE, depth)
    y = jnp.moveaxis(y, 0, 2).reshape(folds, rows // SIZE, tiles * SIZE, depth)
    return y[:, :, :length]


def _tiles(x: Array, more: int) -> Array:
    """`[X, R, T, F]` -> `[ceil(T / C) + more, X, R C, F]`, with zeros at the end."""
    folds, heads, length, features = x.shape
    tiles = -(-length // SIZE) + more
    x = jnp.pad(x, [(0, 0), (0, 0), (0, tiles * SIZE - length), (0, 0)])
    x = x.reshape(folds, heads, tiles, SIZE, features)
    return jnp.moveaxis(x, 2, 0).reshape(tiles, folds, heads * SIZE, features)


class _Group(NamedTuple):
    """Tiles of queries `[I']`, and tiles of keys that each sees, `[I', L]`; J stands for none."""

    rows: np.ndarray
    seen: np.ndarray


@lru_cache(maxsize=256)
def _groups(problem: Problem) -> tuple[_Group, ...]:
    tiles = -(-problem.keys // SIZE)
    keys = np.arange(problem.keys)[None]
    found: dict[int, list[tuple[int, np.ndarray]]] = {}
    for row in range(-(-problem.queries // SIZE)):
        queries = np.arange(row * SIZE, min((row + 1) * SIZE, problem.queries))[:, None]
        sees = np.any(problem.mask(problem.offset + queries, keys), 0)
        sees = np.pad(sees, (0, tiles * SIZE - problem.keys))
        seen = np.flatnonzero(sees.reshape(tiles, SIZE).any(1))
        width = min(_rounded(len(seen)), tiles)
        found.setdefault(width, []).append(
            (row, np.pad(seen, (0, width - len(seen)), "constant", constant_values=tiles))
        )
    return tuple(
        _Group(*(np.array(x, np.int32) for x in zip(*group, strict=True)))
        for _, group in sorted(found.items())
    )


def _rounded(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few loops, and little in vain."""
    power = 1 << max(count - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and count <= 3 * power // 4 else power


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(problem: Problem, arrays: Arrays) -> Array:
    return _forward(problem, arrays)[0]


def _scores(problem: Problem, arrays: Arrays, row: Array, seen: Array) -> Array:
    """Scores `[X, R C, L C]` of a tile of queries, -inf where it must not see."""
    query, key = arrays.query[row], arrays.key[seen]
    folds, rows, _ = query.shape
    within = jnp.arange(SIZE)
    queries = problem.offset + row * SIZE + within
    keys = (seen[:, None] * SIZE + within[None]).reshape(-1)
    visible = problem.mask(queries[:, None], keys[None]) & (keys < problem.keys)[None]
    visible = visible[None]
    if arrays.query_ids is not None and arrays.key_ids is not None:
        ids = jnp.moveaxis(arrays.key_ids[seen], 0, 1).reshape(folds, 1, -1)
        visible = visible & (arrays.query_ids[row][..., None] == ids)
    scores = problem.scale * jnp.einsum("xrk,lxck->xrlc", query, key)
    scores = scores.reshape(folds, rows // SIZE, SIZE, -1)
    return jnp.where(visible[:, None], scores, -jnp.inf).reshape(folds, rows, -1)


def _values(arrays: Arrays, seen: Array) -> Array:
    """`[X, L C, V]`"""
    value = jnp.moveaxis(arrays.value[seen], 0, 1)
    return value.reshape(value.shape[0], -1, value.shape[-1])


def _forward(problem: Problem, arrays: Arrays):
    def one(nothing, tile):
        row, seen = tile
        scores = _scores(problem, arrays, row, seen)
        largest = where_empty(jnp.max(scores, -1, keepdims=True), 0.0)
        weights = jnp.exp(jnp.minimum(scores - largest, 0.0))
        total = jnp.sum(weights, -1, keepdims=True)
        total = jnp.where(total == 0, 1.0, total)
        y = jnp.einsum("xrl,xlv->xrv", weights, _values(arrays, seen)) / total
        return nothing, (y, largest + jnp.log(total))

    _, (y, log_z) = _over_groups(problem, one, None)
    return y, (arrays, y, log_z)


def _over_groups(problem: Problem, one, sums):
    """`lax.scan` of `one(sums, (row, seen tiles))` over all tiles of queries: the sums, and results
    in the order of the tiles."""
    groups = _groups(problem)
    results = []
    for rows, seen in groups:
        sums, result = lax.scan(one, sums, (jnp.asarray(rows), jnp.asarray(seen)))
        results.append(result)
    order = np.argsort(np.concatenate([rows for rows, _ in groups]))
    return sums, jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *results)


def _backward(problem: Problem, saved, d_y: Array):
    arrays, y, log_z = saved

    def one(sums, tile):
        row, seen = tile
        query, d_row = arrays.query[row], d_y[row]
        scores = _scores(problem, arrays, row, seen)
        weights = jnp.exp(jnp.minimum(scores - log_z[row], 0.0))  # rounded otherwise than before
        d_weights = jnp.einsum("xrv,xlv->xrl", d_row, _values(arrays, seen))
        dot = jnp.einsum("xrv,xrv->xr", d_row, y[row])
        d_scores = problem.scale * weights * (d_weights - dot[..., None])
        by_tile = d_scores.reshape(*d_scores.shape[:2], -1, SIZE)
        d_query = jnp.einsum("xrlc,lxck->xrk", by_tile, arrays.key[seen])
        d_key = jnp.einsum("xrlc,xrk->lxck", by_tile, query)
        d_value = jnp.einsum("xrlc,xrv->lxcv", weights.reshape(by_tile.shape), d_row)

        def add(index, sums):
            def put(total: Array, part: Array) -> Array:
                tile = seen[index]
                return lax.dynamic_update_index_in_dim(total, total[tile] + part[index], tile, 0)

            return jax.tree.map(put, sums, (d_key, d_value))

        return lax.fori_loop(0, len(seen), add, sums), d_query

    sums = jnp.zeros_like(arrays.key), jnp.zeros_like(arrays.value)
    sums, d_query = _over_groups(problem, one, sums)
    return (Arrays(d_query, *sums, None, None),)


_attention.defvjp(_forward, _backward)
