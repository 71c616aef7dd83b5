"""Attention by L1 distances, as a layer."""

from typing import Any

import pydantic

from heinsen_jax.attention.base import Capabilities
from heinsen_jax.attention.heads import HeadsConfig
from heinsen_jax.attention.masked import MaskedAttention
from heinsen_jax.ops.l1 import l1_attention
from heinsen_jax.typing import Array, config_dataclass


@config_dataclass
class L1Config(HeadsConfig):
    """Of L1 attention."""

    denominator_bias: pydantic.NonNegativeFloat = 0.0
    """1 adds a key at distance 0, of value 0: what is far from all keys attends to nothing."""


class L1Attention(MaskedAttention):
    """Softmax attention whose scores are negative L1 distances: the state holds all keys and
    values."""

    Config = L1Config
    capabilities = Capabilities(
        causal=True, bidirectional=True, streaming=True, cross=True, segments=True
    )

    def between(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        bias = self.config.denominator_bias
        return l1_attention(query, key, value, denominator_bias=bias, **options)
