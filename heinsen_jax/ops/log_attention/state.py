"""The constant-size state of log-attention, and its algebra: exact, in log space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.linear_recurrence import decay_to_end
from heinsen_jax.ops.log_attention.blocks import scan_blocks
from heinsen_jax.ops.log_attention.tokens import varying_like
from heinsen_jax.ops.numerics import (
    einsum,
    log_add_exp,
    log_difference,
    log_sum_exp,
    share,
    where_empty,
)
from heinsen_jax.typing import Array

State = TypeVar("State", "LogAttentionState", "MeanState")

BLOCK = 64  # tokens whose [K, V] log sums are held at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogAttentionState:
    """All that log-attention keeps of the tokens it has seen (Heinsen, 2024, eq. 6).

        H_S = LSE_s(K_s + log V_s)        H_Z = LSE_s(K_s)

    The state of no tokens is log 0 = -inf everywhere; states of disjoint sets of tokens merge into
    the state of their union, in any order. Size does not depend on the number of tokens. For values
    of either sign `log_s` is complex, log|S| + i pi (S < 0).

    Attributes:
      log_s: H_S `[..., num_kv_heads, key_depth, value_depth]`.
      log_z: H_Z `[..., num_kv_heads, key_depth]`.
      log_decay: all decay of the tokens seen `[..., num_kv_heads, key_depth]`: what `merge`
        multiplies earlier states by. None stands for none.

    Examples:
      >>> state = LogAttentionState.empty((), num_kv_heads=1, key_depth=2, value_depth=1)
      >>> log_value = jnp.log(jnp.array([2.0, 4.0, 12.0])).reshape(3, 1, 1)
      >>> state = state.absorb(jnp.zeros((3, 1, 2)), log_value)
      >>> jnp.exp(state.attend(jnp.zeros((1, 1, 2)))).round().tolist()
      [[[6.0]]]
    """

    log_s: Array
    log_z: Array
    log_decay: Array | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_kv_heads: int,
        key_depth: int,
        value_depth: int,
        dtype=jnp.float32,
    ) -> LogAttentionState:
        """The state of no tokens: log 0 = -inf, not eq. (7)'s zeros, which would be a token."""
        shape = (*batch_shape, num_kv_heads, key_depth)
        real = jnp.finfo(dtype).dtype
        return cls(
            log_s=jnp.full((*shape, value_depth), -jnp.inf, dtype),
            log_z=jnp.full(shape, -jnp.inf, real),
        )

    def absorb(
        self, key: Array, log_value: Array, log_decay: Array | None = None
    ) -> LogAttentionState:
        """Adds tokens, eq. (6) and (8).

        Args:
          key: `[..., S, num_kv_heads, key_depth]`.
          log_value: `[..., S, num_kv_heads, value_depth]`, real.
          log_decay: `[..., S, num_kv_heads]` or `[..., S, num_kv_heads, key_depth]`, the log of
            what each token multiplies the state before it by; none when None.

        Returns:
          The state of the tokens seen before and these.
        """
        self.check(key=key, log_value=log_value)
        earlier = self
        if log_decay is not None:
            if log_decay.ndim < key.ndim:
                log_decay = log_decay[..., None]
            log_decay = jnp.broadcast_to(log_decay, key.shape)
            key = key + decay_to_end(log_decay, -3)
            total = jnp.sum(log_decay, -3)
            earlier = decayed(self, total)
            total = total if self.log_decay is None else self.log_decay + total
            earlier = replace(earlier, log_decay=total)
        return absorb(earlier, jnp.moveaxis(key, -3, -2), jnp.moveaxis(log_value, -3, -2))

    def attend(self, query: Array) -> Array:
        """Reads the state for any queries, eq. (5): log Y = LSE_K(Q + H_S) - LSE_K(Q + H_Z).

        Args:
          query: `[..., T, num_heads, key_depth]`; num_heads a multiple of num_kv_heads.

        Returns:
          log Y `[..., T, num_heads, value_depth]`; log 0 = -inf from an empty state.
        """
        self.check(query=query)
        *batch, length, num_heads, depth = query.shape
        groups = self.log_z.shape[-2]
        grouped = query.reshape(*batch, length, groups, num_heads // groups, depth)
        rows = num_heads // groups * length
        log_y = attend(self, jnp.moveaxis(grouped, -4, -2).reshape(*batch, groups, rows, depth))
        value_depth = log_y.shape[-1]
        log_y = log_y.reshape(*batch, groups, num_heads // groups, length, value_depth)
        return jnp.moveaxis(log_y, -2, -4).reshape(*batch, length, num_heads, value_depth)

    def merge(self, other: LogAttentionState) -> LogAttentionState:
        """The state of both states' tokens; `empty` is neutral.

        Associative, and commutative where `other` has no decay: that, like all of `other`'s tokens,
        comes after those of this state.
        """
        earlier, log_decay = self, self.log_decay
        if other.log_decay is not None:
            earlier = decayed(self, other.log_decay)
            log_decay = other.log_decay if log_decay is None else log_decay + other.log_decay
        if jnp.iscomplexobj(self.log_s) or jnp.iscomplexobj(other.log_s):
            merged = earlier.to_means().merge(other.to_means()).to_logs()
        else:
            merged = LogAttentionState(
                log_add_exp(earlier.log_s, other.log_s), log_add_exp(earlier.log_z, other.log_z)
            )
        return replace(merged, log_decay=log_decay)

    def to_means(self, log_scale: Array | None = None) -> MeanState:
        """The same state as averages of values, each divided by exp(log_scale)."""
        ratio = self.log_s - where_empty(self.log_z, jnp.inf)[..., None]
        if log_scale is not None:
            ratio = ratio - log_scale
        mean = jnp.exp(ratio)
        if jnp.iscomplexobj(mean):
            mean = jnp.where(jnp.abs(ratio.imag) > jnp.pi / 2, -1, 1) * jnp.exp(ratio.real)
        return MeanState(self.log_z, mean)

    def check(self, **arrays: Array) -> None:
        """Raises ValueError where `query`, `key`, `value` or `log_value` do not fit this state."""
        groups, key_depth = self.log_z.shape[-2:]
        for name, array in arrays.items():
            depth = self.log_s.shape[-1] if name.endswith("value") else key_depth
            heads_fit = array.ndim >= 3 and (
                array.shape[-2] % groups == 0 if name == "query" else array.shape[-2] == groups
            )
            if (
                not heads_fit
                or array.shape[-1] != depth
                or array.shape[:-3] != self.log_z.shape[:-2]
            ):
                raise ValueError(
                    f"{name} of shape {array.shape} does not fit a state with batch shape "
                    f"{self.log_z.shape[:-2]}, {groups} key/value heads and depth {depth}: "
                    f"expected [*batch, tokens, heads, {depth}]"
                )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanState:
    """The same information with values in linear space, of either sign.

    Attributes:
      log_z: H_Z `[..., K]`.
      mean: exp(H_S - H_Z) `[..., K, V]`, the average of the values under each key feature's
        softmax over tokens; 0 where there are none. Never larger than the largest value.
    """

    log_z: Array
    mean: Array

    @classmethod
    def of(cls, key: Array, value: Array) -> MeanState:
        """The state of tokens: key `[..., S, K]`, value `[..., S, V]` of either sign."""
        log_z = log_sum_exp(key, -2)
        shares = share(key, log_z[..., None, :])
        return cls(log_z, einsum("...sk,...sv->...kv", shares, value))

    def attend(self, query: Array) -> Array:
        """Y = softmax_K(Q + H_Z) M for query `[..., T, K]`; 0 from an empty state."""
        logits = query + self.log_z[..., None, :]
        weights = share(logits, log_sum_exp(logits, -1)[..., None])
        return einsum("...tk,...kv->...tv", weights, self.mean)

    def merge(self, other: MeanState) -> MeanState:
        log_z = log_add_exp(self.log_z, other.log_z)
        mean = share(self.log_z, log_z)[..., None] * self.mean
        mean = mean + share(other.log_z, log_z)[..., None] * other.mean
        return MeanState(log_z, mean)

    def to_logs(self, log_scale: Array | None = None) -> LogAttentionState:
        """The same state in log space: real, given the `log_scale` the values were divided by."""
        nothing = self.mean == 0
        log_s = self.log_z[..., None] + jnp.log(jnp.where(nothing, 1, jnp.abs(self.mean)))
        if log_scale is not None:
            log_s = log_s + log_scale
        log_s = jnp.where(nothing, -jnp.inf, log_s)
        if log_scale is None:
            phase = jnp.where(self.mean < 0, jnp.pi, 0).astype(log_s.dtype)
            log_s = lax.complex(log_s, phase)
        return LogAttentionState(log_s, self.log_z)


def decayed(state: State, log_decay: Array) -> State:
    """A state whose tokens have been decayed by `[..., K]`, or by `[..., 1]`."""
    log_z = state.log_z + log_decay
    if isinstance(state, MeanState):
        nothing_left = (log_z == -jnp.inf)[..., None]
        return replace(state, log_z=log_z, mean=jnp.where(nothing_left, 0, state.mean))
    return replace(state, log_z=log_z, log_s=state.log_s + log_decay[..., None])


@partial(jax.jit, inline=True)
def absorb(state: LogAttentionState, key: Array, log_value: Array) -> LogAttentionState:
    """`LogAttentionState.absorb` for key `[..., S, K]` and log_value `[..., S, V]`."""
    if key.shape[-2] == 0:
        return state
    state = varying_like(state, (key, log_value))

    @jax.checkpoint
    def add_block(state: LogAttentionState, block: tuple[Array, ...]):
        key, log_value = block
        terms = key[..., :, None] + log_value[..., None, :]
        added = LogAttentionState(log_sum_exp(terms, -3), log_sum_exp(key, -2))
        return state.merge(added), None

    state, _ = scan_blocks(add_block, state, (key, log_value), block_size=BLOCK)
    return state


@partial(jax.jit, inline=True)
def attend(state: LogAttentionState, query: Array) -> Array:
    """`LogAttentionState.attend` for query `[..., T, K]`."""
    if query.shape[-2] == 0:
        return jnp.zeros((*query.shape[:-1], state.log_s.shape[-1]), query.dtype)

    @jax.checkpoint
    def read_block(carry: None, block: tuple[Array, ...]):
        (query,) = block
        log_s = log_sum_exp(query[..., :, :, None] + state.log_s[..., None, :, :], -2)
        log_z = log_sum_exp(query + state.log_z[..., None, :], -1)
        return carry, log_difference(log_s, log_z[..., None])

    _, log_y = scan_blocks(read_block, None, (query,), block_size=BLOCK)
    assert log_y is not None
    return log_y
