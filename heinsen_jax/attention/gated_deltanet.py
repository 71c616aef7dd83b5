"""Gated DeltaNet: the delta rule with decay by head, as a layer."""

from typing import Unpack

import jax
import jax.numpy as jnp

from heinsen_jax.attention.deltanet import DeltaNetAttention
from heinsen_jax.attention.layers import (
    LayerOptions,
    inverse_softplus_of_log_uniform,
    linear,
    log_of_uniform,
    parameter,
)
from heinsen_jax.attention.matrix_state import Gates, in_float32
from heinsen_jax.typing import Features


class GatedDeltaNetAttention(DeltaNetAttention):
    """Gated DeltaNet: each token replaces a share of the value for its key in a decaying state.

        S_t = (I - beta_t k_t k_t^T) exp(g_t) S_(t-1) + beta_t k_t v_t^T
        g = -exp(a) softplus(x Wa + b),    beta = sigmoid(x Wb)

    by head, with q and k of norm 1, after convolutions and SiLU, and an output gate. At
    initialization exp(a) is uniform in [1, 16] and softplus(b) log-uniform in [0.001, 0.1]. The
    widths of keys and values are 3/4 and 3/2 of the model's.

    References:
      Yang et al., 2025, Gated Delta Networks, arXiv:2412.06464.
    """

    gate_activation = "silu"
    key_width = 0.75
    value_width = 1.5

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        axes = "embed", "heads"
        self.decay = linear(self.model_dim, self.num_heads, axes, use_bias=False, **options)
        self.log_rate = parameter(log_of_uniform(1, 16), self.num_heads, **options)
        bias = inverse_softplus_of_log_uniform(1e-3, 0.1)
        self.decay_bias = parameter(bias, self.num_heads, **options)

    def gates(self, x: Features) -> Gates:
        return {"log_decay": self.log_decay(x), **super().gates(x)}

    def log_decay(self, x: Features) -> jax.Array:
        """`[..., T, N]`"""
        logits = in_float32(self.decay(x))
        bias, rate = (
            jnp.broadcast_to(in_float32(p[...]), logits.shape)
            for p in (self.decay_bias, self.log_rate)
        )
        return -jnp.exp(rate) * jax.nn.softplus(logits + bias)
