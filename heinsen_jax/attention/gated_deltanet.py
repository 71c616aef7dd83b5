"""Gated DeltaNet: the delta rule with decay by head, as a layer."""

from typing import Unpack

from heinsen_jax.attention.deltanet import DeltaNetAttention, DeltaNetConfig
from heinsen_jax.attention.matrix_state import Gates, SoftplusDecay
from heinsen_jax.attention.parameters import LayerOptions, linear
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class GatedDeltaNetConfig(DeltaNetConfig):
    """Configuration of Gated DeltaNet."""

    key_width = 0.75
    value_width = 1.5


class GatedDeltaNetAttention(DeltaNetAttention):
    """Gated DeltaNet: each token replaces a share of the value for its key in a decaying state.

        S_t = (I - beta_t k_t k_t^T) exp(g_t) S_(t-1) + beta_t k_t v_t^T
        g = -exp(a) softplus(x Wa + b),    beta = sigmoid(x Wb)

    by head, with q and k of norm 1, after convolutions and SiLU, and an output gate. At
    initialization exp(a) is uniform in [1, 16] (published: in [0, 16]) and softplus(b) log-uniform
    in [0.001, 0.1]. The widths of keys and values are 3/4 and 3/2 of the model's.

    References:
      Yang et al., 2025, Gated Delta Networks, arXiv:2412.06464.
    """

    Config = GatedDeltaNetConfig
    gate_activation = "silu"

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        axes, heads = ("embed", "heads"), (self.num_heads,)
        self.decay = linear(self.model_dim, self.num_heads, axes, use_bias=False, **options)
        self.to_log_decay = SoftplusDecay(heads, heads, **options)

    def gates(self, x: Features) -> Gates:
        _, log_decay = self.to_log_decay(self.decay(x))
        return {"log_decay": log_decay, **super().gates(x)}
