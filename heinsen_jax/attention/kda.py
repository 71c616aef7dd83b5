"""Kimi Delta Attention: the delta rule with decay by key feature, as a layer."""

from typing import Annotated, Unpack

import pydantic
from flax import nnx

from heinsen_jax.attention.deltanet import DeltaNetAttention, DeltaNetConfig
from heinsen_jax.attention.matrix_state import Gates, OfHeads, SoftplusDecay
from heinsen_jax.attention.parameters import LayerOptions, LowRank
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class KimiDeltaConfig(DeltaNetConfig):
    """Configuration of Kimi Delta Attention."""

    decay_lower_bound: Annotated[float, pydantic.Field(lt=0)] | None = None
    """Lower bound l of the log decays, such as -5; none when None."""


class KimiDeltaAttention(DeltaNetAttention):
    """Kimi Delta Attention: the delta rule, with a decay rate per key feature.

        S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T
        g = -exp(a) softplus(x Wf Wf' + b),    beta = sigmoid(x Wb)
        y = (norm(o) * sigmoid(x Wg Wg' + c)) Wo

    or g = l sigmoid(exp(a) (x Wf Wf' + b)) with the lower bound l of `decay_lower_bound`, with a by
    head, b by key feature, low-rank maps whose rank is the head dimension of values, and q and k of
    norm 1, after convolutions and SiLU. At initialization exp(a) is uniform in [1, 16] and
    softplus(b) log-uniform in [0.001, 0.1].

    References:
      Kimi Team, 2025, Kimi Linear, arXiv:2510.26692.
    """

    Config = KimiDeltaConfig
    gate_activation = "sigmoid"

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        heads, depth = self.num_heads, self.key_depth
        self.decay = LowRank(
            self.model_dim, self.value_depth, heads * depth, use_bias=False, **options
        )
        assert isinstance(self.config, KimiDeltaConfig)
        bound = self.config.decay_lower_bound
        shapes = (heads, 1), (heads, depth)
        self.to_log_decay = SoftplusDecay(*shapes, lower_bound=bound, **options)

    def make_gate(
        self, values: int, **options: Unpack[LayerOptions]
    ) -> nnx.Linear | LowRank | None:
        if self.config.output_gate is not None:
            return super().make_gate(values, **options)
        return LowRank(self.model_dim, self.value_depth, values, **options)

    def log_decay(self, x: Features) -> OfHeads:
        """g `[..., T, N, K]`"""
        shape = *x.shape[:-1], self.num_heads, self.key_depth
        return self.to_log_decay(self.decay(x).reshape(shape))[1]

    def gates(self, x: Features) -> Gates:
        return {"log_decay": self.log_decay(x), **super().gates(x)}
