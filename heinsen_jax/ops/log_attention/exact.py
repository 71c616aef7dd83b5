"""Causal attention by halves, exact whatever the keys and decays.

Cut a chunk in two, and every query of the right half sees all of the left one: one product, scaled
by maxima over what is seen. Inside each half it is done again, down to single tokens. So no token
that a query must not see can make anything underflow, and decays are only ever added up, never
subtracted: with -inf where a document starts.

`mean_attention` averages values of either sign: for any keys. `log_attention` stays in log space
throughout: for any keys and any log-values.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState, decayed
from heinsen_jax.ops.log_attention.tokens import Tokens, chunked, fold, unchunked, unfold
from heinsen_jax.ops.numerics import (
    Scaled,
    einsum,
    log_difference,
    log_matmul,
    log_sum_exp,
    matmul,
    scaled_matmul,
)
from heinsen_jax.typing import Array

MULTIPLE = 16  # of which the number of tokens is one
CHUNK = 32  # tokens between states, at most, of averages
CHUNK_IN_LOGS = 16  # and in log space


def mean_attention(tokens: Tokens, state: MeanState) -> tuple[Array, Array, MeanState]:
    """Y, log Z and the state after all tokens; their number is a multiple of `MULTIPLE`."""
    query, key, value, decay = _chunks(tokens, CHUNK)
    chunks = _by_halves(_WEIGHTS, query, key, value, decay)
    added = MeanState.of(chunks.to_end, value)
    before, after = _states(added, chunks.decay, fold(state))

    past = Scaled.exp(chunks.from_start + before.log_z[:, None], -1)
    total = past.sum(-1) + chunks.seen.sum(-1)
    inverse = 1 / jnp.where(total.factor == 0, 1.0, total.factor)  # first: values may be large
    y = matmul(past.at(total.exponent) * inverse, before.mean)
    y = y + matmul(chunks.seen.at(total.exponent) * inverse, value)
    return *_unchunked(tokens, y, total.log()), unfold(after, tokens)


def log_attention(
    tokens: Tokens, state: LogAttentionState
) -> tuple[Array, Array, LogAttentionState]:
    """log Y, log Z and the state after all tokens; their number is a multiple of `MULTIPLE`."""
    query, key, value, decay = _chunks(tokens, CHUNK_IN_LOGS)
    chunks = _by_halves(_SUMS, query, key, value, decay)
    added_s = log_matmul(jnp.swapaxes(chunks.to_end, 1, 2), value)
    added = LogAttentionState(added_s, log_sum_exp(chunks.to_end, 1))
    before, after = _states(added, chunks.decay, fold(state))

    past_z = Scaled.exp(chunks.from_start + before.log_z[:, None], -1).sum(-1)
    past = scaled_matmul(chunks.from_start, before.log_s), past_z
    log_s, log_z = (x.log() for x in _together(past, chunks.seen))
    return *_unchunked(tokens, log_difference(log_s, log_z), log_z), unfold(after, tokens)


class _Algebra(NamedTuple):
    """What is computed of the tokens that queries see.

    alone: queries `[N, R, K]`, and the key and value `[N, 1, .]` of their own token.
    past: queries `[N, R C, K]`, and keys and values `[N, C, .]` all of which they see.
    joined: of tokens, and of more tokens after them; None where the queries do not see those.
    """

    alone: Callable[[Array, Array, Array], Any]
    past: Callable[[Array, Array, Array], Any]
    joined: Callable[[Any, Any], Any]


def _weight_alone(query: Array, key: Array, _value: Array) -> Scaled:
    return Scaled.exp(query + key, -1).sum(-1)


def _weights_of_past(query: Array, key: Array, _value: Array) -> Scaled:
    keys = Scaled.exp(key, 1)
    queries = Scaled.exp(query + keys.exponent, -1)
    weights = einsum("nck,ndk->ncd", queries.factor, keys.factor)
    return Scaled(weights, queries.exponent)


def _beside(weights: Scaled, later: Scaled | None) -> Scaled:
    if later is None:
        nothing = jnp.zeros_like(weights.factor)
        return Scaled(jnp.concatenate([weights.factor, nothing], -1), weights.exponent)
    exponent = jnp.maximum(weights.exponent, later.exponent)
    return Scaled(jnp.concatenate([weights.at(exponent), later.at(exponent)], -1), exponent)


_WEIGHTS = _Algebra(_weight_alone, _weights_of_past, _beside)  # `[N, R C, C]`

Sums = tuple[Scaled, Scaled]  # S `[N, R C, V]` and Z `[N, R C, 1]`


def _sums_alone(query: Array, key: Array, log_value: Array) -> Sums:
    scores = log_sum_exp(query + key, 2)[..., None]
    return Scaled.exp(scores + log_value), Scaled.exp(scores)


def _sums_of_past(query: Array, key: Array, log_value: Array) -> Sums:
    scores = log_matmul(query, jnp.swapaxes(key, 1, 2))
    return scaled_matmul(scores, log_value), Scaled.exp(scores, -1).sum(-1)


def _together(sums: Sums, later: Sums | None) -> Sums:
    return sums if later is None else (sums[0] + later[0], sums[1] + later[1])


_SUMS = _Algebra(_sums_alone, _sums_of_past, _together)


class _Pieces(NamedTuple):
    """N pieces of C consecutive tokens each.

    seen: what its queries see of it, as an `_Algebra` has it.
    from_start: the queries, as they read the state before the piece, `[N, R C, K]`.
    to_end: the keys, as the state after the piece holds them, `[N, C, K]`.
    decay: of the state before it, when it ends, `[N, 1, K or 1]`; None: not at all.
    """

    seen: Any
    from_start: Array
    to_end: Array
    decay: Array | None


def _by_halves(
    algebra: _Algebra, query: Array, key: Array, value: Array, decay: Array | None
) -> _Pieces:
    size = key.shape[1]
    heads = query.shape[1] // size
    if size == 1:
        from_start = query if decay is None else query + decay
        return _Pieces(algebra.alone(query, key, value), from_start, key, decay)
    values = _halves(value)
    halves = _halves(query, heads), _halves(key), values, None if decay is None else _halves(decay)
    left, right = _alternate(_by_halves(algebra, *halves))
    past = algebra.past(right.from_start, left.to_end, values[::2])
    seen = algebra.joined(left.seen, None), algebra.joined(past, right.seen)
    seen = jax.tree.map(lambda left, right: _whole(left, right, heads), *seen)
    if decay is None:
        return _Pieces(seen, query, key, None)
    return _Pieces(
        seen,
        _whole(left.from_start, right.from_start + left.decay, heads),
        _whole(left.to_end + right.decay, right.to_end),
        left.decay + right.decay,
    )


def _halves(x: Array, heads: int = 1) -> Array:
    """`[N, R 2C, F]` -> `[2N, R C, F]`, left and right halves of the C in turn."""
    pieces, rows, features = x.shape
    x = x.reshape(pieces, heads, 2, rows // heads // 2, features)
    return jnp.swapaxes(x, 1, 2).reshape(2 * pieces, rows // 2, features)


def _alternate(halves: Any) -> tuple[Any, Any]:
    """The left ones `[N, ...]` and the right ones of `[2N, ...]`."""
    pairs = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), halves)
    return jax.tree.map(lambda x: x[:, 0], pairs), jax.tree.map(lambda x: x[:, 1], pairs)


def _whole(left: Array, right: Array, heads: int = 1) -> Array:
    """`[N, R C, F]` of halves -> `[N, R 2C, F]`"""
    pieces, rows, features = left.shape
    halves = [x.reshape(pieces, heads, rows // heads, features) for x in (left, right)]
    return jnp.concatenate(halves, 2).reshape(pieces, 2 * rows, features)


def _chunks(tokens: Tokens, most: int) -> tuple[Array, Array, Array, Array | None]:
    """Q `[N, R C, K]`, K, V and, with -inf where a document starts, decay `[N, C, .]`, N = J X."""
    decay = tokens.decay_and_starts
    size = math.gcd(tokens.length, most)

    def cut(x: Array) -> Array:
        x = chunked(x, size)
        return x.reshape(-1, *x.shape[2:])

    query, key, value = (cut(x) for x in (tokens.query, tokens.key, tokens.value))
    return query, key, value, None if decay is None else cut(decay)


def _states(added: Any, decay: Array | None, first: Any) -> tuple[Any, Any]:
    """The states before each chunk `[N, ...]` and the last one, from what each chunk adds."""

    def step(before, chunk):
        added, decay = chunk
        kept = before if decay is None else decayed(before, decay[:, 0])
        return kept.merge(added), before

    folds = len(first.log_z)
    chunks = jax.tree.map(lambda x: x.reshape(-1, folds, *x.shape[1:]), (added, decay))
    last, before = lax.scan(step, first, chunks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), before), last


def _unchunked(tokens: Tokens, y: Array, log_z: Array) -> tuple[Array, Array]:
    batch, _, groups, heads, _ = tokens.query.shape
    y, log_z = (x.reshape(-1, batch * groups, *x.shape[1:]) for x in (y, log_z))
    return unchunked(y, batch, heads), unchunked(log_z, batch, heads)[..., 0]
