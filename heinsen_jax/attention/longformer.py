"""Sliding windows with global tokens, as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
import pydantic

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.cache import CHUNK, FirstAndLast, in_chunks
from heinsen_jax.attention.heads import HeadedAttention, HeadProjection, HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.ops.local import longformer_attention
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import (
    Features,
    Keys,
    Mixed,
    Query,
    Values,
    config_dataclass,
)


@config_dataclass
class LongformerConfig(HeadsConfig):
    """Configuration of Longformer attention."""

    window_size: pydantic.PositiveInt = 256
    """Number of tokens that a query attends to, itself included; on each side if not causal."""
    num_global_tokens: pydantic.PositiveInt = 1
    """Number of global tokens, the first ones, with attention to and from all tokens and separate
    projections."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True)


class LongformerAttention(HeadedAttention[LongformerConfig, FirstAndLast]):
    """Sliding windows, and a few global tokens with separate query, key and value projections.

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150.
    """

    Config = LongformerConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"window_size": length // 4, "num_global_tokens": 2}

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        sizes = self.project.in_features, self.project.out_features
        self.project_global = HeadProjection(*sizes, ("embed", "heads"), **options)

    def apply(
        self, x: Features, call: CallArguments[FirstAndLast]
    ) -> tuple[Features, FirstAndLast | None]:
        heads, own = self.heads(x), self.heads(x, project=self.project_global)
        if call.state is not None:
            size = max(CHUNK, call.state.window.size)
            y, state = in_chunks(type(self)._stream, self, (heads, own), call.state, size=size)
            return self.out_proj(y), state
        positions = range(min(self.config.num_global_tokens, x.shape[-2]))
        y = longformer_attention(
            *heads,
            local_window_size=self.config.window_size,
            global_positions=positions,
            global_heads=own,
            is_causal=call.is_causal,
        )
        return self.out_proj(y), None

    def _stream(
        self,
        both: tuple[tuple[Query, Keys, Values], tuple[Query, Keys, Values]],
        state: FirstAndLast,
    ) -> tuple[Mixed, FirstAndLast]:
        (query, key, value), (own_query, own_key, own_value) = both
        count, before = self.config.num_global_tokens, state.window.num_tokens
        arrays, visible, after = state.append(key, value, own_key, own_value)
        y = dot_product_attention(query, *arrays, mask=visible)
        y_global = dot_product_attention(own_query, *after.first[2:], mask=visible[:, :count])
        is_global = before + jnp.arange(query.shape[-3], dtype=jnp.int32) < count
        return jnp.where(is_global[:, None, None], y_global, y), after

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> FirstAndLast:
        shapes, count = self.token_shapes, self.config.num_global_tokens
        size = self.config.window_size - 1
        return FirstAndLast.empty(
            batch_shape, shapes, self.cache_dtype, size=size, count=count, others=shapes
        )
