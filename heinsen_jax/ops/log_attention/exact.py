"""The exact tier: one `lax.scan` over chunks of 32 tokens, for any keys and decays.

With D_ts the sum of the decays of tokens s + 1 to t, query t of a chunk attends to the tokens s of
its chunk and to the key features k of the state before the chunk, in one softmax over both:

    A_ts = LSE_k(Q_tk + K_sk + D_tsk),    P_tk = Q_tk + D_tk + log Z_k
    log Z_t = LSE(A_t, P_t),    Y_t = sum_s exp(A_ts - log Z_t) V_s + sum_k exp(P_tk - log Z_t) M_k

The state is (log Z_k, M_k), M_k being the average of the values so far under key feature k. The one
after the chunk is more rows of the same softmax: row k attends to token s with K_sk and its decay
up to the end, and to feature k of the state before. Scores are `log_matmul`s, exact for any queries
and keys. Decays are added up, so that -inf, the start of a segment, is exact as well; sums are
subtracted only by `_scores_by_feature`, where they are small. All outputs are convex averages: no
value is too large.

Averages are formed in linear space (`LINEAR`) or, of log-values, in log space (`LOG`), where a sum
of shares times values is one more `log_matmul`: a product where the span of the log-values allows,
and term by term where it does not. Nothing else differs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import chunk, repeat_rows, unchunk
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.numerics import (
    Scaled,
    einsum,
    finite,
    log_add_exp,
    log_matmul,
    log_sum_exp,
    matmul,
    reciprocal,
)
from heinsen_jax.typing import Array, Bool, Float

CHUNK = 32
MILD = 32.0  # nats of decay in a chunk whose sums can be subtracted without loss


class Chunk(NamedTuple):
    """Tokens of one chunk of C, or of J chunks `[J, ...]`: rows of R query heads share a key."""

    query: Float[Array, "*J X RC K"]
    key: Float[Array, "*J X C K"]
    value: Float[Array, "*J X C V"]
    decay: Float[Array, "*J X C F"] | None  # F is K, or 1


Space: TypeAlias = Callable[[Array, Array, Array], Array]
"""How averages are formed: (log-shares `[X, I + K, C + K]`, values `[X, C, V]`, means `[X, K, V]`)
-> averages `[X, I + K, V]`. The last K rows are the state's, which have a share of one mean each.
"""


def _average(shares: Array, value: Array, mean: Array) -> Array:
    return matmul(jnp.exp(shares), jnp.concatenate([value, mean], 1))


def _average_in_logs(shares: Array, value: Array, mean: Array) -> Array:
    """Term by term each of them counts: products are as small as can be."""
    rows, size = shares.shape[1] - mean.shape[1], value.shape[1]
    own = jnp.max(shares[:, rows:, size:], -1, keepdims=True)
    after = log_add_exp(own + mean, log_matmul(shares[:, rows:, :size], value))
    if not rows:
        return after
    y = log_matmul(shares[:, :rows], jnp.concatenate([value, mean], 1))
    return jnp.concatenate([y, after], 1)


LINEAR: Space = _average
LOG: Space = _average_in_logs

Outputs = tuple[Float[Array, "J X RC V"], Float[Array, "J X RC"]]  # Y and log Z


def forward(space: Space, chunks: Chunk, state: Averages) -> tuple[Outputs, Averages]:
    """Y, log Z and the state after all chunks."""

    def step(state: Averages, tokens: Chunk) -> tuple[Averages, Outputs]:
        log_z, shares = _softmax(_logits(tokens, state.log_z))
        rows = space(shares, tokens.value, state.mean)
        size = tokens.query.shape[1]
        return Averages(log_z[:, size:], rows[:, size:]), (rows[:, :size], log_z[:, :size])

    after, outputs = lax.scan(step, state, chunks)
    return outputs, after


def backward(
    space: Space,
    chunks: Chunk,
    state: Averages,
    d_outputs: Outputs,
    d_after: Averages,
    *,
    has_decay: bool,
) -> tuple[Chunk, Averages]:
    """Cotangents of the chunks and of the state before them; all else is computed again. Decays
    that only mark where segments start have none: their `has_decay` is False."""

    def absorb(state: Averages, tokens: Chunk) -> tuple[Averages, Averages]:
        logits = _logits_of_state(tokens.key, _decays(tokens.decay), state.log_z)
        log_z, shares = _softmax(logits)
        return Averages(log_z, space(shares, tokens.value, state.mean)), state

    def step(d_after: Averages, xs: tuple[Chunk, Averages, Outputs]) -> tuple[Averages, Chunk]:
        tokens, state, (d_y, d_log_z) = xs
        logits, of_logits = jax.vjp(partial(_logits, has_decay=has_decay), tokens, state.log_z)
        _, shares = _softmax(logits)
        _, of_rows = jax.vjp(space, shares, tokens.value, state.mean)
        d_shares, d_value, d_mean = of_rows(jnp.concatenate([d_y, d_after.mean], 1))
        d_log_z = jnp.concatenate([d_log_z, d_after.log_z], 1)
        d_total = d_log_z - jnp.sum(d_shares, -1)
        d_tokens, d_before = of_logits(d_shares + jnp.exp(shares) * d_total[..., None])
        return Averages(d_before, d_mean), d_tokens._replace(value=d_value)

    _, before = lax.scan(absorb, state, chunks)
    d_state, d_chunks = lax.scan(step, d_after, (chunks, before, d_outputs), reverse=True)
    return d_chunks, d_state


def chunks_of(inputs: Inputs) -> Chunk:
    """All tokens, `[J, X, ...]`."""
    decay = inputs.decay_and_starts
    size = math.gcd(CHUNK, inputs.length)
    return Chunk(
        chunk(inputs.query, size),
        chunk(inputs.key, size),
        chunk(inputs.value, size),
        None if decay is None else chunk(decay, size),
    )


def inputs_of(d_chunks: Chunk, inputs: Inputs) -> Inputs:
    """Cotangents of the inputs that `chunks_of` was given; that of `starts` is None."""
    batch, _, _, heads, _ = inputs.query.shape
    key, value, decay = (
        None if x is None else unchunk(x, batch, 1)[:, :, :, 0] for x in d_chunks[1:]
    )
    assert key is not None
    assert value is not None
    if inputs.log_decay is None:
        decay = None
    return Inputs(unchunk(d_chunks.query, batch, heads), key, value, decay)


class Decays(NamedTuple):
    """Sums of decays in a chunk.

    Attributes:
      from_start: of the tokens up to t.
      to_end: of the tokens after s.
    """

    from_start: Float[Array, "X C F"]
    to_end: Float[Array, "X C F"]


def _decays(decay: Float[Array, "X C F"] | None) -> Decays | None:
    if decay is None:
        return None
    t, s = _indices(decay.shape[1], decay.shape[1])
    return Decays(_sums(s <= t, decay), _sums(s > t, decay))


def _softmax(logits: Array) -> tuple[Float[Array, "X RC+K"], Float[Array, "X RC+K C+K"]]:
    """log Z of each row, and its log-shares."""
    log_z = log_sum_exp(logits, -1)
    return log_z, logits - finite(log_z)[..., None]


def _logits(
    tokens: Chunk, log_z: Float[Array, "X K"], *, has_decay: bool = True
) -> Float[Array, "X RC+K C+K"]:
    """Of the chunk's queries and of the state after it, with the chunk's tokens and the key
    features of the state before it: A, -inf where s > t, and P."""
    query, key, _, decay = tokens
    size = key.shape[1]
    heads = query.shape[1] // size
    decay = decay if has_decay else lax.stop_gradient(decay)
    decays = _decays(decay)
    past = query + log_z[:, None]
    if decay is None or decays is None:
        scores = log_matmul(query, jnp.swapaxes(key, 1, 2))
    elif decay.shape[-1] == 1:
        scores = log_matmul(query, jnp.swapaxes(key, 1, 2))
        scores = scores + repeat_rows(_sums_between(decay)[..., 0], heads)
    else:
        scores = _scores_by_feature(query, key, decay)
    if decays is not None:
        past = past + repeat_rows(decays.from_start, heads)
    t, s = _indices(size, size)
    scores = jnp.where(repeat_rows(s <= t, heads)[None], scores, -jnp.inf)
    of_queries = jnp.concatenate([scores, past], -1)
    return jnp.concatenate([of_queries, _logits_of_state(key, decays, log_z)], 1)


def _logits_of_state(key: Array, decays: Decays | None, log_z: Array) -> Float[Array, "X K C+K"]:
    if decays is not None:
        log_z, key = log_z + decays.from_start[:, -1], key + decays.to_end
    row, column = _indices(log_z.shape[-1], log_z.shape[-1])
    before = jnp.where((row == column)[None], log_z[..., None], -jnp.inf)
    return jnp.concatenate([jnp.swapaxes(key, 1, 2), before], -1)


@jax.custom_vjp
def _scores_by_feature(query: Array, key: Array, decay: Array) -> Float[Array, "X RC C"]:
    """A, for s <= t, where each key feature decays at its own rate, so that D_ts is inside the LSE.

    Where decays are mild, D_ts = D_t - D_s is split between the query and the key for a product.
    """
    return _scores_forward(query, key, decay)[0]


def _scores_forward(query: Array, key: Array, decay: Array):
    size = key.shape[1]
    heads = query.shape[1] // size
    gone = decay == -jnp.inf
    so_far = jnp.cumsum(jnp.where(gone, 0, decay), 1)
    rows = Scaled.exp(query + repeat_rows(so_far, heads), -1)
    columns = Scaled.exp(jnp.swapaxes(key - so_far, 1, 2), -2)
    product, exponent = matmul(rows.factor, columns.factor), rows.exponent + columns.exponent
    segment = jnp.cumsum(jnp.all(gone, -1).astype(jnp.int32), 1)
    t, s = _indices(size, size)
    visible = (segment[:, :, None] == segment[:, None]) & (s <= t)[None]
    visible = repeat_rows(visible, heads) & (exponent > -jnp.inf)
    # Sums are lost that are small, or that subtraction rounds, or of features erased one by one.
    small = math.sqrt(jnp.finfo(key.dtype).smallest_normal) - jnp.where(visible, product, 1)
    strong = -MILD - so_far[:, -1]
    alone = jnp.where(gone & ~jnp.all(gone, -1, keepdims=True), 1.0, -1.0)
    way = first_safe(jnp.stack([jnp.max(x) for x in (small, strong, alone)]).max()[None])
    product = jnp.where(visible, product, 0)
    scores = lax.switch(
        way, (lambda *_: jnp.log(product) + finite(exponent), _scores_by_terms), query, key, decay
    )
    return scores, (query, key, decay, way, rows.factor, columns.factor, product)


def _scores_backward(residuals, d_scores: Array) -> tuple[Array, Array, Array]:
    query, key, decay, way, rows, columns, product = residuals
    batch, size, depth = key.shape

    def of_product(d_scores: Array) -> tuple[Array, Array, Array]:
        d_product = d_scores * reciprocal(product)
        d_query = rows * matmul(d_product, jnp.swapaxes(columns, 1, 2))
        d_key = jnp.swapaxes(columns * matmul(jnp.swapaxes(rows, 1, 2), d_product), 1, 2)
        d_so_far = jnp.sum(d_query.reshape(batch, -1, size, depth), 1) - d_key
        return d_query, d_key, lax.cumsum(d_so_far, axis=1, reverse=True)

    def of_terms(d_scores: Array) -> tuple[Array, Array, Array]:
        return jax.vjp(_scores_by_terms, query, key, decay)[1](d_scores)

    return lax.switch(way, (of_product, of_terms), d_scores)


_scores_by_feature.defvjp(_scores_forward, _scores_backward)


def _scores_by_terms(query: Array, key: Array, decay: Array) -> Float[Array, "X RC C"]:
    batch, size, depth = key.shape
    terms = key[:, None, None] + _sums_between(decay)[:, None]
    terms = terms + query.reshape(batch, -1, size, 1, depth)
    return log_sum_exp(terms, -1).reshape(batch, -1, size)


def _indices(*sizes: int) -> list[Array]:
    """An index for each axis, which broadcast against one another."""
    return [lax.broadcasted_iota(jnp.int32, sizes, axis) for axis in range(len(sizes))]


def _sums_between(decay: Float[Array, "X C F"]) -> Float[Array, "X C C F"]:
    """Of the tokens s + 1 to t."""
    batch, size, _ = decay.shape
    t, s, r = _indices(size, size, size)
    return _sums(((s < r) & (r <= t)).reshape(-1, size), decay).reshape(batch, size, size, -1)


def _sums(mask: Bool[Array, "N C"], decay: Float[Array, "X C F"]) -> Float[Array, "X N F"]:
    """Sums of the decays that a mask selects; of -inf, too."""
    gone = decay == -jnp.inf
    weights = mask.astype(decay.dtype)
    sums = einsum("nr,xrf->xnf", weights, jnp.where(gone, 0, decay))
    lost = einsum("nr,xrf->xnf", weights, gone.astype(decay.dtype))
    return jnp.where(lost > 0, -jnp.inf, sums)
