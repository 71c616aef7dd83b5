"""Choice between implementations of one computation, ordered from cheapest to most general."""

from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from heinsen_jax.typing import Array


@custom_vmap
def first_safe(excess: Array) -> Array:
    """Return the index for `lax.switch` of the first implementation that can handle the inputs.

    Implementations are ordered: each handles all inputs that the preceding ones do. The first one
    with excess <= 0 is chosen, the last one if none. Under `jax.vmap` one choice is made for the
    whole batch, because a switch on a batched index would run every branch.

    Args:
      excess: `[implementations - 1]`, the amount by which the inputs exceed the range of each
        implementation but the last. Not differentiated. NaN counts as out of range.
    """
    return jnp.sum(~(excess <= 0), dtype=jnp.int32)


@first_safe.def_vmap
def _first_safe_of_all(axis_size: int, in_batched: Any, excess: Array) -> tuple[Array, bool]:
    return first_safe(jnp.max(excess, 0, initial=0)), False
