"""A short causal depthwise convolution, whose state is the last few tokens."""

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention.parameters import LayerOptions, wide
from heinsen_jax.ops.arguments import segment_starts
from heinsen_jax.typing import Array, Features, Float, Integer


class CausalConvolution(nnx.Module):
    """y_t = bias + sum_i w_i x_(t-size+1+i) per feature, with zeros before the first token.

    At initialization the current token has weight 1, earlier ones are uniform in +-1/size, and the
    bias, if any, is 0.

    The state is the last size - 1 tokens, `[*B, size - 1, D]`.
    """

    def __init__(
        self,
        size: int,
        features: int,
        logical_axis: str | None,
        *,
        use_bias: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.dtype, param_dtype = options["dtype"], wide(options["param_dtype"])
        init, key = nnx.initializers.uniform(2 / size), options["rngs"].params()
        small = init(key, (size, features), param_dtype)
        taps = (small - 1 / size).at[-1].set(1.0)
        axes = () if logical_axis is None else (logical_axis,)
        self.taps = nnx.Param(taps, logical_axes=axes, kind="vector")
        bias = jnp.zeros(features, param_dtype)
        self.bias = nnx.Param(bias, logical_axes=axes, kind="vector") if use_bias else None

    def __call__(
        self,
        x: Features,
        *,
        state: Float[Array, "*B last D"] | None,
        segment_ids: Integer[Array, "*B T"] | None = None,
    ) -> tuple[Features, Float[Array, "*B last D"]]:
        """y `[*B, T, D]`, and the state after x. Tokens of other segments count as zeros; the state
        belongs to the first segment, and the new one to the last."""
        taps, length = self.taps[...].astype(x.dtype), x.shape[-2]
        if state is None:
            state = self.init_state(x.shape[:-2])
        together = jnp.concatenate([state.astype(x.dtype), x], -2)
        segments = None
        if segment_ids is not None:
            counts = jnp.cumsum(segment_starts(segment_ids, None), -1, dtype=jnp.int32)
            segments = jnp.pad(counts, [(0, 0)] * (x.ndim - 2) + [(len(taps) - 1, 0)])[..., None]
        y = jnp.zeros_like(x)
        for shift, tap in enumerate(taps):
            earlier = together[..., shift : shift + length, :]
            if segments is not None:
                own = segments[..., len(taps) - 1 :, :]
                earlier = jnp.where(segments[..., shift : shift + length, :] == own, earlier, 0)
            y = y + jnp.broadcast_to(tap, x.shape) * earlier
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(x.dtype), x.shape)
        if segments is not None:
            together = jnp.where(segments == segments[..., -1:, :], together, 0)
        return y, together[..., length:, :].astype(state.dtype)

    def init_state(self, batch_shape: Sequence[int]) -> Float[Array, "*B last D"]:
        size, features = self.taps.shape
        return jnp.zeros((*batch_shape, size - 1, features), self.dtype or self.taps.dtype)
