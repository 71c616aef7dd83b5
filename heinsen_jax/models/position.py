"""Positions as a recurrence: what comes before a token, decayed, in log space."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention.heads import linear
from heinsen_jax.ops.linear_recurrence import log_linear_recurrence
from heinsen_jax.typing import Array


class PositionRecurrence(nnx.Module):
    """x + h, with h a log-linear recurrence over the tokens (Heinsen, 2024).

        u | b = x W + c,   h_t = logaddexp(log sigmoid(u_t) + h_{t-1}, b_t),   h_0 = 0

    The state is the last h `[..., D]`, in float32 at least.
    """

    def __init__(self, model_dim: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        self.dense = linear(
            model_dim,
            2 * model_dim,
            ("embed", "mlp"),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array, *, state: Array) -> tuple[Array, Array]:
        logits, log_inputs = jnp.split(self.dense(x).astype(state.dtype), 2, -1)
        h = log_linear_recurrence(jax.nn.log_sigmoid(logits), log_inputs, initial=state)
        last = h[..., -1, :] if x.shape[-2] else state
        return x + h.astype(x.dtype), last
