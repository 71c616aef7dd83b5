r"""Fast tier: causal averages of values as masked matrix products over chunks.

Every exponential is scaled by a maximum over the whole chunk and its past. The outputs of a chunk
need two products: with the chunk's keys, masked, and with the state before it,

    S = mask(Q^ K^T) V + Q^ S_before,    Z = mask(Q^ K^T) 1 + Q^ Z_before,    Y = S / Z

All terms are positive, so nothing cancels. Underflow is possible if keys *rise* inside a chunk far
above the largest one visible to the chunk's first query (measured by `scales_and_rise`): such a
query is scaled by a maximum over keys that are masked for it.

Decay multiplies the state by exp(log_decay) before each token. Inside a chunk it is absorbed into
the exponents: with D_t the sum of decays from the chunk's start up to t,

    Q'_t = Q_t + D_t,    K'_s = K_s - D_s

and the whole chunk's decay is applied to the state after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.layout import chunk, repeat_rows, unchunk
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs, Outputs
from heinsen_jax.ops.numerics import einsum, finite, reciprocal, safe_log, share, where_empty
from heinsen_jax.typing import Array, Float, Int


@dataclass(frozen=True)
class Form:
    """Options of the products.

    Attributes:
      chunk_size: number of tokens in a chunk.
      is_half: whether factors of matrix products are rounded to bfloat16. Sums and states are not.
      parallel_scan: whether the states before all chunks are computed by a parallel scan, not
        sequentially.
    """

    chunk_size: int
    is_half: bool = False
    parallel_scan: bool = False

    @property
    def einsum(self) -> Callable[..., Array]:
        return _einsum_in_bfloat16 if self.is_half else einsum


def _einsum_in_bfloat16(pattern: str, *factors: Array) -> Array:
    rounded = [x.astype(jnp.bfloat16) for x in factors]
    return jnp.einsum(pattern, *rounded, preferred_element_type=factors[0].dtype)


class Exponents(NamedTuple):
    """Q' and K', which include the decay, and the values of J chunks."""

    query: Float[Array, "J X RC K"]
    key: Float[Array, "J X C K"]
    value: Float[Array, "J X C V"]
    decay: Float[Array, "J X K"] | None  # total decay of a chunk
    segments: Int[Array, "J X C"] | None  # number of segments begun in the chunk, up to each token


class MaxExponents(NamedTuple):
    """Largest exponents, -inf without any."""

    before: Float[Array, "J X K"]  # in the state before a chunk
    query: Float[Array, "J X K"]  # in the state before a chunk and the keys of the chunk
    after: Float[Array, "J X K"]  # in the state after a chunk


class Residuals(NamedTuple):
    """Residuals of the forward pass."""

    query: Float[Array, "J X RC K"]  # exp(Q'), scaled
    key: Float[Array, "J X C K"]  # exp(K'), scaled
    value: Float[Array, "J X C V"]
    weights: Float[Array, "J X RC C"]
    inverse: Float[Array, "J X RC"]  # 1 / Z
    y: Float[Array, "J X RC V"]
    s: Float[Array, "J X K V"]  # S and Z before each chunk
    z: Float[Array, "J X K"]
    mean: Float[Array, "X K V"]  # averages in the state before all chunks
    start: Float[Array, "X K"]  # Z of that state
    mean_end: Float[Array, "X K V"]  # averages in the state after all chunks
    inverse_end: Float[Array, "X K"]
    kept: Float[Array, "J X 1"] | None  # whether a chunk keeps the state before it
    carried: Float[Array, "J X K"]  # factor of a state from chunk to chunk
    segments: Int[Array, "J X C"] | None


SumState = tuple[Float[Array, "X K V"], Float[Array, "X K"]]  # S and Z
SumStates = tuple[Float[Array, "J X K V"], Float[Array, "J X K"]]


def scales_and_rise(
    inputs: Inputs, log_z: Array, form: Form
) -> tuple[MaxExponents, Float[Array, ""]]:
    """Return the scales, and the maximum rise in nats of a query's scale above its visible keys.

    Not differentiated. `log_z` `[X, K]` belongs to the state before the chunks.
    """
    inputs, log_z = lax.stop_gradient((inputs, log_z))
    _, key, _, decay, segments = _exponents(inputs, form.chunk_size)
    scales = _scales(form, key, decay, segments, log_z)
    visible = jnp.maximum(scales.before, key[..., 0, :])
    if segments is None:  # queries before the first key that is not masked have an empty sum
        least = jnp.min(where_empty(key, jnp.inf), -2)
        visible = jnp.where(visible == -jnp.inf, least, visible)
    else:  # the first token of a segment attends to itself alone
        first = jnp.diff(segments, prepend=0)[..., None] > 0
        visible = jnp.where(first[..., 0, :], key[..., 0, :], visible)
        visible = jnp.minimum(visible, jnp.min(jnp.where(first, key, jnp.inf), -2))
    rise = jnp.where(scales.query == -jnp.inf, 0.0, scales.query - visible)
    return scales, jnp.max(rise, initial=0.0)


def forward(
    form: Form, inputs: Inputs, state: Averages, scales: MaxExponents
) -> tuple[tuple[Outputs, Averages], Residuals]:
    """Return ((Y, log Z), state after all tokens), and residuals. The number of tokens is a
    multiple of the chunk size; the state is `[X, ...]`."""
    query, key, value, decay, segments = _exponents(inputs, form.chunk_size)
    scale = finite(scales.query)[..., None, :]
    key, query = share(key, scale), query + scale
    largest = finite(jnp.max(query, -1, keepdims=True))
    query = share(query, largest)

    absorbed = key if segments is None else _where_last(segments, key, 0.0)
    added = form.einsum("jxck,jxcv->jxkv", absorbed, value), jnp.sum(absorbed, -2)
    start = share(state.log_z, scales.query[0])
    kept = None
    if segments is not None:
        kept = (segments[..., -1] == 0)[..., None].astype(scale.dtype)
    carried = _carried(scales, decay)
    first = start[..., None] * state.mean, start
    (s, z), (s_end, z_end) = _states(form, first, kept, added, carried)

    weights = _masked(form.einsum("jxck,jxdk->jxcd", query, key), segments)
    reading = _where_continued(query, segments)
    y = form.einsum("jxcd,jxdv->jxcv", weights, value)
    y = y + form.einsum("jxck,jxkv->jxcv", reading, s)
    total = jnp.sum(weights, -1) + einsum("jxck,jxk->jxc", reading, z)
    inverse, inverse_end = reciprocal(total), reciprocal(z_end)
    y = y * inverse[..., None]
    mean_end = s_end * inverse_end[..., None]
    after = Averages(safe_log(z_end) + finite(scales.after[-1]), mean_end)

    _, _, groups, heads, _ = inputs.query.shape
    log_z = (safe_log(total) + largest[..., 0])[..., None]
    outputs = unchunk(y, groups, heads), unchunk(log_z, groups, heads)[..., 0]
    residuals = Residuals(
        query, key, value, weights, inverse, y, s, z,
        state.mean, start, mean_end, inverse_end, kept, carried, segments,
    )  # fmt: skip
    return (outputs, after), residuals


def backward(
    form: Form, inputs: Inputs, residuals: Residuals, d_outputs: Outputs, d_after: Averages
) -> tuple[Inputs, Averages]:
    """Return the cotangents of the inputs (None for `starts`) and of the state before them."""
    (
        query, key, value, weights, inverse, y, s, z,
        mean, start, mean_end, inverse_end, kept, carried, segments,
    ) = residuals  # fmt: skip
    d_y = chunk(d_outputs[0], form.chunk_size)
    d_log_z = chunk(d_outputs[1][..., None], form.chunk_size)[..., 0]
    d_y = d_y * inverse[..., None]
    d_total = d_log_z * inverse - einsum("jxcv,jxcv->jxc", d_y, y)

    reading = _where_continued(query, segments)
    d_s = form.einsum("jxck,jxcv->jxkv", reading, d_y)
    d_z = einsum("jxck,jxc->jxk", reading, d_total)
    d_s_end = d_after.mean * inverse_end[..., None]
    d_z_end = d_after.log_z * inverse_end - jnp.sum(d_s_end * mean_end, -1)
    d_added, d_start = _cotangents(form, (d_s_end, d_z_end), kept, (d_s, d_z), carried)
    d_log_z_0 = start * (d_start[1] + jnp.sum(d_start[0] * mean, -1))
    d_state = Averages(d_log_z_0, start[..., None] * d_start[0])

    d_weights = form.einsum("jxcv,jxdv->jxcd", d_y, value) + d_total[..., None]
    d_weights = _masked(d_weights, segments)
    d_reading = form.einsum("jxcv,jxkv->jxck", d_y, s) + d_total[..., None] * z[..., None, :]
    d_query = form.einsum("jxcd,jxdk->jxck", d_weights, key) + _where_continued(d_reading, segments)

    absorbed = key if segments is None else _where_last(segments, key, 0.0)
    d_value = form.einsum("jxcd,jxcv->jxdv", weights, d_y)
    d_value = d_value + form.einsum("jxck,jxkv->jxcv", absorbed, d_added[0])
    d_absorbed = form.einsum("jxcv,jxkv->jxck", value, d_added[0]) + d_added[1][..., None, :]
    d_key = key * form.einsum("jxcd,jxck->jxdk", d_weights, query)
    d_key_of_state = absorbed * d_absorbed
    d_decay = None
    if inputs.log_decay is not None:  # a chunk's decay multiplies the whole state after it
        d_state_decay = z * d_added[1] + jnp.sum(s * d_added[0], -1)
        d_decay = jnp.sum(d_key_of_state, -2) + _times(kept, d_state_decay)
    d_query, d_key = query * d_query, d_key + d_key_of_state
    d_exponents = Exponents(d_query, d_key, d_value, d_decay, segments)
    return _inputs_cotangent(inputs, form.chunk_size, d_exponents), d_state


def _exponents(inputs: Inputs, size: int) -> Exponents:
    query, key, value = (chunk(x, size) for x in (inputs.query, inputs.key, inputs.value))
    decay = segments = None
    if inputs.log_decay is not None:
        so_far = jnp.cumsum(chunk(inputs.log_decay, size), -2)
        query, key = query + repeat_rows(so_far, query.shape[-2] // size), key - so_far
        decay = jnp.broadcast_to(so_far[..., -1, :], key[..., -1, :].shape)
    if inputs.starts is not None:
        starts = jnp.broadcast_to(inputs.starts[..., None, None], (*inputs.key.shape[:3], 1))
        segments = jnp.cumsum(chunk(starts, size)[..., 0], -1)
    return Exponents(query, key, value, decay, segments)


def _inputs_cotangent(inputs: Inputs, size: int, d_exponents: Exponents) -> Inputs:
    """Return the cotangents of the inputs of `_exponents`, given the cotangents of its results;
    `d_exponents.segments` has the segments themselves."""
    _, _, groups, heads, _ = inputs.query.shape
    d_query, d_key, d_value, d_decay, segments = d_exponents

    def without_heads(x: Array) -> Array:
        return unchunk(x, groups, 1)[:, :, :, 0]

    d_log_decay = None
    if d_decay is not None:
        assert inputs.log_decay is not None
        rows = d_query.reshape(*d_query.shape[:2], heads, size, -1)
        d_so_far = jnp.sum(rows, 2) - d_key
        d_so_far = d_so_far.at[..., -1, :].add(d_decay)
        if inputs.log_decay.shape[-1] == 1:
            d_so_far = jnp.sum(d_so_far, -1, keepdims=True)
        if segments is None:
            d_log_decay = without_heads(lax.cumsum(d_so_far, axis=2, reverse=True))
        else:  # the sum over each later segment is 0, except for rounding
            summed = jnp.triu(segments[..., :, None] == segments[..., None, :])
            d_log_decay = einsum("jxts,jxsf->jxtf", summed.astype(d_so_far.dtype), d_so_far)
            d_log_decay = without_heads(d_log_decay)
    d_query = unchunk(d_query, groups, heads)
    return Inputs(d_query, without_heads(d_key), without_heads(d_value), d_log_decay)


def _scales(
    form: Form, key: Array, decay: Array | None, segments: Array | None, log_z: Array
) -> MaxExponents:
    largest = jnp.max(key, -2)
    if decay is None and segments is None:
        running = lax.cummax(jnp.concatenate([log_z[None], largest]), axis=0)
        return MaxExponents(running[:-1], running[1:], running[1:])
    decay = jnp.zeros_like(largest) if decay is None else decay
    kept, hidden = largest, decay  # decay of the state before a chunk
    if segments is not None:
        kept = jnp.max(_where_last(segments, key, -jnp.inf), -2)
        hidden = jnp.where(segments[..., -1:] > 0, -jnp.inf, decay)
    kept = kept + decay

    def step(before: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, kept = chunk
        return jnp.maximum(before + hidden, kept), before

    def compose(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        (hidden_1, kept_1), (hidden_2, kept_2) = earlier, later
        return hidden_1 + hidden_2, jnp.maximum(kept_1 + hidden_2, kept_2)

    if form.parallel_scan:
        hidden, kept = lax.associative_scan(compose, (hidden, kept))
        after = jnp.maximum(log_z[None] + hidden, kept)
    else:
        last, before = lax.scan(step, log_z, (hidden, kept))
        after = jnp.concatenate([before[1:], last[None]])
    before = jnp.concatenate([log_z[None], after[:-1]])
    return MaxExponents(before, jnp.maximum(before, largest), after)


def _carried(scales: MaxExponents, decay: Array | None) -> Float[Array, "J X K"]:
    """Return the factors that rescale a state from one chunk's queries to the next chunk's."""
    decayed = scales.query if decay is None else scales.query + decay
    return share(decayed, jnp.concatenate([scales.query[1:], scales.after[-1:]]))


def _times(factor: Array | None, x: Array) -> Array:
    """Multiply x by a factor with its first axes; None is 1."""
    if factor is None:
        return x
    return factor.reshape(*factor.shape, *[1] * (x.ndim - factor.ndim)) * x


def _states(
    form: Form, first: SumState, kept: Array | None, added: SumStates, carried: Array
) -> tuple[SumStates, SumState]:
    """Return (S_0 .. S_J-1, S_J) for S_j+1 = carried_j (kept_j S_j + added_j)."""

    def step(
        before: SumState, chunk: tuple[Array | None, SumState, Array]
    ) -> tuple[SumState, SumState]:
        kept, added, carried = chunk
        after = jax.tree.map(lambda s, a: _times(carried, _times(kept, s) + a), before, added)
        return after, before

    if not form.parallel_scan:
        last, states = lax.scan(step, first, (kept, added, carried))
        return states, last
    s, z = (_times(carried, x) for x in added)
    after = _tree(_times(kept, carried), (s, z), first)
    before = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs[:-1]]), first, after)
    return before, jax.tree.map(lambda x: x[-1], after)


def _cotangents(
    form: Form, last: SumState, kept: Array | None, read: SumStates, carried: Array
) -> tuple[SumStates, SumState]:
    """Return the cotangents of `added` and S_0, given the cotangents of S_J and S_0 .. S_J-1."""

    def step(
        d_after: SumState, chunk: tuple[Array | None, SumState, Array]
    ) -> tuple[SumState, SumState]:
        kept, read, carried = chunk
        d_added = jax.tree.map(partial(_times, carried), d_after)
        return jax.tree.map(lambda d, r: _times(kept, d) + r, d_added, read), d_added

    if not form.parallel_scan:
        d_first, d_added = lax.scan(step, last, (kept, read, carried), reverse=True)
        return d_added, d_first
    s, z = (x[::-1] for x in read)
    reverse = _tree(_times(kept, carried)[::-1], (s, z), last)
    d_states = jax.tree.map(lambda x: x[::-1], reverse)
    d_after = jax.tree.map(lambda xs, x: jnp.concatenate([xs[1:], x[None]]), d_states, last)
    d_first = jax.tree.map(lambda x: x[0], d_states)
    return jax.tree.map(partial(_times, carried), d_after), d_first


def _tree(factor: Array, added: SumStates, first: SumState) -> SumStates:
    """Return S_1 .. S_J for S_j+1 = factor_j S_j + added_j."""

    def recurrence(added: Array, first: Array) -> Array:
        def compose(
            earlier: tuple[Array, Array], later: tuple[Array, Array]
        ) -> tuple[Array, Array]:
            (a1, b1), (a2, b2) = earlier, later
            return a1 * a2, a2 * b1 + b2

        factors = factor.reshape(*factor.shape, *[1] * (added.ndim - factor.ndim))
        a, x = lax.associative_scan(compose, (factors, added))
        return x + a * first[None]

    return jax.tree.map(recurrence, added, first)


def _where_last(segments: Array, x: Array, other: float) -> Array:
    """Zero x `[J, X, C, F]` at tokens outside the last segment of their chunk."""
    return jnp.where((segments == segments[..., -1:])[..., None], x, other)


def _masked(weights: Array, segments: Array | None) -> Float[Array, "J X RC C"]:
    """Zero weights of masked tokens."""
    size = weights.shape[-1]
    visible = jnp.tri(size, dtype=bool)[None, None]
    if segments is not None:
        visible = visible & (segments[..., :, None] == segments[..., None, :])
    return jnp.where(repeat_rows(visible, weights.shape[-2] // size), weights, 0.0)


def _where_continued(rows: Array, segments: Array | None) -> Float[Array, "J X RC F"]:
    """Zero rows where a segment has begun since the state before the chunk."""
    if segments is None:
        return rows
    reads = repeat_rows((segments == 0)[..., None], rows.shape[-2] // segments.shape[-1])
    return jnp.where(reads, rows, 0.0)
