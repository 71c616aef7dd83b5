"""A choice between ways to compute the same, one cheaper and one serving more inputs."""

from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from heinsen_jax.typing import Array


@custom_vmap
def first_safe(excess: Array) -> Array:
    """Index for `lax.switch`: of the first way whose excess is not above 0, `len(excess)` if none.

    Ways are ordered, each serving all that those before it do. Under `jax.vmap` one choice is made
    for all that is mapped over: a switch on a batch of choices would run every branch.

    Args:
      excess: `[ways - 1]`, how far inputs exceed what each way but the last can serve. Without
        gradient. NaN is not safe.
    """
    return jnp.sum(~(excess <= 0), dtype=jnp.int32)


@first_safe.def_vmap
def _first_safe_of_all(axis_size: int, in_batched: Any, excess: Array) -> tuple[Array, bool]:
    return first_safe(jnp.max(excess, 0)), False
