"""A short causal depthwise convolution, whose state is the last few tokens."""

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention.layers import LayerOptions
from heinsen_jax.typing import Array, Features, Float


class CausalConvolution(nnx.Module):
    """y_t = sum_i w_i x_(t-size+1+i) per feature, with zeros before the first token.

    At initialization the current token has weight 1, earlier ones are uniform in +-1/size.

    The state is the last size - 1 tokens, `[*B, size - 1, D]`.
    """

    def __init__(self, size: int, model_dim: int, **options: Unpack[LayerOptions]) -> None:
        self.dtype = options["dtype"]
        init, key = nnx.initializers.uniform(2 / size), options["rngs"].params()
        small = init(key, (size, model_dim), jnp.dtype(options["param_dtype"]))
        taps = (small - 1 / size).at[-1].set(1.0)
        self.taps = nnx.Param(taps, logical_axes=("embed",))

    def __call__(
        self, x: Features, *, state: Float[Array, "*B last D"] | None
    ) -> tuple[Features, Float[Array, "*B last D"]]:
        """y `[*B, T, D]`, and the state after x."""
        taps, length = self.taps[...].astype(x.dtype), x.shape[-2]
        if state is None:
            state = self.init_state(x.shape[:-2])
        together = jnp.concatenate([state.astype(x.dtype), x], -2)
        parts = [
            jnp.broadcast_to(tap, x.shape) * together[..., shift : shift + length, :]
            for shift, tap in enumerate(taps)
        ]
        return sum(parts[1:], parts[0]), together[..., length:, :]

    def init_state(self, batch_shape: Sequence[int]) -> Float[Array, "*B last D"]:
        size, model_dim = self.taps.shape
        return jnp.zeros((*batch_shape, size - 1, model_dim), self.dtype or self.taps.dtype)
