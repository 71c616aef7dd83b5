"""Multi-head softmax attention as a layer."""

from typing import Literal

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.masked import TokenStates
from heinsen_jax.attention.rotary import RotaryAttention, RotaryConfig
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class SoftmaxConfig(RotaryConfig):
    """Configuration of softmax attention."""

    implementation: Literal["xla", "tiled", "cudnn"] | None = None
    """Implementation of `dot_product_attention`; chosen automatically when None."""


class SoftmaxAttention(RotaryAttention[SoftmaxConfig]):
    """Multi-head softmax attention; the state has all keys and values.

    References:
      Vaswani et al., 2017, Attention Is All You Need, arXiv:1706.03762.
    """

    Config = SoftmaxConfig
    capabilities = Capabilities(
        causal=True, bidirectional=True, streaming=True, cross=True, segments=True
    )

    def over_all(
        self, query: Query, key: Keys, value: Values, call: CallArguments[TokenStates]
    ) -> Mixed:
        return dot_product_attention(
            query,
            key,
            value,
            **call.keywords,
            implementation=self.config.implementation,
        )
