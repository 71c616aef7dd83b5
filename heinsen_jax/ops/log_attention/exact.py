"""Exact tier: one `lax.scan` over chunks, for any keys and decays.

With D_ts the sum of the decays of tokens s + 1 to t, query t of a chunk attends to the tokens s of
its chunk and to the key features k of the state before the chunk, in one softmax over both:

    A_ts = LSE_k(Q_tk + K_sk + D_tsk),    P_tk = Q_tk + D_tk + log Z_k
    log Z_t = LSE(A_t, P_t),    Y_t = sum_s exp(A_ts - log Z_t) V_s + sum_k exp(P_tk - log Z_t) M_k

The state is (log Z_k, M_k), where M_k is the average of the values so far under key feature k. The
state after the chunk is a softmax as well: row k is over K_sk, decayed up to the end, of the tokens
s, and feature k of the state before. Scores are `log_scores`, exact for any queries and keys.
Decays are summed, so that -inf, the start of a segment, is exact as well; sums are subtracted only
by `_scores_by_feature`, where they are small. All outputs are convex combinations of values.

Averages are computed by `averages` or, for log-values, by `log_averages`: by the same products if
the span of the log-values allows, otherwise term by term.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import chunk, repeat_rows, unchunk
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs, Outputs
from heinsen_jax.ops.numerics import (
    Scaled,
    Softmax,
    einsum,
    finite,
    in_units,
    log_scores,
    log_sum_exp,
    matmul,
    reciprocal,
    smallest_sum,
    softmax,
)
from heinsen_jax.typing import Array, Bool, Float

CHUNK = 32
CHUNK_BY_FEATURE = 16  # with decay by feature, scores can have K terms per token of a chunk
MILD = 32.0  # nats of decay in a chunk up to which sums can be subtracted without loss


class Chunk(NamedTuple):
    """Operands of one chunk of C tokens, or of J chunks `[J, ...]`; R query heads share a key."""

    query: Float[Array, "*J X RC K"]
    key: Float[Array, "*J X C K"]
    value: Float[Array, "*J X C V"]
    decay: Float[Array, "*J X C F"] | None  # F is K, or 1
    starts: Bool[Array, "*J X C 1"] | None


Average = Callable[[Softmax, Softmax, Array, Array], tuple[Array, Array]]
"""Function (softmax of queries, of one array `[X, RC, C + K]`, and of the state, of two
`[X, C or 1, K]`, values `[X, C, V]`, averages before the chunk `[X, K, V]`) -> (outputs
`[X, RC, V]`, averages after the chunk)."""


def forward(
    average: Average, inputs: Inputs, state: Averages
) -> tuple[tuple[Outputs, Averages], Averages]:
    """Return ((Y or log Y, log Z), state after all tokens), and the states before each chunk."""

    def step(state: Averages, tokens: Chunk):
        outputs, after = _chunk(average, tokens, state)
        return after, (outputs, state)

    after, ((y, log_z), before) = lax.scan(step, state, _chunks(inputs))
    _, _, groups, heads, _ = inputs.query.shape
    outputs = unchunk(y, groups, heads), unchunk(log_z[..., None], groups, heads)[..., 0]
    return (outputs, after), before


def backward(
    average: Average, inputs: Inputs, before: Averages, d_outputs: Outputs, d_after: Averages
) -> tuple[Inputs, Averages]:
    """Return the cotangents of the inputs (None for `starts`) and of the state before them.
    Everything but the states before each chunk is recomputed."""
    chunks, chunks_pullback = jax.vjp(_chunks, replace(inputs, starts=None))
    starts = _chunks(inputs).starts

    def step(d_after: Averages, xs: tuple[Chunk, Array | None, Averages, tuple[Array, Array]]):
        tokens, starts, before, d_outputs = xs

        def of(tokens: Chunk, before: Averages):
            return _chunk(average, tokens._replace(starts=starts), before)

        d_tokens, d_before = jax.vjp(of, tokens, before)[1]((d_outputs, d_after))
        return d_before, d_tokens

    size = _size(inputs)
    d_outputs = chunk(d_outputs[0], size), chunk(d_outputs[1][..., None], size)[..., 0]
    xs = chunks, starts, before, d_outputs
    d_state, d_chunks = lax.scan(step, d_after, xs, reverse=True)
    return chunks_pullback(d_chunks)[0], d_state


def no_states(inputs: Inputs, state: Averages) -> Averages:
    """Return zeros in place of the states before each chunk."""
    chunks = inputs.length // _size(inputs)
    return jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), state)


def _size(inputs: Inputs) -> int:
    by_feature = inputs.log_decay is not None and inputs.log_decay.shape[-1] > 1
    return math.gcd(CHUNK_BY_FEATURE if by_feature else CHUNK, inputs.length)


def _chunks(inputs: Inputs) -> Chunk:
    starts = inputs.starts
    if starts is not None:
        starts = jnp.broadcast_to(starts[..., None, None], (*inputs.key.shape[:-1], 1))
    arrays = Chunk(inputs.query, inputs.key, inputs.value, inputs.log_decay, starts)
    return jax.tree.map(lambda x: chunk(x, _size(inputs)), arrays)


def _chunk(
    average: Average, tokens: Chunk, state: Averages
) -> tuple[tuple[Float[Array, "X RC V"], Float[Array, "X RC"]], Averages]:
    """Return (Y or log Y, log Z), and the state after the chunk."""
    query, key, value, decay, starts = tokens
    if starts is not None:
        kept = jnp.zeros_like(key[..., :1]) if decay is None else decay
        decay = jnp.where(starts, -jnp.inf, kept)
    past, key_at_end, kept, from_start = query, key, state.log_z, None
    if decay is not None:
        size = key.shape[1]
        t, s = _indices(size, size)
        from_start, to_end = jnp.split(_sums(jnp.concatenate([s <= t, s > t]), decay), 2, 1)
        past = query + repeat_rows(from_start, query.shape[1] // size)
        key_at_end, kept = key + to_end, kept + from_start[:, -1]
    scores = _scores(query, key, decay, from_start)
    query_softmax = softmax((jnp.concatenate([scores, past + state.log_z[:, None]], -1),), -1)
    state_softmax = softmax((key_at_end, kept[:, None]), 1)
    y, mean = average(query_softmax, state_softmax, value, state.mean)
    return (y, query_softmax.log_z), Averages(state_softmax.log_z, mean)


def averages(
    query_softmax: Softmax, state_softmax: Softmax, value: Array, mean: Array
) -> tuple[Array, Array]:
    """`Average` of values."""
    (weights,) = query_softmax.weights
    y = matmul(weights, jnp.concatenate([value, mean], 1))
    absorbed, kept = (jnp.swapaxes(x, 1, 2) for x in state_softmax.weights)
    return y, matmul(absorbed, value) + kept * mean


def log_averages(
    query_softmax: Softmax, state_softmax: Softmax, value: Array, mean: Array
) -> tuple[Array, Array]:
    """`Average` of log-values: `averages` of exponentials relative to the largest of each feature,
    or term by term where that is not exact."""
    size, every = value.shape[1], jnp.concatenate([value, mean], 1)
    exps = Scaled.exp(every, 1)
    y, after = averages(query_softmax, state_softmax, exps.factor[:, :size], exps.factor[:, size:])

    def scaled(sums: Array, softmax: Softmax) -> Scaled:
        empty = jnp.where(softmax.log_z == -jnp.inf, -jnp.inf, 0.0)
        return Scaled(sums, exps.exponent + empty[..., None])

    (log_weights,) = query_softmax.log_weights
    absorbed, kept = (jnp.swapaxes(x, 1, 2) for x in state_softmax.log_weights)
    y = scaled(y, query_softmax).or_by_terms(log_weights, every)
    after = scaled(after, state_softmax).or_by_terms(absorbed, value, kept + mean)
    return y.log(), after.log()


def _scores(
    query: Array, key: Array, decay: Array | None, from_start: Array | None
) -> Float[Array, "X RC C"]:
    """Return A, -inf for s > t."""
    size = key.shape[1]
    heads = query.shape[1] // size
    if decay is None or from_start is None or decay.shape[-1] == 1:
        scores = log_scores(query, key)
        if decay is not None:
            scores = scores + repeat_rows(_sums_between(decay)[..., 0], heads)
    else:
        scores = in_units(_scores_by_feature)(query, key, decay, from_start)
    t, s = _indices(size, size)
    return jnp.where(repeat_rows(s <= t, heads)[None], scores, -jnp.inf)


@jax.custom_vjp
def _scores_by_feature(
    query: Array, key: Array, decay: Array, from_start: Array
) -> Float[Array, "X RC C"]:
    """Return A for s <= t and decay by key feature, so that D_ts is inside the LSE.

    If decays are small, D_ts = D_t - D_s is split between query and key to use a matrix product.
    """
    return _scores_forward(query, key, decay, from_start)[0]


def _scores_forward(query: Array, key: Array, decay: Array, from_start: Array):
    size = key.shape[1]
    heads = query.shape[1] // size
    rows = Scaled.exp(query + repeat_rows(from_start, heads), -1)
    columns = Scaled.exp(jnp.swapaxes(key - from_start, 1, 2), -2)
    product, exponent = matmul(rows.factor, columns.factor), rows.exponent + columns.exponent
    t, s = _indices(size, size)
    visible = repeat_rows(s <= t, heads)[None] & (exponent > -jnp.inf)
    # Sums are inexact if small, or rounded by the subtraction.
    small = smallest_sum(key.dtype) - jnp.where(visible, product, 1)
    strong = -MILD - from_start[:, -1]
    way = first_safe(jnp.maximum(jnp.max(small), jnp.max(strong))[None])
    product = jnp.where(visible, product, 0)

    def from_product(*_: Array) -> Array:
        return jnp.log(product) + finite(exponent)

    scores = lax.switch(way, (from_product, _scores_by_terms), query, key, decay)
    return scores, (query, key, decay, way, rows.factor, columns.factor, product)


def _scores_backward(residuals, d_scores: Array) -> tuple[Array, Array, Array, Array]:
    query, key, decay, way, rows, columns, product = residuals

    def from_product(d_scores: Array) -> tuple[Array, Array, Array, Array]:
        d_product = d_scores * reciprocal(product)
        d_query = rows * matmul(d_product, jnp.swapaxes(columns, 1, 2))
        d_key = jnp.swapaxes(columns * matmul(jnp.swapaxes(rows, 1, 2), d_product), 1, 2)
        d_from_start = jnp.sum(d_query.reshape(key.shape[0], -1, *key.shape[1:]), 1) - d_key
        return d_query, d_key, jnp.zeros_like(decay), d_from_start

    def from_terms(d_scores: Array) -> tuple[Array, Array, Array, Array]:
        d_arrays = jax.vjp(_scores_by_terms, query, key, decay)[1](d_scores)
        return *d_arrays, jnp.zeros_like(decay)

    return lax.switch(way, (from_product, from_terms), d_scores)


_scores_by_feature.defvjp(_scores_forward, _scores_backward)


def _scores_by_terms(query: Array, key: Array, decay: Array) -> Float[Array, "X RC C"]:
    batch, size, depth = key.shape
    terms = key[:, None, None] + _sums_between(decay)[:, None]
    terms = terms + query.reshape(batch, -1, size, 1, depth)
    return log_sum_exp(terms, -1).reshape(batch, -1, size)


def _indices(*sizes: int) -> list[Array]:
    """Return one index per axis; they broadcast against each other."""
    return [lax.broadcasted_iota(jnp.int32, sizes, axis) for axis in range(len(sizes))]


def _sums_between(decay: Float[Array, "X C F"]) -> Float[Array, "X C C F"]:
    """Return the sums of decays of tokens s + 1 to t."""
    batch, size, _ = decay.shape
    t, s, r = _indices(size, size, size)
    mask = (s < r) & (r <= t)
    return _sums(mask.reshape(-1, size), decay).reshape(batch, size, size, -1)


def _sums(mask: Bool[Array, "I C"], decay: Float[Array, "X C F"]) -> Float[Array, "X I F"]:
    """Sum the decays selected by a mask, -inf included."""
    gone = decay == -jnp.inf
    weights = mask.astype(decay.dtype)
    sums = einsum("ic,xcf->xif", weights, jnp.where(gone, 0, decay))
    lost = einsum("ic,xcf->xif", weights, gone.astype(decay.dtype))
    return jnp.where(lost > 0, -jnp.inf, sums)
