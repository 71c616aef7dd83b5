"""A short causal depthwise convolution, whose state is the last few tokens."""

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.ops.arguments import segment_starts
from heinsen_jax.typing import Array, Features, Float, Integer, wide


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
        taps = self.taps[...].astype(x.dtype)
        if state is None:
            state = self.init_state(x.shape[:-2])
        tokens, after = shifted(x, len(taps), state, segment_ids)
        y = jnp.zeros_like(x)
        for tap, earlier in zip(taps, tokens, strict=True):
            y = y + jnp.broadcast_to(tap, x.shape) * earlier
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(x.dtype), x.shape)
        return y, after

    def init_state(self, batch_shape: Sequence[int]) -> Float[Array, "*B last D"]:
        size, features = self.taps.shape
        return jnp.zeros((*batch_shape, size - 1, features), self.dtype or self.taps.dtype)


def shifted(
    x: Features,
    size: int,
    state: Float[Array, "*B last D"],
    segment_ids: Integer[Array, "*B T"] | None,
) -> tuple[list[Features], Float[Array, "*B last D"]]:
    """x `[*B, T, D]` of size - 1, ..., 1 and 0 tokens before, after the size - 1 tokens in a state;
    and the state after x. Tokens of other segments are zeros."""
    length = x.shape[-2]
    together = jnp.concatenate([state.astype(x.dtype), x], -2)
    parts = [together[..., shift : shift + length, :] for shift in range(size)]
    if segment_ids is not None:
        counts = jnp.cumsum(segment_starts(segment_ids, None), -1, dtype=jnp.int32)
        segments = jnp.pad(counts, [(0, 0)] * (x.ndim - 2) + [(size - 1, 0)])[..., None]
        own = segments[..., size - 1 :, :]
        parts = [
            jnp.where(segments[..., shift : shift + length, :] == own, part, 0)
            for shift, part in enumerate(parts)
        ]
        together = jnp.where(segments == segments[..., -1:, :], together, 0)
    return parts, together[..., length:, :].astype(state.dtype)
