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

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.linear_recurrence import linear_recurrence
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


@dataclass(frozen=True)
class Form:
    """How products are formed, those of matrices.

    Attributes:
      chunk_size: tokens of a chunk.
      half: whether their factors are rounded to bfloat16. Sums and states never are.
      side_by_side: whether the states before all chunks are formed in a tree, not one by one.
    """

    chunk_size: int
    half: bool = False
    side_by_side: bool = False

    def einsum(self, pattern: str, *factors: Array) -> Array:
        if not self.half:
            return einsum(pattern, *factors)
        halves = [x.astype(jnp.bfloat16) for x in factors]
        return jnp.einsum(pattern, *halves, preferred_element_type=factors[0].dtype)


def mean_attention(
    tokens: Tokens, state: MeanState, scales: Scales, form: Form
) -> tuple[Array, Array, MeanState]:
    """Y, log Z and the state after all tokens; their number is a multiple of the chunks'."""
    batch, _, _, heads, _ = tokens.query.shape
    exponents = _exponents(tokens, form.chunk_size)
    result: Any = _products(form, *exponents, fold(state), scales)
    (y, log_z), after = result
    log_z = unchunked(log_z[..., None], batch, heads)[..., 0]
    return unchunked(y, batch, heads), log_z, unfold(after, tokens)


def scales_and_rise(tokens: Tokens, log_z: Array, form: Form) -> tuple[Scales, Array]:
    """The scales, and how far in nats the one of a query can lie above all that it sees."""
    tokens, log_z = lax.stop_gradient((tokens, fold(log_z)))
    _, key, _, decay, documents = _exponents(tokens, form.chunk_size)
    scales = _scales(form, key, decay, documents, log_z)
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


def _scales(form: Form, key: Array, decay: Any, documents: Any, log_z: Array) -> Scales:
    largest = jnp.max(key, -2)
    if decay is None and documents is None:
        running = lax.cummax(jnp.concatenate([log_z[None], largest]), axis=0)
        return Scales(running[:-1], running[1:], running[1:])
    decay = jnp.zeros_like(largest) if decay is None else decay
    kept, hidden = largest, decay  # by how much a chunk lowers what is there before it
    if documents is not None:
        kept = jnp.max(_where_last(documents, key, -jnp.inf), -2)
        hidden = jnp.where(documents[..., -1:] > 0, -jnp.inf, decay)
    kept = kept + decay

    def step(before, chunk):
        hidden, kept = chunk
        return jnp.maximum(before + hidden, kept), before

    def compose(earlier, later):
        (hidden_1, kept_1), (hidden_2, kept_2) = earlier, later
        return hidden_1 + hidden_2, jnp.maximum(kept_1 + hidden_2, kept_2)

    if form.side_by_side:
        hidden, kept = lax.associative_scan(compose, (hidden, kept))
        after = jnp.maximum(log_z[None] + hidden, kept)
    else:
        last, before = lax.scan(step, log_z, (hidden, kept))
        after = jnp.concatenate([before[1:], last[None]])
    before = jnp.concatenate([log_z[None], after[:-1]])
    return Scales(before, jnp.maximum(before, largest), after)


def _where_last(documents: Array, x: Array, other: float) -> Array:
    """x `[J, X, C, F]` of the tokens that belong to the last document of their chunk."""
    return jnp.where((documents == documents[..., -1:])[..., None], x, other)


def _handed_on(scales: Scales, decay: Any) -> Array:
    """What takes a state in the scale of one chunk's queries to that of the next's, `[J, X, K]`."""
    decayed = scales.query if decay is None else scales.query + decay
    return share(decayed, jnp.concatenate([scales.query[1:], scales.after[-1:]]))


def _times(factor: Array | None, x: Array) -> Array:
    """Of a factor with the first axes of x; None is 1."""
    if factor is None:
        return x
    return factor.reshape(*factor.shape, *[1] * (x.ndim - factor.ndim)) * x


States = tuple[Array, Array]  # S `[..., K, V]` and Z `[..., K]`


def _states(
    form: Form, first: States, kept: Any, added: States, handed_on: Array
) -> tuple[States, States]:
    """(S_0 .. S_J-1, S_J) of S_j+1 = handed_on_j (kept_j S_j + added_j)."""

    def step(before: States, chunk: Any) -> tuple[States, States]:
        kept, added, handed_on = chunk
        after = jax.tree.map(lambda s, a: _times(handed_on, _times(kept, s) + a), before, added)
        return after, before

    if not form.side_by_side:
        last, states = lax.scan(step, first, (kept, added, handed_on))
        return states, last
    s, z = (_times(handed_on, x) for x in added)
    after = _tree(_times(kept, handed_on), (s, z), first)
    before = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs[:-1]]), first, after)
    return before, jax.tree.map(lambda x: x[-1], after)


