"""Softmax attention over the nearest tokens, as a layer."""

from typing import Unpack

import pydantic

from heinsen_jax.attention.base import Capabilities, OpKeywords
from heinsen_jax.attention.rotary import RotaryAttention, RotaryConfig
from heinsen_jax.ops.local import sliding_window_attention
from heinsen_jax.ops.masks import Window
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class SlidingWindowConfig(RotaryConfig):
    """Configuration of sliding-window attention."""

    window_size: pydantic.PositiveInt = 256
    """Number of tokens that a query attends to, itself included; on each side if not causal."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True, segments=True)

    def rule(self, is_causal: bool = True) -> Window:
        return Window(self.reach(), 0 if is_causal else self.reach())

    def reach(self) -> int:
        return self.window_size - 1


class SlidingWindowAttention(RotaryAttention[SlidingWindowConfig]):
    """Sliding-window attention; the state has the keys and values of one window.

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150, section 3.1.
    """

    Config = SlidingWindowConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"window_size": length // 4}

    def over_all(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[OpKeywords]
    ) -> Mixed:
        return sliding_window_attention(
            query,
            key,
            value,
            local_window_size=self.config.window_size,
            scale=self.config.scale,
            **keywords,
        )
