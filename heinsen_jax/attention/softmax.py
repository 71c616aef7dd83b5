"""Multi-head softmax attention as a layer."""

from typing import Literal, Unpack

import jax.numpy as jnp
import numpy as np

from heinsen_jax.attention.base import Capabilities, OpKeywords
from heinsen_jax.attention.rotary import PositionsConfig, RotaryAttention
from heinsen_jax.attention.softmax_base import MaskKeywords
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import Array, Keys, Mixed, Query, Values, config_dataclass, wide


@config_dataclass
class SoftmaxConfig(PositionsConfig):
    """Configuration of softmax attention."""

    implementation: Literal["xla", "tiled", "cudnn"] | None = None
    """Implementation of `dot_product_attention`; chosen automatically when None."""

    @property
    def capabilities(self) -> Capabilities:
        if self.positions == "alibi":
            return Capabilities(causal=True, streaming=True, segments=True)
        return Capabilities(
            causal=True, bidirectional=True, streaming=True, cross=True, segments=True
        )


class SoftmaxAttention(RotaryAttention[SoftmaxConfig]):
    """Multi-head softmax attention; the state has all keys and values.

    With `positions="alibi"`, the score of head n = 1, ..., N decreases by 2^(-8 n / N) per token of
    distance.

    References:
      Vaswani et al., 2017, Attention Is All You Need, arXiv:1706.03762; Su et al., 2021, RoFormer,
      arXiv:2104.09864; Press et al., 2022, Train Short, Test Long (ALiBi), arXiv:2108.12409.
    """

    Config = SoftmaxConfig

    def over_all(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[OpKeywords]
    ) -> Mixed:
        return dot_product_attention(
            query,
            key,
            value,
            log_decay=self._log_decay(key),
            scale=self.config.scale,
            implementation=self.config.implementation,
            **keywords,
        )

    def between(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[MaskKeywords]
    ) -> Mixed:
        decay, scale = self._log_decay(key), self.config.scale
        return dot_product_attention(query, key, value, log_decay=decay, scale=scale, **keywords)

    def _log_decay(self, key: Keys) -> Array | None:
        """The biases of ALiBi, as decays per token `[..., S, N]`."""
        if self.config.positions != "alibi":
            return None
        heads = np.arange(1, self.num_heads + 1)
        dtype = wide(key)
        slopes = jnp.asarray(2.0 ** (-8 * heads / self.num_heads), dtype)
        return jnp.broadcast_to(-slopes, (*key.shape[:-2], self.num_heads))
