"""Rotary position embedding."""

import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops.devices import over_devices
from heinsen_jax.typing import Array, Float, Shaped, wide


@over_devices
def rotary(
    x: Float[Array, "*B T N P"],
    positions: Shaped[Array, "T"] | Shaped[Array, "*B T"],
    *,
    base: float = 10000.0,
    frequencies: Float[Array | np.ndarray, "pairs"] | None = None,
) -> Float[Array, "*B T N P"]:
    """Rotate each pair of adjacent features by an angle proportional to the position.

        (x_2i, x_2i+1) -> (x_2i cos a - x_2i+1 sin a,  x_2i sin a + x_2i+1 cos a)
        a = position base^(-2i / P)

    The product of a rotated query and a rotated key depends only on their distance. (Other
    implementations often pair features i and i + P/2 instead.)

    Args:
      x: `[*B, T, N, P]`, P even.
      positions: `[T]` or `[*B, T]`.
      base: base of the angles' geometric progression.
      frequencies: `[pairs]`, angle per position of each pair, instead of base^(-2i / P); features
        after the last pair are not rotated.

    Returns:
      Rotated features, of the same shape and dtype. Computed in at least float32.

    Examples:
      >>> rotary(jnp.ones((1, 1, 2)), jnp.array([jnp.pi])).ravel().round().tolist()
      [-1.0, -1.0]

    References:
      Su et al., 2021, RoFormer, arXiv:2104.09864, eq. (34).
    """
    if x.ndim < 3 or x.shape[-1] % 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "x must be [..., tokens, heads, an even number of features] and floating point, is "
            f"{x.dtype} {x.shape}"
        )
    positions = jnp.asarray(positions)
    if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        raise ValueError(
            f"positions must have shape {x.shape[-3:-2]} or {x.shape[:-2]}, got {positions.shape}"
        )
    depth, dtype = x.shape[-1], wide(x)
    if frequencies is None:
        frequencies = base ** (-jnp.arange(0, depth, 2, dtype=dtype) / max(depth, 1))
    if 2 * frequencies.shape[0] > depth:
        raise ValueError(f"frequencies of {frequencies.shape[0]} pairs, but x has {depth} features")
    frequencies = jnp.asarray(frequencies, dtype)
    x, rest = x[..., : 2 * len(frequencies)], x[..., 2 * len(frequencies) :]
    positions = positions.astype(dtype)[..., None, None]
    angle = positions * frequencies.reshape((1,) * (positions.ndim - 1) + frequencies.shape)
    angle = jnp.broadcast_to(angle, (*x.shape[:-1], len(frequencies)))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., ::2].astype(dtype), x[..., 1::2].astype(dtype)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], -1)
    turned = turned.reshape(x.shape).astype(x.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned
