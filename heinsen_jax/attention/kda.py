"""Kimi Delta Attention: the delta rule with decay by key feature, as a layer."""

from typing import Unpack

import jax
import jax.numpy as jnp

from heinsen_jax.attention.deltanet import DeltaNetAttention
from heinsen_jax.attention.layers import (
    LayerOptions,
    LowRank,
    inverse_softplus_of_log_uniform,
    log_of_uniform,
    parameter,
)
from heinsen_jax.attention.matrix_state import Gates, in_float32
from heinsen_jax.typing import Features


class KimiDeltaAttention(DeltaNetAttention):
    """Kimi Delta Attention: the delta rule in a state of which each key feature decays by its rate.

        S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T
        g = -exp(a) softplus(x Wf Wf' + b),    beta = sigmoid(x Wb)
        y = (norm(o) * sigmoid(x Wg Wg' + c)) Wo

    with a by head, b by key feature, low-rank maps whose rank is the head dimension of values, and
    q and k of norm 1, after convolutions and SiLU. At initialization exp(a) is uniform in [1, 16]
    and softplus(b) log-uniform in [0.001, 0.1].

    References:
      Kimi Team, 2025, Kimi Linear, arXiv:2510.26692.
    """

    gate_activation = "sigmoid"

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        keys, rank = self.num_heads * self.key_depth, self.value_depth
        self.decay = LowRank(self.model_dim, rank, keys, use_bias=False, **options)
        self.log_rate = parameter(log_of_uniform(1, 16), self.num_heads, **options)
        self.decay_bias = parameter(inverse_softplus_of_log_uniform(1e-3, 0.1), keys, **options)

    def make_gate(self, values: int, **options: Unpack[LayerOptions]) -> LowRank:
        return LowRank(self.model_dim, self.value_depth, values, **options)

    def gates(self, x: Features) -> Gates:
        logits = in_float32(self.decay(x))
        logits = logits + jnp.broadcast_to(in_float32(self.decay_bias[...]), logits.shape)
        logits = logits.reshape(*x.shape[:-1], self.num_heads, self.key_depth)
        rate = jnp.exp(in_float32(self.log_rate[...]))[:, None]
        decay = -jnp.broadcast_to(rate, logits.shape) * jax.nn.softplus(logits)
        return {"log_decay": decay, **super().gates(x)}
