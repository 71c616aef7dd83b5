"""State of `log_window_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from heinsen_jax.ops.log_attention.state import HeinsenAttentionState, averages_of
from heinsen_jax.typing import (
    Array,
    DTypeLike,
    Float,
    Integer,
    Keys,
    Values,
    pytree_dataclass,
)


@pytree_dataclass
class LogWindowState:
    """State of `log_window_attention`: the last w tokens, and averages of all earlier ones.

    States of consecutive tokens merge. The size of the state does not depend on the number of
    tokens.

    Attributes:
      earlier: state of log-attention of the tokens before the window.
      key, value, key_features: those of the last w tokens, the latest one last; 0 where the segment
        has fewer.
      num_tokens: number of tokens so far in the segment; the same for each key/value head.

    Examples:
      >>> sizes = {"num_kv_heads": 1, "key_depth": 2, "value_depth": 2, "num_features": 4}
      >>> LogWindowState.empty((), **sizes, window_size=3).key.shape
      (1, 3, 2)
    """

    earlier: HeinsenAttentionState
    key: Float[Array, "*B G w K"]
    value: Float[Array, "*B G w V"]
    key_features: Float[Array, "*B G w F"]
    num_tokens: Integer[Array, "*B G"]

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_kv_heads: int,
        key_depth: int,
        value_depth: int,
        num_features: int,
        window_size: int,
        dtype: DTypeLike = jnp.float32,
    ) -> LogWindowState:
        """Return the state of no tokens."""
        heads = *batch_shape, num_kv_heads
        sizes = num_kv_heads, num_features, value_depth
        return cls(
            HeinsenAttentionState.empty(batch_shape, *sizes, dtype),
            key=jnp.zeros((*heads, window_size, key_depth), dtype),
            value=jnp.zeros((*heads, window_size, value_depth), dtype),
            key_features=jnp.zeros((*heads, window_size, num_features), dtype),
            num_tokens=jnp.zeros(heads, jnp.int32),
        )

    @classmethod
    def of_tokens(
        cls,
        key: Keys,
        value: Values,
        key_features: Float[Array, "*B S G F"],
        *,
        window_size: int,
        first: Integer[Array, "*B"] | None = None,
    ) -> LogWindowState:
        """Return the state of tokens alone.

        Args:
          key, value, key_features: those of the tokens.
          window_size: w.
          first: the first token; the tokens before it are ignored.
        """
        dtype = jnp.promote_types(jnp.result_type(key, value, key_features), jnp.float32)
        key, value, features = (
            jnp.moveaxis(x.astype(dtype), -3, -2) for x in (key, value, key_features)
        )
        *heads, length, _ = key.shape
        first = jnp.zeros(heads[:-1], jnp.int32) if first is None else first.astype(jnp.int32)
        is_token = jnp.broadcast_to(jnp.arange(length), (*heads, length)) >= first[..., None, None]
        outside = max(length - window_size, 0)
        masked = jnp.where(is_token[..., None], features, -jnp.inf)[..., :outside, :]
        averages = averages_of(masked, value[..., :outside, :])
        padding = [(0, 0)] * len(heads) + [(max(window_size - length, 0), 0), (0, 0)]

        def window(x: Array) -> Array:
            return jnp.pad(jnp.where(is_token[..., None], x, 0)[..., outside:, :], padding)

        return cls(
            HeinsenAttentionState.from_averages(averages),
            window(key),
            window(value),
            window(features),
            jnp.broadcast_to(length - first[..., None], heads),
        )

    def merge(self, other: LogWindowState) -> LogWindowState:
        """Return the state of these tokens followed by those of `other`; `empty` is neutral."""
        size = self.key.shape[-2]
        slot = jnp.broadcast_to(jnp.arange(size), self.key.shape[:-1])
        num_moved = jnp.minimum(other.num_tokens, size)[..., None]
        leaves = (slot < num_moved) & (slot >= size - self.num_tokens[..., None])
        masked = jnp.where(leaves[..., None], self.key_features, -jnp.inf)
        leaving = HeinsenAttentionState.from_averages(averages_of(masked, self.value))
        moved = ((slot + num_moved) % size)[..., None]
        is_new = (slot >= size - num_moved)[..., None]

        def merge(before: Array, after: Array) -> Array:
            return jnp.where(is_new, after, jnp.take_along_axis(before, moved, -2))

        return LogWindowState(
            self.earlier.merge(leaving).merge(other.earlier),
            merge(self.key, other.key),
            merge(self.value, other.value),
            merge(self.key_features, other.key_features),
            self.num_tokens + other.num_tokens,
        )