def _cotangents(
    form: Form, last: States, kept: Any, read: States, handed_on: Array
) -> tuple[States, States]:
    """Of what `_states` adds, and of S_0: from that of S_J and those of S_0 .. S_J-1, as read."""

    def step(d_after: States, chunk: Any) -> tuple[States, States]:
        kept, read, handed_on = chunk
        d_added = jax.tree.map(partial(_times, handed_on), d_after)
        return jax.tree.map(lambda d, r: _times(kept, d) + r, d_added, read), d_added

    if not form.side_by_side:
        d_first, d_added = lax.scan(step, last, (kept, read, handed_on), reverse=True)
        return d_added, d_first
    s, z = (x[::-1] for x in read)
    backwards = _tree(_times(kept, handed_on)[::-1], (s, z), last)
    d_states = jax.tree.map(lambda x: x[::-1], backwards)
    d_after = jax.tree.map(lambda xs, x: jnp.concatenate([xs[1:], x[None]]), d_states, last)
    d_first = jax.tree.map(lambda x: x[0], d_states)
    return jax.tree.map(partial(_times, handed_on), d_after), d_first


def _tree(factor: Array, added: States, first: States) -> States:
    """S_1 .. S_J of S_j+1 = factor_j S_j + added_j."""

    def of_one(added: Array, first: Array) -> Array:
        factors = factor.reshape(*factor.shape, *[1] * (added.ndim - factor.ndim))
        return linear_recurrence(factors, added, initial=first, axis=0)

    return jax.tree.map(of_one, added, first)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(form, query, key, value, decay, documents, state, scales):
    """((Y, log Z), state after all): rows `[J, X, R C, .]`, otherwise as `_exponents` returns."""
    return _products_forward(form, query, key, value, decay, documents, state, scales)[0]


def _products_forward(form, query, key, value, decay, documents, state, scales):
    scale = where_empty(scales.query, 0.0)[..., None, :]
    key = jnp.exp(key - scale)
    query = query + scale
    largest = lax.stop_gradient(where_empty(jnp.max(query, -1, keepdims=True), 0.0))
    query = jnp.exp(query - largest)

    absorbed = key if documents is None else _where_last(documents, key, 0.0)
    added = form.einsum("jxck,jxcv->jxkv", absorbed, value), jnp.sum(absorbed, -2)
    start = share(state.log_z, scales.query[0])
    kept = None
    if documents is not None:
        kept = (documents[..., -1] == 0)[..., None].astype(scale.dtype)
    handed_on = _handed_on(scales, decay)
    first = start[..., None] * state.mean, start
    (s, z), (s_end, z_end) = _states(form, first, kept, added, handed_on)

    weights = _visible(form.einsum("jxck,jxdk->jxcd", query, key), documents)
    reading = _of_state(query, documents)
    y = form.einsum("jxcd,jxdv->jxcv", weights, value)
    y = y + form.einsum("jxck,jxkv->jxcv", reading, s)
    total = jnp.sum(weights, -1) + einsum("jxck,jxk->jxc", reading, z)
    inverse, inverse_end = reciprocal(total), reciprocal(z_end)
    y = y * inverse[..., None]
    mean = s_end * inverse_end[..., None]
    log_z_end = safe_log(z_end) + where_empty(scales.after[-1], 0.0)
    saved = (query, key, value, weights, inverse, y, s, z), (state.mean, start, mean, inverse_end)
    saved += (kept, handed_on, documents, decay)
    return ((y, safe_log(total) + largest[..., 0]), MeanState(log_z_end, mean)), saved


def _products_backward(form, saved, cotangents):
    (query, key, value, weights, inverse, y, s, z), (mean_0, start, mean, inverse_end) = saved[:2]
    kept, handed_on, documents, decay = saved[2:]
    (d_y, d_log_z), d_end = cotangents
    d_y = d_y * inverse[..., None]
    d_total = d_log_z * inverse - einsum("jxcv,jxcv->jxc", d_y, y)

    reading = _of_state(query, documents)
    d_s = form.einsum("jxck,jxcv->jxkv", reading, d_y)
    d_z = einsum("jxck,jxc->jxk", reading, d_total)
    d_s_end = d_end.mean * inverse_end[..., None]
    d_z_end = d_end.log_z * inverse_end - jnp.sum(d_s_end * mean, -1)

    d_added, d_start = _cotangents(form, (d_s_end, d_z_end), kept, (d_s, d_z), handed_on)
    d_log_z_0 = start * (d_start[1] + jnp.sum(d_start[0] * mean_0, -1))
    d_state = MeanState(d_log_z_0, start[..., None] * d_start[0])

    d_weights = form.einsum("jxcv,jxdv->jxcd", d_y, value) + d_total[..., None]
    d_weights = _visible(d_weights, documents)
    d_reading = form.einsum("jxcv,jxkv->jxck", d_y, s) + d_total[..., None] * z[..., None, :]
    d_query = form.einsum("jxcd,jxdk->jxck", d_weights, key) + _of_state(d_reading, documents)

    absorbed = key if documents is None else _where_last(documents, key, 0.0)
    d_value = form.einsum("jxcd,jxcv->jxdv", weights, d_y)
    d_value = d_value + form.einsum("jxck,jxkv->jxcv", absorbed, d_added[0])
    d_absorbed = form.einsum("jxcv,jxkv->jxck", value, d_added[0]) + d_added[1][..., None, :]
    d_key = key * form.einsum("jxcd,jxck->jxdk", d_weights, query)
    d_key_of_state = absorbed * d_absorbed
    d_decay = None
    if decay is not None:  # it multiplies all that is in the state after a chunk
        of_state = z * d_added[1] + jnp.sum(s * d_added[0], -1)
        d_decay = jnp.sum(d_key_of_state, -2) + _times(kept, of_state)
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
