"""The exact tier: one `lax.scan` over chunks of 32 tokens, for any keys and decays.

With D_ts the sum of the decays of tokens s + 1 to t, query t of a chunk attends to the tokens s of
its chunk and to the key features k of the state before the chunk, in one softmax over both:

    A_ts = LSE_k(Q_tk + K_sk + D_tsk),    P_tk = Q_tk + D_tk + log Z_k
    log Z_t = LSE(A_t, P_t),    Y_t = sum_s exp(A_ts - log Z_t) V_s + sum_k exp(P_tk - log Z_t) M_k

The state is (log Z_k, M_k), M_k being the average of the values so far under key feature k. The one
after the chunk is more rows of the same softmax: row k attends to token s with K_sk and its decay
up to the end, and to feature k of the state before. Scores are `log_matmul`s, exact for any queries
and keys. Decays are added up, never subtracted, so that -inf, the start of a segment, is exact as
well. All outputs are convex averages: no value is too large.

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

from heinsen_jax.ops.layout import chunk, repeat_rows, unchunk
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.numerics import einsum, finite, log_matmul, log_sum_exp, matmul
from heinsen_jax.typing import Array, Float

CHUNK = 32
CHUNK_WITH_FEATURE_DECAY = 16


class Chunk(NamedTuple):
    """Tokens of one chunk of C, or of J chunks `[J, ...]`: rows of R query heads share a key."""

    query: Float[Array, "*J X RC K"]
    key: Float[Array, "*J X C K"]
    value: Float[Array, "*J X C V"]
    decay: Float[Array, "*J X C F"] | None  # F is K, or 1


Space: TypeAlias = Callable[[Array, Array], Array]
"""(log-shares `[X, I, J]`, values `[X, J, V]`) -> averages `[X, I, V]`."""


def _average(shares: Array, values: Array) -> Array:
    return matmul(jnp.exp(shares), values)


LINEAR: Space = _average
LOG: Space = log_matmul

Outputs = tuple[Float[Array, "J X RC V"], Float[Array, "J X RC"]]  # Y and log Z


def forward(space: Space, chunks: Chunk, state: Averages) -> tuple[Outputs, Averages]:
    """Y, log Z and the state after all chunks."""

    def step(state: Averages, tokens: Chunk) -> tuple[Averages, Outputs]:
        log_z, shares = _softmax(_logits(tokens, state.log_z))
        rows = space(shares, _values(tokens, state))
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
        return Averages(log_z, space(shares, _values(tokens, state))), state

    def step(d_after: Averages, xs: tuple[Chunk, Averages, Outputs]) -> tuple[Averages, Chunk]:
        tokens, state, (d_y, d_log_z) = xs
        logits, of_logits = jax.vjp(partial(_logits, has_decay=has_decay), tokens, state.log_z)
        _, shares = _softmax(logits)
        _, of_rows = jax.vjp(space, shares, _values(tokens, state))
        d_shares, d_values = of_rows(jnp.concatenate([d_y, d_after.mean], 1))
        d_log_z = jnp.concatenate([d_log_z, d_after.log_z], 1)
        d_total = d_log_z - jnp.sum(d_shares, -1)
        d_tokens, d_before = of_logits(d_shares + jnp.exp(shares) * d_total[..., None])
        size = tokens.value.shape[1]
        d_tokens = d_tokens._replace(value=d_values[:, :size])
        return Averages(d_before, d_values[:, size:]), d_tokens

    _, before = lax.scan(absorb, state, chunks)
    d_state, d_chunks = lax.scan(step, d_after, (chunks, before, d_outputs), reverse=True)
    return d_chunks, d_state


def chunks_of(inputs: Inputs) -> Chunk:
    """All tokens, `[J, X, ...]`."""
    decay = inputs.decay_and_starts
    size = CHUNK if decay is None or decay.shape[-1] == 1 else CHUNK_WITH_FEATURE_DECAY
    size = math.gcd(size, inputs.length)
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
    """Sums of decays in a chunk, None where there are none.

    Attributes:
      between: of tokens s + 1 to t, where all features of a head decay alike.
      prefix, suffix: at level l, of the tokens from the start of the 2^l tokens that t is one of up
        to t, and of those after s to their end; where each feature has a decay of its own.
      from_start: of the tokens up to t.
      to_end: of the tokens after s.
    """

    between: Float[Array, "X C C"] | None
    prefix: Float[Array, "L X C K"] | None
    suffix: Float[Array, "L X C K"] | None
    from_start: Float[Array, "X C F"] | None
    to_end: Float[Array, "X C F"] | None


def _decays(decay: Float[Array, "X C F"] | None) -> Decays:
    if decay is None:
        return Decays(None, None, None, None, None)
    _, size, features = decay.shape
    if features == 1:
        t, s, r = _indices(size, size + 1, size)
        between = _sums(((s <= r) & (r <= t)).reshape(-1, size), decay)
        between = between.reshape(-1, size, size + 1)  # the first s is before the chunk
        from_start, between = between[..., :1], between[..., 1:]
        return Decays(between, None, None, from_start, between[:, -1, :, None])
    level, t, s = _indices(size.bit_length(), size, size)
    same = t >> level == s >> level
    prefix, suffix = _sums(same & (s <= t), decay), _sums(same & (s > t), decay)
    return Decays(None, prefix[:-1], suffix[:-1], prefix[-1], suffix[-1])


def _values(tokens: Chunk, state: Averages) -> Float[Array, "X C+K V"]:
    return jnp.concatenate([tokens.value, state.mean], 1)


def _softmax(logits: Array) -> tuple[Float[Array, "X RC+K"], Float[Array, "X RC+K C+K"]]:
    """log Z of each row, and its log-shares."""
    log_z = log_sum_exp(logits, -1)
    return log_z, logits - finite(log_z)[..., None]


def _logits(
    tokens: Chunk, log_z: Float[Array, "X K"], *, has_decay: bool = True
) -> Float[Array, "X RC+K C+K"]:
    """Of the chunk's queries and of the state after it, with the chunk's tokens and the key
    features of the state before it."""
    decays = _decays(tokens.decay if has_decay else lax.stop_gradient(tokens.decay))
    of_queries = _logits_of_queries(tokens.query, tokens.key, decays, log_z)
    return jnp.concatenate([of_queries, _logits_of_state(tokens.key, decays, log_z)], 1)


def _logits_of_queries(
    query: Array, key: Array, decays: Decays, log_z: Array
) -> Float[Array, "X RC C+K"]:
    """A, -inf where s > t, and P."""
    size = key.shape[1]
    heads = query.shape[1] // size
    past = query + log_z[:, None]
    if decays.from_start is not None:
        past = past + repeat_rows(decays.from_start, heads)
    if decays.prefix is not None:
        return jnp.concatenate([_scores_by_levels(query, key, decays), past], -1)
    scores = log_matmul(query, jnp.swapaxes(key, 1, 2))
    if decays.between is not None:
        scores = scores + repeat_rows(decays.between, heads)
    t, s = _indices(size, size)
    scores = jnp.where(repeat_rows(s <= t, heads)[None], scores, -jnp.inf)
    return jnp.concatenate([scores, past], -1)


def _logits_of_state(key: Array, decays: Decays, log_z: Array) -> Float[Array, "X K C+K"]:
    if decays.from_start is not None:
        assert decays.to_end is not None
        log_z, key = log_z + decays.from_start[:, -1], key + decays.to_end
    row, column = _indices(log_z.shape[-1], log_z.shape[-1])
    before = jnp.where((row == column)[None], log_z[..., None], -jnp.inf)
    return jnp.concatenate([jnp.swapaxes(key, 1, 2), before], -1)


def _scores_by_levels(query: Array, key: Array, decays: Decays) -> Float[Array, "X RC C"]:
    """A where each key feature decays at its own rate, so that D_ts is inside the LSE.

    For s < t there is one level l at which s lies in the left and t in the right half of the same
    2^(l+1) tokens. Split at the middle, D_ts is a sum to the end of the left half, which belongs to
    the key, and one from the start of the right half, which belongs to the query.
    """
    assert decays.prefix is not None
    assert decays.suffix is not None
    size = key.shape[1]
    heads = query.shape[1] // size
    keys = jnp.swapaxes(key[None] + decays.suffix, -1, -2)
    scores = log_matmul(query[None] + repeat_rows(decays.prefix, heads), keys)
    level, t, s = _indices(len(decays.prefix), size, size)
    siblings = ((t >> level) ^ 1 == s >> level) & (s < t)
    siblings = repeat_rows(siblings, heads)[:, None]
    scores = jnp.sum(jnp.where(siblings, scores, 0), 0)
    scores = jnp.where(jnp.any(siblings, 0), scores, -jnp.inf)
    own = log_sum_exp(query + repeat_rows(key, heads), -1)[..., None]
    t, s = _indices(size, size)
    return jnp.where(repeat_rows(s == t, heads)[None], own, scores)


def _indices(*sizes: int) -> list[Array]:
    """An index for each axis, which broadcast against one another."""
    return [lax.broadcasted_iota(jnp.int32, sizes, axis) for axis in range(len(sizes))]


def _sums(mask: Array, decay: Array) -> Float[Array, "*L X N F"]:
    """Sums of the decays `[X, C, F]` that a mask `[*L, N, C]` selects; of -inf, too."""
    gone = decay == -jnp.inf
    weights = mask.astype(decay.dtype)
    sums = einsum("...nr,xrf->...xnf", weights, jnp.where(gone, 0, decay))
    lost = einsum("...nr,xrf->...xnf", weights, gone.astype(decay.dtype))
    return jnp.where(lost > 0, -jnp.inf, sums)
