"""The exact tiers: one `lax.scan` over chunks of 32 tokens, for any keys and decays.

With D_ts the sum of the decays of tokens s + 1 to t, query t of a chunk attends to the tokens s of
its chunk and to the key features k of the state before the chunk, in one softmax over both:

    A_ts = LSE_k(Q_tk + K_sk + D_tsk),    P_tk = Q_tk + D_tk + log Z_k
    log Z_t = LSE(A_t, P_t),    Y_t = sum_s exp(A_ts - log Z_t) V_s + sum_k exp(P_tk - log Z_t) M_k

The state is (log Z_k, M_k), M_k being the average of the values so far under key feature k; one
more softmax for each feature updates it. Scores are `log_matmul`s, exact for any queries and keys.
Decays are added up, never subtracted, so that -inf, the start of a segment, is exact as well. All
outputs are convex averages: no value is too large.

Averages are formed in linear space (`attend_linear`) or, for log-values whose span exceeds the
range of floating point, in log space (`attend_log`): a sum of shares times values is then the LSE
of log-shares plus log-values. Nothing else differs.
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
    log_add_exp,
    log_matmul,
    log_sum_exp,
    matmul,
    where_empty,
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
    return log_add_exp(log_sum_exp(near[..., None] + value[:, None], -2), log_matmul(past, mean))


def _update_log(kept: Array, mean: Array, added: Array, value: Array) -> Array:
    return log_add_exp(kept[..., None] + mean, log_matmul(jnp.swapaxes(added, -1, -2), value))


LINEAR = Space(_read_linear, _update_linear)
LOG = Space(_read_log, _update_log)

Outputs = tuple[Float[Array, "J X RC V"], Float[Array, "J X RC"]]  # Y and log Z


def forward(space: Space, chunks: Chunk, state: Averages) -> tuple[Outputs, Averages]:
    """Y, log Z and the state after all chunks."""

    def step(state: Averages, tokens: Chunk) -> tuple[Averages, Outputs]:
        return _absorb(space, tokens, state), _attend(space, tokens, state)

    after, outputs = lax.scan(step, state, chunks)
    return outputs, after


def backward(
    space: Space, chunks: Chunk, state: Averages, d_outputs: Outputs, d_after: Averages
) -> tuple[Chunk, Averages]:
    """Cotangents of the chunks and of the state before them; all else is computed again."""

    def absorb(state: Averages, tokens: Chunk) -> tuple[Averages, Averages]:
        return _absorb(space, tokens, state), state

    def step(d_after: Averages, xs: tuple[Chunk, Averages, Outputs]) -> tuple[Averages, Chunk]:
        tokens, before, d_outputs = xs

        def both(tokens: Chunk, before: Averages) -> tuple[Outputs, Averages]:
            return _attend(space, tokens, before), _absorb(space, tokens, before)

        d_chunk, d_before = jax.vjp(both, tokens, before)[1]((d_outputs, d_after))
        return d_before, d_chunk

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


def _attend(space: Space, tokens: Chunk, state: Averages) -> Outputs:
    query, key, value, decay = tokens
    near, past = _scores(query, key, decay), query + state.log_z[:, None]
    if decay is not None:
        from_start, _ = _decay_from_start_and_to_end(decay)
        past = past + repeat_rows(from_start, query.shape[1] // key.shape[1])
    log_z = log_add_exp(log_sum_exp(near, -1), log_sum_exp(past, -1))
    total = where_empty(log_z, jnp.inf)[..., None]
    return space.read(near - total, value, past - total, state.mean), log_z


def _absorb(space: Space, tokens: Chunk, state: Averages) -> Averages:
    _, added, value, decay = tokens
    kept = state.log_z
    if decay is not None:
        from_start, to_end = _decay_from_start_and_to_end(decay)
        kept, added = kept + from_start[:, -1], added + to_end
    log_z = log_add_exp(kept, log_sum_exp(added, 1))
    total = where_empty(log_z, jnp.inf)
    return Averages(log_z, space.update(kept - total, state.mean, added - total[:, None], value))


def _scores(query: Array, key: Array, decay: Array | None) -> Float[Array, "X RC C"]:
    """A_ts, -inf where s > t."""
    size = key.shape[1]
    heads = query.shape[1] // size
    if decay is not None and decay.shape[-1] > 1:
        return _scores_by_levels(query, key, decay)
    scores = log_matmul(query, jnp.swapaxes(key, 1, 2))
    if decay is not None:
        t, s, r = _indices(size, size, size)
        between = _sums(((s < r) & (r <= t)).reshape(size * size, size), decay)
        scores = scores + repeat_rows(between.reshape(-1, size, size), heads)
    t, s = _indices(size, size)
    return jnp.where(repeat_rows(s <= t, heads)[None], scores, -jnp.inf)


def _scores_by_levels(query: Array, key: Array, decay: Array) -> Float[Array, "X RC C"]:
    """A_ts where each key feature decays at its own rate, so that D_ts is inside the LSE.

    For s < t there is one level l at which s lies in the left and t in the right half of the same
    2^(l+1) tokens. Split at the middle, D_ts is a sum to the end of the left half, which belongs to
    the key, and one from the start of the right half, which belongs to the query.
    """
    size = key.shape[1]
    heads = query.shape[1] // size
    level, t, s = _indices(size.bit_length() - 1, size, size)
    half_of_t, half_of_s = t >> level, s >> level
    same = half_of_t == half_of_s
    prefix, suffix = _sums(same & (s <= t), decay), _sums(same & (s > t), decay)
    keys = jnp.swapaxes(key[None] + suffix, -1, -2)
    scores = log_matmul(query[None] + repeat_rows(prefix, heads), keys)
    siblings = (half_of_t ^ 1 == half_of_s) & (s < t)
    siblings = repeat_rows(siblings, heads)[:, None]
    scores = jnp.sum(jnp.where(siblings, scores, 0), 0)
    scores = jnp.where(jnp.any(siblings, 0), scores, -jnp.inf)
    own = log_sum_exp(query + repeat_rows(key, heads), -1)[..., None]
    t, s = _indices(size, size)
    return jnp.where(repeat_rows(s == t, heads)[None], own, scores)


def _decay_from_start_and_to_end(decay: Array) -> tuple[Array, Array]:
    """Sums of the decays up to each token of a chunk, and after it, `[X, C, F]`."""
    t, r = _indices(decay.shape[1], decay.shape[1])
    return _sums(r <= t, decay), _sums(r > t, decay)


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
