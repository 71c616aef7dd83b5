"""A linear recurrence with one dense matrix, in numbers far beyond the range of floats."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.goom.wide import Wide, product, total
from heinsen_jax.ops.arguments import segment_starts
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.typing import Array, Float, Integer, exported_tuple, wide

READOUT_MAXIMUM = math.exp(2)
"""Largest magnitude in an output vector."""


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
    `chain_products`; vectors beyond are NaN in y. Steps are computed one after the other, in at
    least float32.

    Args:
      inputs: u `[*B, T, N, K]`.
      transition: A `[K, K]`.
      initial: x_0 `[N, K]`, before the first token of each segment.
      segment_ids: `[*B, T]`; segments are runs of equal ids.
      initial_state: x_0 `[*B, N, K]` of the first segment, instead of `initial`.
      return_state: whether to return the state after the last token, too.

    Returns:
      y `[*B, T, N, K]` in the dtype of u, or the pair (y, state).
    """
    dtype = wide(inputs)
    matrix, first = Wide.of(transition.astype(dtype)), Wide.of(initial.astype(dtype))
    state = first if initial_state is None else Wide(*initial_state).astype(dtype)
    shape = (*inputs.shape[:-3], *initial.shape)
    first, state = (
        jax.tree.map(lambda leaf: varying_like(jnp.broadcast_to(leaf, shape), inputs), x)
        for x in (first, state)
    )
    tokens, starts = Wide.of(jnp.moveaxis(inputs.astype(dtype), -3, 0)), None
    if segment_ids is not None:
        starts = jnp.moveaxis(segment_starts(segment_ids, None), -1, 0)[..., None, None]

    state, y = _recur(matrix, first, state, tokens, starts)
    y = jnp.moveaxis(y, 0, -3).astype(inputs.dtype)
    if not return_state:
        return y
    given = dtype if initial_state is None else initial_state.mantissa.dtype
    return y, DenseState(state.mantissa.astype(given), state.exponent)


@jax.jit  # compiled once outside another `jit`
def _recur(
    transition: Wide, first: Wide, state: Wide, tokens: Wide, starts: Array | None
) -> tuple[Wide, Array]:
    """The last state, and the outputs, with time as the first axis."""

    @jax.checkpoint
    def step(state: Wide, now: tuple[Wide, Array | None]) -> tuple[Wide, Array]:
        token, is_start = now
        if is_start is not None:
            state = jax.tree.map(lambda x, y: jnp.where(is_start, x, y), first, state)
        state = total(product(state, transition), token)
        return state, _normed(state)

    return lax.scan(step, state, (tokens, starts))


def _normed(states: Wide) -> Array:
    """Vectors whose largest magnitude is `READOUT_MAXIMUM`."""
    floats = states.scaled(states.largest(-1))
    largest = jnp.max(jnp.abs(lax.stop_gradient(floats)), -1, keepdims=True)
    largest = jnp.where(jnp.isinf(largest), jnp.nan, largest)
    return floats * (READOUT_MAXIMUM / jnp.where(largest == 0, 1, largest))
