"""Attention over projected positions, as a layer."""

from typing import Any

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig, uniform
from heinsen_jax.ops.linformer import linformer_attention
from heinsen_jax.typing import Array


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class LinformerConfig(HeadsConfig):
    """Of the Linformer."""

    max_length: pydantic.PositiveInt = 1024
    """The most tokens it can be given."""
    rank: pydantic.PositiveInt = 64
    """Rows that the positions are projected to."""


class LinformerAttention(HeadedAttention):
    """Linformer: softmax attention over a fixed number of learned averages of all positions.

    References:
      Wang et al., 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768.
    """

    Config = LinformerConfig
    capabilities = Capabilities(bidirectional=True, cross=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: LinformerConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        shape = self.config.max_length, self.config.rank
        init = uniform(self.config.max_length**-0.5)
        self.of_keys = nnx.Param(init(rngs.params(), shape, self.param_dtype))
        self.of_values = nnx.Param(init(rngs.params(), shape, self.param_dtype))

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        is_causal: bool,
        segment_ids: Array | None,
        state: Any,
    ) -> tuple[Array, Any]:
        del is_causal, segment_ids, state  # not declared
        of_keys, of_values = self.of_keys[...], self.of_values[...]
        return linformer_attention(query, key, value, of_keys, of_values), None
