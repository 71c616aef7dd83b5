"""State of `log_window_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from heinsen_jax.ops.linear_recurrence import decay_to_end
from heinsen_jax.ops.log_attention.state import HeinsenAttentionState, averages_of
from heinsen_jax.typing import (
    Array,
    Bool,
    DTypeLike,
    Float,
    Integer,
    Keys,
    Values,
    pytree_dataclass,
    wide,
)


@pytree_dataclass
class LogWindowState:
    """State of `log_window_attention`: the last w tokens, and averages of all earlier ones.

    States of consecutive tokens merge. The size of the state does not depend on the number of
    tokens.

    Attributes:
      earlier: state of log-attention of the tokens before the window.
      key, value, key_features: arrays of the last w tokens, the latest one last; 0 where the
        segment has fewer.
      num_tokens: number of tokens so far in the segment; the same for each key/value head.
      log_decay: log decays of the last w tokens; 0 where the segment has fewer; None for no decay.
        `earlier.log_decay` is the total decay of the segment's tokens before the window.

    Examples:
      >>> sizes = {"num_kv_heads": 1, "key_depth": 2, "value_depth": 2, "num_features": 4}
      >>> LogWindowState.empty((), **sizes, local_window_size=3).key.shape
      (1, 3, 2)
    """

    earlier: HeinsenAttentionState
    key: Float[Array, "*B G w K"]
    value: Float[Array, "*B G w V"]
    key_features: Float[Array, "*B G w F"]
    num_tokens: Integer[Array, "*B G"]
    log_decay: Float[Array, "*B G w 1"] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_kv_heads: int,
        key_depth: int,
        value_depth: int,
        num_features: int,
        local_window_size: int,
        dtype: DTypeLike = jnp.float32,
        *,
        has_decay: bool = False,
    ) -> LogWindowState:
        """Return the state of no tokens; `has_decay` for calls with `log_decay`."""
        heads = *batch_shape, num_kv_heads
        sizes = num_kv_heads, num_features, value_depth
        earlier = HeinsenAttentionState.empty(batch_shape, *sizes, dtype, has_decay=has_decay)
        return cls(
            earlier,
            key=jnp.zeros((*heads, local_window_size, key_depth), dtype),
            value=jnp.zeros((*heads, local_window_size, value_depth), dtype),
            key_features=jnp.zeros((*heads, local_window_size, num_features), dtype),
            num_tokens=jnp.zeros(heads, jnp.int32),
            log_decay=jnp.zeros((*heads, local_window_size, 1), dtype) if has_decay else None,
        )

    @classmethod
    def of_tokens(
        cls,
        key: Keys,
        value: Values,
        key_features: Float[Array, "*B S G F"],
        log_decay: Float[Array, "*B S G"] | None = None,
        *,
        local_window_size: int,
        first: Integer[Array, "*B"] | None = None,
    ) -> LogWindowState:
        """Return the state of tokens alone.

        Args:
          key: `[*B, S, num_kv_heads, key_depth]`.
          value: `[*B, S, num_kv_heads, value_depth]`.
          key_features: `[*B, S, num_kv_heads, num_features]`.
          log_decay: `[*B, S, num_kv_heads]`; None for no decay.
          local_window_size: w.
          first: `[*B]`, index of the first token; earlier ones are ignored; 0 when None.
        """
        dtype = wide(key, value, key_features)
        decay = None if log_decay is None else log_decay[..., None]
        key, value, features, decay = jax.tree.map(
            lambda x: jnp.moveaxis(x.astype(dtype), -3, -2), (key, value, key_features, decay)
        )
        *heads, length, _ = key.shape
        first = jnp.zeros(heads[:-1], jnp.int32) if first is None else first.astype(jnp.int32)
        is_token = jnp.broadcast_to(jnp.arange(length), (*heads, length)) >= first[..., None, None]
        outside = max(length - local_window_size, 0)
        leaving = jax.tree.map(lambda x: x[..., :outside, :], (features, value, decay))
        padding = [(0, 0)] * len(heads) + [(max(local_window_size - length, 0), 0), (0, 0)]

        def window(x: Array) -> Array:
            return jnp.pad(jnp.where(is_token[..., None], x, 0)[..., outside:, :], padding)

        return cls(
            _state_of(is_token[..., :outside], *leaving),
            window(key),
            window(value),
            window(features),
            jnp.broadcast_to(length - first[..., None], heads),
            None if decay is None else window(decay),
        )

    def merge(self, other: LogWindowState) -> LogWindowState:
        """Return the state of these tokens followed by the tokens of `other`; `empty` is neutral.

        Raises:
          ValueError: only one of the states has decay.
        """
        if (self.log_decay is None) != (other.log_decay is None):
            raise ValueError(
                "log_decay: one of the states has none; merge two with decay, or two without"
            )
        size = self.key.shape[-2]
        slot = jnp.broadcast_to(jnp.arange(size), self.key.shape[:-1])
        num_moved = jnp.minimum(other.num_tokens, size)[..., None]
        leaves = (slot < num_moved) & (slot >= size - self.num_tokens[..., None])
        leaving = _state_of(leaves, self.key_features, self.value, self.log_decay)
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
            jax.tree.map(merge, self.log_decay, other.log_decay),
        )


def _state_of(
    is_token: Bool[Array, "*B G S"],
    key_features: Float[Array, "*B G S F"],
    value: Float[Array, "*B G S V"],
    log_decay: Float[Array, "*B G S 1"] | None,
) -> HeinsenAttentionState:
    """Return the state of log-attention of the tokens that `is_token` marks."""
    features, total = jnp.where(is_token[..., None], key_features, -jnp.inf), None
    if log_decay is not None:
        decay = jnp.where(is_token[..., None], log_decay, 0)
        total = jnp.broadcast_to(jnp.sum(decay, -2), (*features.shape[:-2], features.shape[-1]))
        features += decay_to_end(decay, -2)
    state = HeinsenAttentionState.from_averages(averages_of(features, value))
    return replace(state, log_decay=total)
