"""Gated DeltaProduct: several steps of the delta rule for each token, as a layer."""

import pydantic

from heinsen_jax.attention.gated_deltanet import GatedDeltaNetAttention, GatedDeltaNetConfig
from heinsen_jax.typing import config_dataclass


@config_dataclass
class GatedDeltaProductConfig(GatedDeltaNetConfig):
    """Configuration of Gated DeltaProduct."""

    num_steps: pydantic.PositiveInt = 2
    """Number of steps, each with its own key and value, for each token."""
    negative_eigenvalues: bool = True
    """Whether the share that is replaced, beta, is up to 2 instead of 1: products of transitions
    then have complex eigenvalues, too, which track permutations."""

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        one_step = super().flops(model_dim, num_heads, length, is_causal)
        return one_step * (1 + 2 * self.num_steps) / 3  # one reads, and two replace in each step


class GatedDeltaProductAttention(GatedDeltaNetAttention):
    """Gated DeltaProduct: Gated DeltaNet that replaces the values of M keys for each token.

        S_t = (I - beta_tM k_tM k_tM^T) ... (I - beta_t1 k_t1 k_t1^T) exp(g_t) S_(t-1) + ...

    with the values of step i written by it, beta_ti k_ti v_ti^T; all else is as in
    `GatedDeltaNetAttention`. Keys, values and beta have M projections, adjacent for each head.

    References:
      Siems et al., 2025, DeltaProduct, arXiv:2502.10297, equation 6.
    """

    Config = GatedDeltaProductConfig
    softmax_projections = ("query",)
