"""A short causal convolution of each feature, whose state is the last few tokens."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from heinsen_jax.typing import Array


class CausalConvolution(nnx.Module):
    """y_t = sum_i w_i x_(t-size+1+i), for each feature by itself; before the first token are zeros.

    At first the own token has weight 1 and those before it little: +-1/size, drawn at random.

    The state is the last size - 1 tokens, `[*B, size - 1, D]`.
    """

    def __init__(
        self, size: int, model_dim: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        param_dtype, self.dtype = jnp.dtype(param_dtype), dtype
        small = nnx.initializers.uniform(2 / size)(rngs.params(), (size, model_dim), param_dtype)
        taps = (small - 1 / size).at[-1].set(1.0)
        self.taps = nnx.Param(taps, logical_axes=("embed",))

    def __call__(self, x: Array, *, state: Array | None) -> tuple[Array, Array]:
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

    def init_state(self, batch_shape: Sequence[int]) -> Array:
        size, model_dim = self.taps.shape
        return jnp.zeros((*batch_shape, size - 1, model_dim), self.dtype or self.taps.dtype)
