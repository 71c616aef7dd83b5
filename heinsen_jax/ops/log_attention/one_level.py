r"""Causal averages of values as masked matrix products over chunks: the fast tier.

Every exponential is scaled by a maximum over the whole chunk and its past, so a query of a chunk is
two products: with the chunk's keys, masked, and with the state before it,

    S = mask(Q^ K^T) V + Q^ S_before,    Z = mask(Q^ K^T) 1 + Q^ Z_before,    Y = S / Z

All terms are positive weights, nothing cancels. What can go wrong is underflow alone, where keys
*rise* inside a chunk far above what its first query may see (`scales_and_rise` measures it): such a
query is scaled by a maximum of keys it must not see.

Decay multiplies the state by exp(log_decay) before each token. Inside a chunk it moves into the
exponents: with D_t the sum of decays from the chunk's start up to t,

    Q'_t = Q_t + D_t,    K'_s = K_s - D_s

and the whole chunk's decay is applied to the state after it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention.state import MeanState
from heinsen_jax.ops.log_attention.tokens import (
    Tokens,
    chunked,
    each_head,
    fold,
    unchunked,
    unfold,
)
from heinsen_jax.ops.numerics import einsum, reciprocal, safe_log, share, where_empty
from heinsen_jax.typing import Array


class Scales(NamedTuple):
    """The largest exponents `[J, X, K]`, log 0 where there are none."""

    before: Array  # of the state before a chunk
    query: Array  # of that and of the chunk
    after: Array  # of the state after a chunk


def mean_attention(
    tokens: Tokens, state: MeanState, scales: Scales, chunk_size: int
) -> tuple[Array, Array, MeanState]:
    """Y, log Z and the state after all tokens; their number is a multiple of `chunk_size`."""
    batch, _, _, heads, _ = tokens.query.shape
    (y, log_z), after = _products(*_exponents(tokens, chunk_size), fold(state), scales)
    y, log_z = unchunked(y, batch, heads), unchunked(log_z[..., None], batch, heads)[..., 0]
    return y, log_z, unfold(after, tokens)


def scales_and_rise(tokens: Tokens, log_z: Array, chunk_size: int) -> tuple[Scales, Array]:
    """The scales, and how far in nats the one of a query can lie above all that it sees."""
    tokens, log_z = lax.stop_gradient((tokens, fold(log_z)))
    _, key, _, decay, documents = _exponents(tokens, chunk_size)
    scales = _scales(key, decay, documents, log_z)
    seen = jnp.maximum(scales.before, key[..., 0, :])
    if documents is not None:  # the first token of a document sees itself alone
        first = jnp.diff(documents, prepend=0)[..., None] > 0
        seen = jnp.where(first[..., 0, :], key[..., 0, :], seen)
        seen = jnp.minimum(seen, jnp.min(jnp.where(first, key, jnp.inf), -2))
    rise = jnp.where(scales.query == -jnp.inf, 0.0, scales.query - seen)
    return scales, jnp.max(rise, initial=0.0)


def _exponents(tokens: Tokens, chunk_size: int) -> tuple[Array, Array, Array, Any, Any]:
    """Q' `[J, X, R C, K]`, K' and V `[J, X, C, .]`, the decay of each chunk `[J, X, K]` and the
    documents of its tokens `[J, X, C]`, None where there are none."""
    query, key, value = (chunked(x, chunk_size) for x in (tokens.query, tokens.key, tokens.value))
    decay = documents = None
    if tokens.log_decay is not None:
        so_far = jnp.cumsum(chunked(tokens.log_decay, chunk_size), -2)
        heads = query.shape[-2] // chunk_size
        query, key = query + each_head(so_far, heads), key - so_far
        decay = jnp.broadcast_to(so_far[..., -1, :], key[..., -1, :].shape)
    if tokens.starts is not None:
        documents = tokens.documents(chunk_size)
    return query, key, value, decay, documents


def _scales(key: Array, decay: Any, documents: Any, log_z: Array) -> Scales:
    largest = jnp.max(key, -2)
    if decay is None and documents is None:
        running = lax.cummax(jnp.concatenate([log_z[None], largest]), axis=0)
        return Scales(running[:-1], running[1:], running[1:])
    decay = jnp.zeros_like(largest) if decay is None else decay
    kept = largest if documents is None else jnp.max(_where_last(documents, key, -jnp.inf), -2)
    fresh = jnp.zeros(key.shape[:2], bool) if documents is None else documents[..., -1] > 0

    def step(before, chunk):
        largest, kept, decay, fresh = chunk
        after = jnp.maximum(jnp.where(fresh[:, None], -jnp.inf, before), kept) + decay
        return after, Scales(before, jnp.maximum(before, largest), after)

    return lax.scan(step, log_z, (largest, kept, decay, fresh))[1]


def _where_last(documents: Array, x: Array, other: float) -> Array:
    """x `[J, X, C, F]` of the tokens that belong to the last document of their chunk."""
    return jnp.where((documents == documents[..., -1:])[..., None], x, other)


class _Factors(NamedTuple):
    """Of the states' recurrence: read_j = read * S_j, S_j+1 = hand_on * (kept * read_j + added_j).
    All 1, and absent, where neither decay nor documents ask for them, but for the first."""

    read: Array
    kept: Array | None
    hand_on: Array | None


def _factors(scales: Scales, decay: Any, documents: Any) -> _Factors:
    scale = where_empty(scales.query, 0.0)
    read = share(scales.before, scales.query)
    if documents is None:  # the scale after a chunk is the one in it, less what it decays by
        return _Factors(read, None, None)
    kept = (documents[..., -1] == 0)[..., None].astype(scale.dtype)
    if decay is not None:
        scale = scale + decay
    return _Factors(read, kept, share(scale, scales.after))


def _times(factor: Array | None, x: Array) -> Array:
    if factor is None:
        return x
    return factor.reshape(*factor.shape, *[1] * (x.ndim - factor.ndim)) * x


@jax.custom_vjp
def _products(query, key, value, decay, documents, state, scales):
    """((Y, log Z), state after all): rows `[J, X, R C, .]`, otherwise as `_exponents` returns."""
    return _products_forward(query, key, value, decay, documents, state, scales)[0]


def _products_forward(query, key, value, decay, documents, state, scales):
    scale = where_empty(scales.query, 0.0)[..., None, :]
    key = jnp.exp(key - scale)
    query = query + scale
    largest = lax.stop_gradient(where_empty(jnp.max(query, -1, keepdims=True), 0.0))
    query = jnp.exp(query - largest)

    absorbed = key if documents is None else _where_last(documents, key, 0.0)
    added = einsum("jxck,jxcv->jxkv", absorbed, value), jnp.sum(absorbed, -2)
    start = share(state.log_z, scales.before[0])
    factors = _factors(scales, decay, documents)

    def step(before, chunk):
        factors, added = chunk
        read = jax.tree.map(partial(_times, factors.read), before)
        after = jax.tree.map(lambda r, a: _times(factors.kept, r) + a, read, added)
        return jax.tree.map(partial(_times, factors.hand_on), after), read

    (s_end, z_end), (s, z) = lax.scan(
        step, (start[..., None] * state.mean, start), (factors, added)
    )

    weights = _visible(einsum("jxck,jxdk->jxcd", query, key), documents)
    reading = _of_state(query, documents)
    y = einsum("jxcd,jxdv->jxcv", weights, value)
    y = y + einsum("jxck,jxkv->jxcv", reading, s)
    total = jnp.sum(weights, -1) + einsum("jxck,jxk->jxc", reading, z)
    inverse, inverse_end = reciprocal(total), reciprocal(z_end)
    y = y * inverse[..., None]
    mean = s_end * inverse_end[..., None]
    log_z_end = safe_log(z_end) + where_empty(scales.after[-1], 0.0)
    saved = (query, key, value, weights, inverse, y, s, z), (state.mean, start, mean, inverse_end)
    saved += (factors, documents, decay)
    return ((y, safe_log(total) + largest[..., 0]), MeanState(log_z_end, mean)), saved


def _products_backward(saved, cotangents):
    (query, key, value, weights, inverse, y, s, z), (mean_0, start, mean, inverse_end) = saved[:2]
    factors, documents, decay = saved[2:]
    (d_y, d_log_z), d_end = cotangents
    d_y = d_y * inverse[..., None]
    d_total = d_log_z * inverse - einsum("jxcv,jxcv->jxc", d_y, y)

    reading = _of_state(query, documents)
    d_s = einsum("jxck,jxcv->jxkv", reading, d_y)
    d_z = einsum("jxck,jxc->jxk", reading, d_total)
    d_s_end = d_end.mean * inverse_end[..., None]
    d_z_end = d_end.log_z * inverse_end - jnp.sum(d_s_end * mean, -1)

    def step(d_after, chunk):
        factors, d_read = chunk
        d_added = jax.tree.map(partial(_times, factors.hand_on), d_after)
        d_kept = jax.tree.map(partial(_times, factors.kept), d_added)
        d_before = jax.tree.map(
            lambda kept, read: _times(factors.read, kept + read), d_kept, d_read
        )
        return d_before, (d_added, d_kept)

    d_start, (d_added, d_kept) = lax.scan(
        step, (d_s_end, d_z_end), (factors, (d_s, d_z)), reverse=True
    )
    d_log_z_0 = start * (d_start[1] + jnp.sum(d_start[0] * mean_0, -1))
    d_state = MeanState(d_log_z_0, start[..., None] * d_start[0])

    d_weights = einsum("jxcv,jxdv->jxcd", d_y, value) + d_total[..., None]
    d_weights = _visible(d_weights, documents)
    d_reading = einsum("jxcv,jxkv->jxck", d_y, s) + d_total[..., None] * z[..., None, :]
    d_query = einsum("jxcd,jxdk->jxck", d_weights, key) + _of_state(d_reading, documents)

    absorbed = key if documents is None else _where_last(documents, key, 0.0)
    d_value = einsum("jxcd,jxcv->jxdv", weights, d_y)
    d_value = d_value + einsum("jxck,jxkv->jxcv", absorbed, d_added[0])
    d_absorbed = einsum("jxcv,jxkv->jxck", value, d_added[0]) + d_added[1][..., None, :]
    d_key = key * einsum("jxcd,jxck->jxdk", d_weights, query)
    d_key_of_state = absorbed * d_absorbed
    d_decay = None
    if decay is not None:  # it multiplies all that is in the state after a chunk
        d_decay = jnp.sum(d_key_of_state, -2) + z * d_kept[1] + jnp.sum(s * d_kept[0], -1)
    return query * d_query, d_key + d_key_of_state, d_value, d_decay, None, d_state, None


_products.defvjp(_products_forward, _products_backward)


def _visible(weights: Array, documents: Array | None) -> Array:
    """`[J, X, R C, C]` with 0 where a query must not see."""
    size = weights.shape[-1]
    visible = jnp.tri(size, dtype=bool)[None, None]
    if documents is not None:
        visible = visible & (documents[..., :, None] == documents[..., None, :])
    heads = weights.shape[-2] // size
    return jnp.where(each_head(visible, heads), weights, 0.0)


def _of_state(rows: Array, documents: Array | None) -> Array:
    """`[J, X, R C, F]` with 0 where a document has begun since the state before the chunk."""
    if documents is None:
        return rows
    sees = each_head((documents == 0)[..., None], rows.shape[-2] // documents.shape[-1])
    return jnp.where(sees, rows, 0.0)
