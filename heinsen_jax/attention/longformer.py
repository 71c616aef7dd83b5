"""Sliding windows with global tokens, as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
import pydantic

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.cache import WindowCache
from heinsen_jax.attention.heads import HeadedAttention, HeadProjection, HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.ops.local import longformer_attention
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import (
    Array,
    Features,
    Float,
    Keys,
    Mixed,
    Query,
    Values,
    config_dataclass,
    pytree_dataclass,
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


@pytree_dataclass
class LongformerState:
    """State: the last tokens and the global tokens.

    Attributes:
      window: keys and values of the last tokens.
      first: keys and values of the global tokens, for all tokens and for each other,
        `[*B, num_global_tokens, heads, depth]`.
    """

    window: WindowCache
    first: tuple[Float[Array, "*B num_global G _"], ...]


class LongformerAttention(HeadedAttention[LongformerConfig, LongformerState]):
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
        self, x: Features, call: CallArguments[LongformerState]
    ) -> tuple[Features, LongformerState | None]:
        heads, own = self.heads(x), self.heads(x, project=self.project_global)
        if call.state is not None:
            y, state = self._stream(heads, own, call.state)
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
        heads: tuple[Query, Keys, Values],
        own: tuple[Query, Keys, Values],
        state: LongformerState,
    ) -> tuple[Mixed, LongformerState]:
        query, key, value = heads
        own_query, own_key, own_value = own
        length, count = query.shape[-3], self.config.num_global_tokens
        num_tokens = state.window.num_tokens
        new = key, value, own_key, own_value
        first = tuple(_kept(old, x, num_tokens) for old, x in zip(state.first, new, strict=True))
        (keys, values), window = state.window.append(key, value)
        keys, values = (
            jnp.concatenate(pair, -3) for pair in ((first[0], keys), (first[1], values))
        )
        at = num_tokens + jnp.arange(length)
        slot = num_tokens - state.window.size + jnp.arange(state.window.size + length)
        near = (slot >= count)[None] & (at[:, None] - slot[None] < self.config.window_size)
        near = near & (slot[None] <= at[:, None])  # a global token is not also part of the window
        earlier = jnp.arange(count)[None] <= at[:, None]
        y = dot_product_attention(query, keys, values, mask=jnp.concatenate([earlier, near], 1))
        y_global = dot_product_attention(own_query, *first[2:], mask=earlier)
        y = jnp.where((at < count)[:, None, None], y_global, y)
        return y, LongformerState(window, first)

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LongformerState:
        shapes, dtype = self.token_shapes, self.cache_dtype
        window = WindowCache.empty(batch_shape, shapes, dtype, self.config.window_size - 1)
        first = tuple(
            jnp.zeros((*batch_shape, self.config.num_global_tokens, *shape), dtype)
            for shape in (*shapes, *shapes)
        )
        return LongformerState(window, first)


def _kept(old: Array, new: Array, num_tokens: Array) -> Array:
    """The first tokens `[*B, count, G, F]`; `new` may contain some of them."""
    if new.shape[-3] == 0:
        return old
    place = jnp.arange(old.shape[-3]) - num_tokens
    taken = jnp.take(new, jnp.clip(place, 0, new.shape[-3] - 1), -3)
    is_new = (place >= 0) & (place < new.shape[-3])
    return jnp.where(is_new[:, None, None], taken.astype(old.dtype), old)
