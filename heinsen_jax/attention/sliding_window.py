"""Softmax attention over the nearest tokens, as a layer."""

from collections.abc import Sequence
from typing import Any

import pydantic

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.cache import CHUNK, FirstAndLast, in_chunks
from heinsen_jax.attention.rotary import RotaryAttention, RotaryConfig
from heinsen_jax.ops.masks import Global, Mask, Window
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class SlidingWindowConfig(RotaryConfig):
    """Configuration of sliding-window attention."""

    window_size: pydantic.PositiveInt = 256
    """Number of tokens that a query attends to, itself included; on each side if not causal."""
    num_sinks: pydantic.NonNegativeInt = 0
    """Number of first tokens of a sequence that all queries attend to, too (attention sinks)."""

    @property
    def capabilities(self) -> Capabilities:
        segments = not self.num_sinks
        return Capabilities(causal=True, bidirectional=True, streaming=True, segments=segments)

    def rule(self, is_causal: bool = True) -> Mask:
        window = Window(self.reach(), 0 if is_causal else self.reach())
        if not self.num_sinks:
            return window
        return window | Global(((0, self.num_sinks),), visible_only=True)

    def reach(self) -> int:
        return self.window_size - 1


class SlidingWindowAttention(RotaryAttention[SlidingWindowConfig]):
    """Sliding-window attention; the state has the keys and values of one window, and of the sinks.

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150, section 3.1; Xiao et al., 2024,
      Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453.
    """

    Config = SlidingWindowConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"window_size": length // 4}

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[Any]
    ) -> tuple[Mixed, Any]:
        if not isinstance(call.state, FirstAndLast):
            return super().attend(query, key, value, call)
        query, key = self.with_positions(query, key, call.state.window.num_tokens)
        size = max(CHUNK, call.state.window.size)
        return in_chunks(type(self)._append, self, (query, key, value), call.state, size=size)

    def _append(
        self, heads: tuple[Query, Keys, Values], state: FirstAndLast
    ) -> tuple[Mixed, FirstAndLast]:
        query, key, value = heads
        arrays, visible, after = state.append(key, value)
        return dot_product_attention(query, *arrays, mask=visible, scale=self.config.scale), after

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> Any:
        if not (count := self.config.num_sinks):
            return super().init_state(batch_shape, capacity=capacity)
        return FirstAndLast.empty(
            batch_shape, self.token_shapes, self.cache_dtype, size=self.config.reach(), count=count
        )
