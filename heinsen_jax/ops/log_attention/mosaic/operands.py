"""Operands of the GPU kernels: tokens and the state before them, in the layouts of kernels.

Kernels exist for some depths only. Others are padded with features that do not enter any sum.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.typing import Array, Float, Int, Shaped

CHUNK = 64  # tokens
DEPTHS = (32, 64, 128)
LEAST_ROWS = 64  # the least number of rows of a product on tensor cores


@dataclass(frozen=True)
class Operands:
    """Operands of the kernels. T is a multiple of 64, the size of J chunks; K and V are depths for
    which kernels exist.

    Attributes:
      query: float32 or bfloat16, like key and value; H = G R heads.
      value: values or log-values.
      log_z_before: log Z of the state before all tokens, float32.
      mean_before: its averages in linear space, transposed; W = max(V, 64) rows, 0 past V.
      so_far: sum of decays from the start of the chunk up to each token.
      at_end: sum of decays of each chunk.
      segments: number of segments begun in a token's chunk, up to that token.
      is_last: 1 if a token belongs to the last segment of its chunk, else 0.
      carried: -inf if a segment begins in a chunk, else 0.
    """

    query: Float[Array, "B T H K"]
    key: Float[Array, "B T G K"]
    value: Float[Array, "B T G V"]
    log_z_before: Float[Array, "B G K"]
    mean_before: Float[Array, "B G W K"]
    so_far: Float[Array, "B G T"] | Float[Array, "B T G K"] | None = None
    at_end: Float[Array, "B G J K"] | None = None
    segments: Int[Array, "B T"] | None = None
    is_last: Int[Array, "B T"] | None = None
    carried: Float[Array, "B J K"] | None = None

    @classmethod
    def of(cls, inputs: Inputs, state: Averages) -> "Operands":
        """Return the operands for a state in linear space."""
        batch, length, groups, heads, _ = inputs.query.shape
        key_depth, value_depth = _depth_of_kernel(inputs.key), _depth_of_kernel(inputs.value)
        # Log-values are padded with log 1, so averages are padded with 1.
        mean = pad_features(state.mean, value_depth, 1)
        mean = pad_features(jnp.swapaxes(mean, -1, -2), key_depth, 0)
        missing = max(value_depth, LEAST_ROWS) - value_depth
        query = pad_features(inputs.query, key_depth, -jnp.inf)
        operands = cls(
            query.reshape(batch, length, groups * heads, key_depth),
            pad_features(inputs.key, key_depth, -jnp.inf),
            pad_features(inputs.value, value_depth, 0),
            pad_features(state.log_z, key_depth, -jnp.inf),
            jnp.pad(mean, ((0, 0), (0, 0), (0, missing), (0, 0))),
        )
        if inputs.log_decay is not None:
            operands = operands._with_decay(inputs.log_decay)
        if inputs.starts is not None:
            operands = operands._with_segments(inputs.starts)
        return operands

    def _with_decay(self, log_decay: Float[Array, "B T G _"]) -> "Operands":
        key_depth = self.key.shape[-1]
        so_far = jnp.cumsum(_in_chunks(log_decay), 2)
        at_end = jnp.swapaxes(so_far[:, :, -1], 1, 2)
        so_far = so_far.reshape(log_decay.shape)
        if so_far.shape[-1] == 1:
            so_far = jnp.swapaxes(so_far[..., 0], 1, 2)
            at_end = jnp.broadcast_to(at_end, (*at_end.shape[:3], key_depth))
        else:
            so_far, at_end = (pad_features(x, key_depth, 0) for x in (so_far, at_end))
        return replace(self, so_far=so_far, at_end=at_end)

    def _with_segments(self, starts: Shaped[Array, "B T"]) -> "Operands":
        segments = jnp.cumsum(_in_chunks(starts.astype(jnp.int32)), 2)
        last = segments[:, :, -1:]
        carried = jnp.where(last == 0, 0.0, -jnp.inf)
        return replace(
            self,
            segments=segments.reshape(starts.shape),
            is_last=(segments == last).astype(jnp.int32).reshape(starts.shape),
            carried=jnp.broadcast_to(carried, (*carried.shape[:2], self.key.shape[-1])),
        )


def pad_features(x: Float[Array, "*N F"], depth: int, fill: float) -> Float[Array, "*N {depth}"]:
    missing = depth - x.shape[-1]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)], constant_values=fill)


def _depth_of_kernel(x: Float[Array, "*N F"]) -> int:
    return next(depth for depth in DEPTHS if depth >= x.shape[-1])


def _in_chunks(x: Shaped[Array, "B T *N"]) -> Shaped[Array, "B J C *N"]:
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
