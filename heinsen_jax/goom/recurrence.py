"""A linear recurrence with one dense matrix, in numbers of any magnitude."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.goom.wide import Wide, product, total
from heinsen_jax.ops.arguments import segment_starts
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import nearly_equal_blocks, varying_like
from heinsen_jax.typing import Array, Float, Integer, exported_tuple

RADIX = 4
"""Number of delayed states that one product combines."""
CHUNK = RADIX**2 - 1
"""Most steps of a chunk, which follow the state before it."""
LARGEST = math.exp(2)
"""Largest magnitude of an output vector."""


@exported_tuple
class DenseState(NamedTuple):
    """Vectors mantissa * 2^exponent, with |mantissa| in [1/2, 1), or 0."""

    mantissa: Float[Array, "*B N K"]
    exponent: Integer[Array, "*B N K"]


@over_devices
def dense_recurrence(
    inputs: Float[Array, "*B T N K"],
    transition: Float[Array, "K K"],
    initial: Float[Array, "N K"],
    *,
    segment_ids: Integer[Array, "*B T"] | None = None,
    initial_state: DenseState | None = None,
    return_state: bool = False,
) -> Float[Array, "*B T N K"] | tuple[Float[Array, "*B T N K"], DenseState]:
    """A linear recurrence of row vectors x of size K, one for each of N heads, with normalized
    outputs (arXiv:2510.03426):

        x_t = x_{t-1} A + u_t,    y_t = x_t exp(2) / max |x_t|

    y = 0 for x = 0; the maximum has no gradient. Magnitudes of x are limited as in
    `chain_products`; y is NaN beyond.

    The steps of a chunk are computed in parallel, chunks in sequence. From x = u, and from the
    state before the chunk, for n = 1 and 4,

        x_t <- x_t + x_{t-n} A^n + x_{t-2n} A^{2n} + x_{t-3n} A^{3n}

    without terms from before that state, or of other segments.

    Args:
      inputs: u.
      transition: A.
      initial: x_0, before the first token of each segment.
      segment_ids: segments, which are runs of equal ids.
      initial_state: the state before the first token, instead of `initial`.
      return_state: whether to return the state after the last token, too.

    Returns:
      y, or the pair (y, state).
    """
    *batch, length, heads, size = inputs.shape
    matrix, first = Wide.of(transition), Wide.of(initial.astype(inputs.dtype))
    state = first
    if initial_state is not None:
        state = Wide(initial_state.mantissa.astype(inputs.dtype), initial_state.exponent)
    first, state = (
        jax.tree.map(
            lambda leaf: varying_like(jnp.broadcast_to(leaf, (*batch, heads, size)), inputs), x
        )
        for x in (first, state)
    )
    y = inputs
    if length:
        tokens, starts = Wide.of(jnp.swapaxes(inputs, -3, -2)), None
        if segment_ids is not None:
            starts = segment_starts(segment_ids, None)[..., None, :, None]
            after = product(first[..., None, :], matrix)
            after = Wide(jnp.where(starts, after.mantissa, 0), after.exponent)
            tokens = total(tokens, after)
        state, y = _in_chunks(matrix, state, tokens, starts)
        y = jnp.swapaxes(y, -3, -2)
    if not return_state:
        return y
    given = inputs if initial_state is None else initial_state.mantissa
    return y, DenseState(state.mantissa.astype(given.dtype), state.exponent)


def _in_chunks(
    matrix: Wide, state: Wide, tokens: Wide, starts: Array | None
) -> tuple[Wide, Float[Array, "*B N T K"]]:
    """The last state, and y."""
    *_, length, size = tokens.shape
    count, chunk = nearly_equal_blocks(length, CHUNK)
    last = (length - 1) % chunk
    ones = Wide.of(jnp.eye(size, dtype=matrix.mantissa.dtype))
    _, powers = lax.scan(lambda x, _: (product(x, matrix), x), ones, length=RADIX**2)

    def split(leaf: Array) -> Array:  # [*B, T, K] to [chunks, *B, steps, K]
        padding = [(0, 0)] * (leaf.ndim - 2) + [(0, count * chunk - length), (0, 0)]
        leaf = jnp.pad(leaf, padding)
        leaf = leaf.reshape(*leaf.shape[:-2], count, chunk, leaf.shape[-1])
        return jnp.moveaxis(leaf, -3, 0)

    @jax.checkpoint
    def step(state: Wide, chunk: tuple[Wide, Array | None]) -> tuple[Wide, tuple[Array, Wide]]:
        tokens, starts = chunk
        tokens = jax.tree.map(lambda x, y: jnp.concatenate([x[..., None, :], y], -2), state, tokens)
        segments = None
        if starts is not None:
            counts = jnp.cumsum(starts, -2, dtype=jnp.int32)
            segments = jnp.concatenate([jnp.zeros_like(counts[..., :1, :]), counts], -2)
        states = _chunk(powers, tokens, segments)[..., 1:, :]
        return states[..., -1, :], (_normed(states), states[..., last, :])

    _, (y, lasts) = lax.scan(step, state, jax.tree.map(split, (tokens, starts)))
    y = jnp.moveaxis(y, 0, -3)
    y = y.reshape(*y.shape[:-3], count * chunk, size)[..., :length, :]
    return lasts[-1], y


def _chunk(powers: Wide, states: Wide, segments: Array | None) -> Wide:
    """x of a chunk, from the state before it and the inputs u."""
    length = states.shape[-2]

    def delayed(leaf: Array, number: int) -> Array:
        padding = [(0, 0)] * (leaf.ndim - 2) + [(number, 0), (0, 0)]
        return jnp.pad(leaf, padding)[..., :length, :]

    distance = 1
    while distance < length:
        numbers = [n * distance for n in range(RADIX) if n * distance < length]
        earlier = [jax.tree.map(lambda leaf, n=n: delayed(leaf, n), states) for n in numbers]
        if segments is not None:
            own = [delayed(segments, n) == segments for n in numbers]
            earlier = [
                Wide(jnp.where(is_own, x.mantissa, 0), x.exponent)
                for is_own, x in zip(own, earlier, strict=True)
            ]
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, -1), *earlier)
        maps = jax.tree.map(lambda *x: jnp.concatenate(x, -2), *(powers[n] for n in numbers))
        states = product(rows, maps)
        distance *= RADIX
    return states


def _normed(states: Wide) -> Array:
    """Vectors whose largest magnitude is `LARGEST`."""
    floats = states.scaled(states.largest(-1))
    largest = jnp.max(jnp.abs(lax.stop_gradient(floats)), -1, keepdims=True)
    return floats * (LARGEST / jnp.where(largest == 0, 1, largest))
