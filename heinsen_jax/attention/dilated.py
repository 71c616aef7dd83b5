"""Dilated sliding-window attention, as a layer."""

from typing import Unpack

import pydantic

from heinsen_jax.attention.base import Capabilities, OpKeywords
from heinsen_jax.attention.rotary import RotaryAttention, RotaryConfig
from heinsen_jax.ops.local import dilated_attention
from heinsen_jax.ops.masks import Mask, Strided, Window
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class DilatedConfig(RotaryConfig):
    """Configuration of dilated attention."""

    window_size: pydantic.PositiveInt = 64
    """Number of tokens that a query attends to, itself included; on each side if not causal."""
    dilation: pydantic.PositiveInt = 4
    """Distance between neighboring tokens of the window; 1 is a window without gaps."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True, segments=True)

    def rule(self, is_causal: bool = True) -> Mask:
        window = Window(self.reach(), 0 if is_causal else self.reach())
        return window & Strided(self.dilation)

    def reach(self) -> int:
        return (self.window_size - 1) * self.dilation


class DilatedAttention(RotaryAttention[DilatedConfig]):
    """Dilated sliding windows: the state has the keys and values of all tokens that a window spans.

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150, section 3.1.
    """

    Config = DilatedConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"window_size": length // 8, "dilation": 4}

    def over_all(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[OpKeywords]
    ) -> Mixed:
        return dilated_attention(
            query,
            key,
            value,
            local_window_size=self.config.window_size,
            dilation=self.config.dilation,
            scale=self.config.scale,
            **keywords,
        )
