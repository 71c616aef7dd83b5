"""Attention over projected positions, as a layer."""

from typing import Never, Unpack

import pydantic

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions, parameter, uniform
from heinsen_jax.ops.linformer import linformer_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class LinformerConfig(HeadsConfig):
    """Configuration of Linformer attention."""

    max_length: pydantic.PositiveInt = 1024
    """Maximum sequence length."""
    rank: pydantic.PositiveInt = 64
    """Number of rows to which the positions are projected."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(bidirectional=True, cross=True)

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        heads = num_heads + (self.num_kv_heads or num_heads)
        return 2.0 * heads * sum(self.depths(model_dim, num_heads)) * self.rank


class LinformerAttention(HeadedAttention[LinformerConfig, Never]):
    """Linformer: softmax attention over a fixed number of trained projections of all positions.

    References:
      Wang et al., 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768.
    """

    Config = LinformerConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        shape = self.config.max_length, self.config.rank
        init = uniform(self.config.max_length**-0.5)
        self.of_keys = parameter(init, *shape, kind="matrix", **options)
        self.of_values = parameter(init, *shape, kind="matrix", **options)

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[Never]
    ) -> tuple[Mixed, None]:
        projections = self.of_keys[...], self.of_values[...]
        return linformer_attention(query, key, value, *projections), None
