"""Streams arrays through a function block by block of tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from heinsen_jax.typing import Array


def scan_blocks(
    body: Callable[[Any, tuple[Array, ...]], tuple[Any, Array | None]],
    carry: Any,
    tokens: tuple[Array, ...],
    *,
    block_size: int,
) -> tuple[Any, Array | None]:
    """`lax.scan` of `body` over blocks of the token axis (-2 of each array).

    The first array's tokens that pad the last block are -inf, the others' repeat the last token, so
    that padding has weight exp(-inf) = 0 in any log-space sum and widens no range of values.
    Blocks are as equal as can be, so little is padded.

    Args:
      body: (carry, blocks of `tokens`) -> (carry, outputs with tokens on axis -2, or None). Wrap it
        in `jax.checkpoint` where backward should keep carries only.
      carry: initial carry.
      tokens: arrays `[..., T, features]`; the first one is the keys.
      block_size: most tokens a block may hold.

    Returns:
      The last carry, and the outputs of all blocks joined on axis -2.
    """
    length = tokens[0].shape[-2]
    num_blocks = max(1, -(-length // block_size))
    block = -(-max(1, length) // num_blocks)
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
