"""DeltaNet: linear attention that replaces the values of its keys, as a layer."""

from typing import Unpack

import jax

from heinsen_jax.attention.base import CallArguments
from heinsen_jax.attention.matrix_state import (
    ConvolvedConfig,
    Gates,
    HeadsAndStates,
    MatrixStateAttention,
    MatrixStates,
    l2_normalized,
)
from heinsen_jax.attention.parameters import LayerOptions, in_float32, linear
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class DeltaNetConfig(ConvolvedConfig):
    """Configuration of DeltaNet."""

    has_erasure = True
    negative_eigenvalues: bool = False
    """Whether the share that is replaced, beta, is up to 2 instead of 1: transitions then have
    eigenvalues in [-1, 1], which track states such as parity (Grazzi et al., 2025)."""


class DeltaNetAttention(MatrixStateAttention[DeltaNetConfig]):
    """DeltaNet: each token replaces a share of the value that the state holds for its key.

        S_t = (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T,    beta = sigmoid(x Wb)

    with q and k of norm 1, after convolutions and SiLU; the output has a norm and no gate.

    References:
      Yang et al., 2024, Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.
    """

    Config = DeltaNetConfig
    gate_activation = None

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        outputs, axes = self.num_steps * self.num_heads, ("embed", "heads")
        self.beta = linear(self.model_dim, outputs, axes, use_bias=False, **options)

    def heads(self, x: Features, call: CallArguments[MatrixStates]) -> HeadsAndStates:
        query, key, value, after = super().heads(x, call)
        return l2_normalized(query), l2_normalized(key), value, after

    def gates(self, x: Features) -> Gates:
        beta = self.in_steps(jax.nn.sigmoid(in_float32(self.beta(x))), self.num_heads, 1)[..., 0]
        if self.config.negative_eigenvalues:
            beta = 2 * beta
        return {"erase": beta, "write": beta}
