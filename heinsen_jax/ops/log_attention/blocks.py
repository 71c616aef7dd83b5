"""Scan over blocks of tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.layout import nearly_equal_blocks
from heinsen_jax.typing import Array


def scan_blocks(
    body: Callable[[Any, tuple[Array, ...]], tuple[Any, Array | None]],
    carry: Any,
    tokens: tuple[Array, ...],
    *,
    block_size: int,
) -> tuple[Any, Array | None]:
    """Apply `lax.scan` to blocks of the token axis (-2 of each array).

    The last block is padded with -inf in the first array and with the last token in the others, so
    that padding has weight exp(-inf) = 0 in any log-space sum and extends no range of values.
    Blocks have nearly equal sizes, so that little is padded.

    Args:
      body: (carry, blocks of `tokens`) -> (carry, outputs with tokens on axis -2, or None). Wrap it
        in `jax.checkpoint` to save only the carries for the backward pass.
      carry: initial carry.
      tokens: arrays `[..., T, features]`; the first one is the keys.
      block_size: maximum number of tokens per block.

    Returns:
      The last carry, and the outputs of all blocks concatenated on axis -2.
    """
    length = tokens[0].shape[-2]
    num_blocks, block = nearly_equal_blocks(max(length, 1), block_size)
    padding = num_blocks * block - length

    def pad(x: Array, is_key: bool) -> Array:
        if not padding:
            return x
        widths = [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]
        if is_key:
            return jnp.pad(x, widths, constant_values=-jnp.inf)
        return jnp.pad(x, widths, mode="edge")

    padded = tuple(pad(x, i == 0) for i, x in enumerate(tokens))
    if num_blocks == 1:
        carry, outputs = body(carry, padded)
        return carry, None if outputs is None else outputs[..., :length, :]

    def split(x: Array) -> Array:
        blocks = x.reshape(*x.shape[:-2], num_blocks, block, x.shape[-1])
        return jnp.moveaxis(blocks, -3, 0)

    carry, outputs = lax.scan(body, carry, tuple(split(x) for x in padded))
    if outputs is None:
        return carry, None
    outputs = jnp.moveaxis(outputs, 0, -3)
    outputs = outputs.reshape(*outputs.shape[:-3], num_blocks * block, outputs.shape[-1])
    return carry, outputs[..., :length, :]
