"""Kimi Delta Attention: the delta rule with decay by key feature, as a layer."""

from typing import Unpack

from heinsen_jax.attention.deltanet import DeltaNetAttention
from heinsen_jax.attention.matrix_state import Gates, SoftplusDecay
from heinsen_jax.attention.parameters import LayerOptions, LowRank
from heinsen_jax.typing import Features


class KimiDeltaAttention(DeltaNetAttention):
    """Kimi Delta Attention: the delta rule, with a decay rate per key feature.

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
        heads, depth = self.num_heads, self.key_depth
        self.decay = LowRank(
            self.model_dim, self.value_depth, heads * depth, use_bias=False, **options
        )
        self.to_log_decay = SoftplusDecay((heads, 1), (heads, depth), **options)

    def make_gate(self, values: int, **options: Unpack[LayerOptions]) -> LowRank:
        return LowRank(self.model_dim, self.value_depth, values, **options)

    def gates(self, x: Features) -> Gates:
        shape = *x.shape[:-1], self.num_heads, self.key_depth
        _, log_decay = self.to_log_decay(self.decay(x).reshape(shape))
        return {"log_decay": log_decay, **super().gates(x)}
