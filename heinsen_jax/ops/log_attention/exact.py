"""The exact tiers: one `lax.scan` over chunks of 32 tokens, for any keys and decays.

With D_ts the sum of the decays of tokens s + 1 to t, query t of a chunk attends to the tokens s of
its chunk and to the key features k of the state before the chunk, in one softmax over both:

    A_ts = LSE_k(Q_tk + K_sk + D_tsk),    P_tk = Q_tk + D_tk + log Z_k
    log Z_t = LSE(A_t, P_t),    Y_t = sum_s exp(A_ts - log Z_t) V_s + sum_k exp(P_tk - log Z_t) M_k

The state is (log Z_k, M_k), M_k being the average of the values so far under key feature k; one
more softmax for each feature updates it. Scores are `log_matmul`s, exact for any queries and keys.
Decays are added up, never subtracted, so that -inf, the start of a segment, is exact as well. All
outputs are convex averages: no value is too large.

Averages are formed in linear space (`LINEAR`) or, of log-values, in log space (`LOG`), where a sum
of shares times values is one more `log_matmul`: a product where the span of the log-values allows,
and term by term where it does not. Nothing else differs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.layout import chunk, repeat_rows, unchunk
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.numerics import (
    einsum,
    finite,
    log_add_exp,
    log_matmul,
    log_sum_exp,
    matmul,
)
from heinsen_jax.typing import Array, Float

CHUNK = 32
CHUNK_WITH_FEATURE_DECAY = 16


class Chunk(NamedTuple):
    """Tokens of one chunk of C, or of J chunks `[J, ...]`: rows of R query heads share a key."""

    query: Float[Array, "*J X RC K"]
    key: Float[Array, "*J X C K"]
    value: Float[Array, "*J X C V"]
    decay: Float[Array, "*J X C F"] | None  # F is K, or 1


class Space(NamedTuple):
    """How averages are formed, given log-shares that add up to one for each output.

    Attributes:
      read: (log-shares `[X, RC, C]` of values `[X, C, V]`, log-shares `[X, RC, K]` of means
        `[X, K, V]`) -> outputs `[X, RC, V]`.
      update: (log-shares `[X, K]` of means `[X, K, V]`, log-shares `[X, C, K]` of values
        `[X, C, V]`) -> means `[X, K, V]`.
    """

    read: Callable[[Array, Array, Array, Array], Array]
    update: Callable[[Array, Array, Array, Array], Array]


def _read_linear(near: Array, value: Array, past: Array, mean: Array) -> Array:
    return matmul(jnp.exp(near), value) + matmul(jnp.exp(past), mean)


def _update_linear(kept: Array, mean: Array, added: Array, value: Array) -> Array:
    return jnp.exp(kept)[..., None] * mean + einsum("xck,xcv->xkv", jnp.exp(added), value)


def _read_log(near: Array, value: Array, past: Array, mean: Array) -> Array:
    return log_matmul(jnp.concatenate([near, past], -1), jnp.concatenate([value, mean], -2))


def _update_log(kept: Array, mean: Array, added: Array, value: Array) -> Array:
    return log_add_exp(kept[..., None] + mean, log_matmul(jnp.swapaxes(added, -1, -2), value))


LINEAR = Space(_read_linear, _update_linear)
LOG = Space(_read_log, _update_log)

Outputs = tuple[Float[Array, "J X RC V"], Float[Array, "J X RC"]]  # Y and log Z


def forward(space: Space, chunks: Chunk, state: Averages) -> tuple[Outputs, Averages]:
    """Y, log Z and the state after all chunks."""

    def step(state: Averages, tokens: Chunk) -> tuple[Averages, Outputs]:
        decays = _decays(tokens)
        return _absorb(space, tokens, decays, state), _attend(space, tokens, decays, state)

    after, outputs = lax.scan(step, state, chunks)
    return outputs, after


def backward(
    space: Space, chunks: Chunk, state: Averages, d_outputs: Outputs, d_after: Averages
) -> tuple[Chunk, Averages]:
    """Cotangents of the chunks and of the state before them; all else is computed again."""

    def absorb(state: Averages, tokens: Chunk) -> tuple[Averages, Averages]:
        return _absorb(space, tokens, _decays(tokens), state), state

    def step(d_after: Averages, xs: tuple[Chunk, Averages, Outputs]) -> tuple[Averages, Chunk]:
        tokens, before, d_outputs = xs
        decays, of_decays = jax.vjp(_decays, tokens)
        d_read, d_decays_read, d_before = _attend_backward(space, tokens, decays, before, d_outputs)
        d_kept, d_decays, d_before_kept = _absorb_backward(space, tokens, decays, before, d_after)
        (d_tokens,) = of_decays(jax.tree.map(jnp.add, d_decays, d_decays_read))
        d_tokens = jax.tree.map(lambda *x: sum(x[1:], x[0]), d_tokens, d_read, d_kept)
        return jax.tree.map(jnp.add, d_before, d_before_kept), d_tokens

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


def _decays(tokens: Chunk) -> Decays:
    decay = tokens.decay
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


def _attend(space: Space, tokens: Chunk, decays: Decays, state: Averages) -> Outputs:
    near, past = _logits(tokens.query, tokens.key, decays, state.log_z)
    log_z = log_sum_exp(jnp.concatenate([near, past], -1), -1)
    total = finite(log_z)[..., None]
    return space.read(near - total, tokens.value, past - total, state.mean), log_z


def _attend_backward(
    space: Space, tokens: Chunk, decays: Decays, state: Averages, d_outputs: Outputs
) -> tuple[Chunk, Decays, Averages]:
    query, key, value, decay = tokens
    (near, past), of_logits = jax.vjp(_logits, query, key, decays, state.log_z)
    d_y, d_log_z = d_outputs
    total = finite(log_sum_exp(jnp.concatenate([near, past], -1), -1))[..., None]
    near, past = near - total, past - total
    d_near, d_value, d_past, d_mean = jax.vjp(space.read, near, value, past, state.mean)[1](d_y)
    d_total = (d_log_z - jnp.sum(d_near, -1) - jnp.sum(d_past, -1))[..., None]
    d_logits = d_near + jnp.exp(near) * d_total, d_past + jnp.exp(past) * d_total
    d_query, d_key, d_decays, d_state = of_logits(d_logits)
    d_decay = None if decay is None else jnp.zeros_like(decay)
    return Chunk(d_query, d_key, d_value, d_decay), d_decays, Averages(d_state, d_mean)


def _absorb(space: Space, tokens: Chunk, decays: Decays, state: Averages) -> Averages:
    kept, added = _logits_at_end(tokens.key, decays, state.log_z)
    log_z = log_add_exp(kept, log_sum_exp(added, 1))
    total = finite(log_z)
    mean = space.update(kept - total, state.mean, added - total[:, None], tokens.value)
    return Averages(log_z, mean)


def _absorb_backward(
    space: Space, tokens: Chunk, decays: Decays, state: Averages, d_after: Averages
) -> tuple[Chunk, Decays, Averages]:
    query, key, value, decay = tokens
    (kept, added), of_logits = jax.vjp(_logits_at_end, key, decays, state.log_z)
    total = finite(log_add_exp(kept, log_sum_exp(added, 1)))
    kept, added = kept - total, added - total[:, None]
    update = jax.vjp(space.update, kept, state.mean, added, value)[1]
    d_kept, d_mean, d_added, d_value = update(d_after.mean)
    d_total = d_after.log_z - d_kept - jnp.sum(d_added, 1)
    d_logits = d_kept + jnp.exp(kept) * d_total, d_added + jnp.exp(added) * d_total[:, None]
    d_key, d_decays, d_state = of_logits(d_logits)
    d_decay = None if decay is None else jnp.zeros_like(decay)
    d_tokens = Chunk(jnp.zeros_like(query), d_key, d_value, d_decay)
    return d_tokens, d_decays, Averages(d_state, d_mean)


def _logits(
    query: Array, key: Array, decays: Decays, log_z: Array
) -> tuple[Float[Array, "X RC C"], Float[Array, "X RC K"]]:
    """A, -inf where s > t, and P."""
    size = key.shape[1]
    heads = query.shape[1] // size
    past = query + log_z[:, None]
    if decays.from_start is not None:
        past = past + repeat_rows(decays.from_start, heads)
    if decays.prefix is not None:
        return _scores_by_levels(query, key, decays), past
    scores = log_matmul(query, jnp.swapaxes(key, 1, 2))
    if decays.between is not None:
        scores = scores + repeat_rows(decays.between, heads)
    t, s = _indices(size, size)
    return jnp.where(repeat_rows(s <= t, heads)[None], scores, -jnp.inf), past


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


def _logits_at_end(
    key: Array, decays: Decays, log_z: Array
) -> tuple[Float[Array, "X K"], Float[Array, "X C K"]]:
    """log Z of the state and the keys, as the state after the chunk has them."""
    if decays.from_start is None:
        return log_z, key
    assert decays.to_end is not None
    return log_z + decays.from_start[:, -1], key + decays.to_end


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
