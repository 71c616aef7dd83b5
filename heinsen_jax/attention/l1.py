"""Attention by L1 distances, as a layer."""

from typing import Unpack

import pydantic

from heinsen_jax.attention.base import Capabilities
from heinsen_jax.attention.softmax_base import MaskedAttention, MaskedConfig, MaskKeywords
from heinsen_jax.ops.l1 import l1_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class L1Config(MaskedConfig):
    """Configuration of L1 attention."""

    denominator_bias: pydantic.NonNegativeFloat = 0.0
    """Weight of an additional key at distance 0 with value 0, so that queries far from all keys
    attend to nothing."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            causal=True, bidirectional=True, streaming=True, cross=True, segments=True
        )


class L1Attention(MaskedAttention[L1Config]):
    """Softmax attention with negative L1 distances as scores; the state has all keys and values."""

    Config = L1Config

    def between(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[MaskKeywords]
    ) -> Mixed:
        bias = self.config.denominator_bias
        return l1_attention(query, key, value, denominator_bias=bias, **keywords)
