"""Constant-size states of log-attention, and their operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import check_array, check_decay
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.linear_recurrence import decay_to_end
from heinsen_jax.ops.log_attention.blocks import scan_blocks
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.numerics import (
    einsum,
    log_add_exp,
    log_sum_exp,
    signed_log_difference,
    softmax,
    softmax_pair,
    where_empty,
)
from heinsen_jax.typing import (
    Array,
    Complex,
    DTypeLike,
    Float,
    Inexact,
    common_dtype,
    pytree_dataclass,
    wide,
)

BLOCK = 64  # tokens whose [K, V] log sums are computed together


@pytree_dataclass
class LogAttentionState:
    """State of `log_attention`: sums over tokens, in log space (Heinsen, 2024, eq. 6).

        H_S = LSE_s(K_s + log V_s)        H_Z = LSE_s(K_s)

    The state of no tokens is log 0 = -inf everywhere; states of disjoint sets of tokens merge into
    the state of their union. Its size does not depend on the number of tokens. Both sums are
    rounded to floats of the size of the keys, and so is their difference, the average: to 1e-3 with
    keys of 1e4. For complex log-values (values of either sign) `log_s` is complex:
    log|S| + i pi (S < 0).

    Attributes:
      log_s: H_S `[..., num_kv_heads, key_depth, value_depth]`.
      log_z: H_Z `[..., num_kv_heads, key_depth]`.
      log_decay: the total decay of the tokens `[..., num_kv_heads, key_depth]`, by which `merge`
        decays earlier states; None for no decay.

    Examples:
      >>> state = LogAttentionState.empty((), num_kv_heads=1, key_depth=2, value_depth=1)
      >>> log_value = jnp.log(jnp.array([2.0, 4.0, 12.0])).reshape(3, 1, 1)
      >>> state = state.absorb(jnp.zeros((3, 1, 2)), log_value)
      >>> jnp.exp(state.attend(jnp.zeros((1, 1, 2)))).round().tolist()
      [[[6.0]]]
    """

    log_s: Float[Array, "*B G K V"] | Complex[Array, "*B G K V"]
    log_z: Float[Array, "*B G K"]
    log_decay: Float[Array, "*B G K"] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_kv_heads: int,
        key_depth: int,
        value_depth: int,
        dtype: DTypeLike = jnp.float32,
        *,
        has_decay: bool = False,
    ) -> LogAttentionState:
        """Return the state of no tokens: log 0 = -inf; `has_decay` for calls with `log_decay`. The
        zeros of eq. (7) would be the state of one token with key 0 and log-value 0."""
        shape = (*batch_shape, num_kv_heads, key_depth)
        real = jnp.finfo(dtype).dtype
        return cls(
            log_s=jnp.full((*shape, value_depth), -jnp.inf, dtype),
            log_z=jnp.full(shape, -jnp.inf, real),
            log_decay=jnp.zeros(shape, real) if has_decay else None,
        )

    def absorb(
        self,
        key: Float[Array, "*B S G K"],
        log_value: Float[Array, "*B S G V"],
        log_decay: Float[Array, "*B S G"] | Float[Array, "*B S G K"] | None = None,
    ) -> LogAttentionState:
        """Return the state after further tokens, eqs. (6) and (8).

        Args:
          key: `[..., S, num_kv_heads, key_depth]`.
          log_value: `[..., S, num_kv_heads, value_depth]`, real.
          log_decay: `[..., S, num_kv_heads]` or `[..., S, num_kv_heads, key_depth]`, the log of
            the factor by which each token multiplies the state before it; None for no decay.

        Raises:
          ValueError: shapes do not fit the state, or, outside of transformations such as `jit`, a
            log decay is above 0.
        """
        check_state(self, key=key, log_value=log_value)
        _check_decay(key, log_decay)
        before, key, log_value, log_decay = _promoted(self, key, log_value, log_decay)
        key, total = _decayed_keys(key, log_decay)
        earlier = _decayed(before, total)
        tokens = (jnp.moveaxis(x, -3, -2) for x in (key, log_value))
        after = self.from_averages(absorb(earlier.to_averages(), *tokens))
        return narrowed(replace(after, log_decay=earlier.log_decay), self)

    def attend(self, query: Float[Array, "*B T N K"]) -> Inexact[Array, "*B T N V"]:
        """Attend to the state, eq. (5): log Y = LSE_k(Q_k + H_S,k) - LSE_k(Q_k + H_Z,k).

        The sums are over the features k of keys.

        Args:
          query: `[..., T, num_heads, key_depth]`; num_heads a multiple of num_kv_heads.

        Returns:
          log Y `[..., T, num_heads, value_depth]`; log 0 = -inf for an empty state.

        Raises:
          ValueError: the shape does not fit the state.
        """
        check_state(self, query=query)
        groups = self.log_z.shape[-2]
        return _queries_of(attend(self.to_averages(), _rows_of(query, groups)), query, groups)

    def merge(self, other: LogAttentionState) -> LogAttentionState:
        """Return the state of these tokens followed by the tokens of `other`; `empty` is neutral.

        Associative, and commutative if neither state has a decay.
        """
        earlier = _decayed(self, other.log_decay)
        logs = earlier.log_s, other.log_s
        log_z = log_add_exp(earlier.log_z, other.log_z)
        if any(jnp.iscomplexobj(x) for x in logs):
            log_s = join_signs(log_add_exp(*(split_signs(x) for x in logs)))
        else:
            log_s = log_add_exp(*logs)
        return LogAttentionState(log_s, log_z, earlier.log_decay)

    @property
    def after_cut(self) -> LogAttentionState:
        """An empty state at the start of a segment: `merge` drops what is before it."""
        return _after_cut(self)

    def to_averages(self) -> Averages:
        """Averages of values in log space; log_s is real."""
        return Averages(self.log_z, self.log_s - where_empty(self.log_z, jnp.inf)[..., None])

    @classmethod
    def from_averages(cls, averages: Averages) -> LogAttentionState:
        log_z, mean = averages
        return cls(mean + log_z[..., None], log_z)


@pytree_dataclass
class HeinsenAttentionState:
    """State of `heinsen_attention`: averages of values of any sign, in linear space.

        M = sum_s exp(K_s - H_Z) V_s        H_Z = LSE_s(K_s)

    The state of no tokens is M = 0, H_Z = log 0 = -inf; states of disjoint sets of tokens merge
    into the state of their union. No average exceeds the largest value, so nothing overflows. The
    size of the state does not depend on the number of tokens.

    Attributes:
      mean: M `[..., num_kv_heads, key_depth, value_depth]`, the average of the values under each
        key feature's softmax over tokens.
      log_z: H_Z `[..., num_kv_heads, key_depth]`.
      log_decay: the total decay of the tokens `[..., num_kv_heads, key_depth]`, by which `merge`
        decays earlier states; None for no decay.

    Examples:
      >>> state = HeinsenAttentionState.empty((), num_kv_heads=1, key_depth=2, value_depth=1)
      >>> value = jnp.array([2.0, -4.0, 8.0]).reshape(3, 1, 1)
      >>> state.absorb(jnp.zeros((3, 1, 2)), value).attend(jnp.zeros((1, 1, 2))).round().tolist()
      [[[2.0]]]
    """

    mean: Float[Array, "*B G K V"]
    log_z: Float[Array, "*B G K"]
    log_decay: Float[Array, "*B G K"] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_kv_heads: int,
        key_depth: int,
        value_depth: int,
        dtype: DTypeLike = jnp.float32,
        *,
        has_decay: bool = False,
    ) -> HeinsenAttentionState:
        """Return the state of no tokens; `has_decay` for calls with `log_decay`."""
        shape = (*batch_shape, num_kv_heads, key_depth)
        return cls(
            mean=jnp.zeros((*shape, value_depth), dtype),
            log_z=jnp.full(shape, -jnp.inf, dtype),
            log_decay=jnp.zeros(shape, dtype) if has_decay else None,
        )

    def absorb(
        self,
        key: Float[Array, "*B S G K"],
        value: Float[Array, "*B S G V"],
        log_decay: Float[Array, "*B S G"] | Float[Array, "*B S G K"] | None = None,
    ) -> HeinsenAttentionState:
        """Return the state after further tokens.

        Args:
          key: `[..., S, num_kv_heads, key_depth]`.
          value: `[..., S, num_kv_heads, value_depth]`, of any sign.
          log_decay: as in `LogAttentionState.absorb`.

        Raises:
          ValueError: shapes do not fit the state, or, outside of transformations such as `jit`, a
            log decay is above 0.
        """
        check_state(self, key=key, value=value)
        _check_decay(key, log_decay)
        before, key, value, log_decay = _promoted(self, key, value, log_decay)
        key, total = _decayed_keys(key, log_decay)
        added = averages_of(*(jnp.moveaxis(x, -3, -2) for x in (key, value)))
        earlier = _decayed(before, total)
        merged = merge_averages(earlier.to_averages(), added, is_log=False)
        return narrowed(replace(self.from_averages(merged), log_decay=earlier.log_decay), self)

    def attend(self, query: Float[Array, "*B T N K"]) -> Float[Array, "*B T N V"]:
        """Attend to the state: Y = sum_k softmax_k(Q_k + H_Z,k) M_k.

        Args:
          query: `[..., T, num_heads, key_depth]`; num_heads a multiple of num_kv_heads.

        Returns:
          Y `[..., T, num_heads, value_depth]`; 0 for an empty state.

        Raises:
          ValueError: the shape does not fit the state.
        """
        check_state(self, query=query)
        groups = self.log_z.shape[-2]
        y = read_averages(self.to_averages(), _rows_of(query, groups))
        return _queries_of(y, query, groups)

    def merge(self, other: HeinsenAttentionState) -> HeinsenAttentionState:
        """As `LogAttentionState.merge`."""
        earlier = _decayed(self, other.log_decay)
        merged = merge_averages(earlier.to_averages(), other.to_averages(), is_log=False)
        return replace(self.from_averages(merged), log_decay=earlier.log_decay)

    @property
    def after_cut(self) -> HeinsenAttentionState:
        """As `LogAttentionState.after_cut`."""
        return _after_cut(self)

    def to_averages(self) -> Averages:
        return Averages(self.log_z, self.mean)

    @classmethod
    def from_averages(cls, averages: Averages) -> HeinsenAttentionState:
        return cls(averages.mean, averages.log_z)


State = TypeVar("State", LogAttentionState, HeinsenAttentionState)


def _after_cut(empty: State) -> State:
    if empty.log_decay is None:
        return empty
    return replace(empty, log_decay=jnp.full_like(empty.log_decay, -jnp.inf))


def averages_of(key: Float[Array, "*B S K"], value: Float[Array, "*B S V"]) -> Averages:
    """Return the averages of tokens, in linear space."""
    shares = softmax((key,), -2)
    return Averages(shares.log_z, einsum("...sk,...sv->...kv", *shares.weights, value))


def merge_averages(earlier: Averages, later: Averages, *, is_log: bool) -> Averages:
    """Merge two states, in log space or in linear space."""
    both = softmax_pair(earlier.log_z, later.log_z)
    kept, added = (x[..., None] for x in (both.log_weights if is_log else both.weights))
    if is_log:
        return Averages(both.log_z, log_add_exp(kept + earlier.mean, added + later.mean))
    return Averages(both.log_z, kept * earlier.mean + added * later.mean)


def read_averages(state: Averages, query: Float[Array, "*B T K"]) -> Float[Array, "*B T V"]:
    """Return Y = softmax_K(Q + log Z) M, in linear space; 0 for no tokens."""
    (weights,) = softmax((query + state.log_z[..., None, :],), -1).weights
    return einsum("...tk,...kv->...tv", weights, state.mean)


def decayed_averages(state: Averages, log_decay: Array, *, is_log: bool) -> Averages:
    """Decay a state by `[*B, K]` or `[*B, 1]`."""
    log_z = state.log_z + log_decay
    nothing = -jnp.inf if is_log else 0
    return Averages(log_z, jnp.where((log_z == -jnp.inf)[..., None], nothing, state.mean))


def read_all(inputs: Inputs, state: Averages, *, is_log: bool) -> tuple[Array, Averages]:
    """Return output and the state after all tokens; every query attends to all of them, eq. (3)."""
    key, value = (jnp.moveaxis(x, 1, 2) for x in (inputs.key, inputs.value))
    batch, length, groups, heads, depth = inputs.query.shape
    rows = jnp.moveaxis(inputs.query, 1, 3).reshape(batch, groups, heads * length, depth)
    if is_log:
        after = absorb(state, key, value)
        y = attend(after, rows)
    else:
        after = merge_averages(state, averages_of(key, value), is_log=False)
        y = read_averages(after, rows)
    y = y.reshape(batch, groups, heads, length, value.shape[-1])
    return jnp.moveaxis(y, 3, 1), after


@jax.jit
def absorb(state: Averages, key: Array, log_value: Array) -> Averages:
    """Merge a state in log space with tokens of key `[..., S, K]` and log_value `[..., S, V]`."""
    if key.shape[-2] == 0:
        return state
    state = varying_like(state, (key, log_value))

    @jax.checkpoint
    def add_block(state: Averages, block: tuple[Array, ...]):
        key, log_value = block
        shares = softmax((key,), -2)
        terms = shares.log_weights[0][..., :, None] + log_value[..., None, :]
        added = Averages(shares.log_z, log_sum_exp(terms, -3))
        return merge_averages(state, added, is_log=True), None

    state, _ = scan_blocks(add_block, state, (key, log_value), block_size=BLOCK)
    return state


@jax.jit
def attend(state: Averages, query: Array) -> Array:
    """Read a state in log space, with query `[..., T, K]`."""
    if query.shape[-2] == 0:
        return jnp.zeros((*query.shape[:-1], state.mean.shape[-1]), query.dtype)

    @jax.checkpoint
    def read_block(carry: None, block: tuple[Array, ...]):
        (query,) = block
        (log_weights,) = softmax((query + state.log_z[..., None, :],), -1).log_weights
        return carry, log_sum_exp(log_weights[..., None] + state.mean[..., None, :, :], -2)

    _, log_y = scan_blocks(read_block, None, (query,), block_size=BLOCK)
    assert log_y is not None
    return log_y


def split_signs(x: Inexact[Array, "*B V"]) -> Float[Array, "*B 2*V"]:
    """Split complex logarithms into logarithms of the values' positive and negative parts."""
    x = x.astype(common_dtype(x, jnp.complex64))
    is_negative = jnp.abs(x.imag) > jnp.pi / 2
    parts = [jnp.where(is_negative, -jnp.inf, x.real), jnp.where(is_negative, x.real, -jnp.inf)]
    return jnp.concatenate(parts, -1)


def join_signs(x: Float[Array, "*B F"]) -> Complex[Array, "*B F//2"]:
    """Return the logarithm of the difference of positive and negative parts."""
    size, is_negative = signed_log_difference(*jnp.split(x, 2, -1))
    return lax.complex(size, jnp.where(is_negative, jnp.pi, 0).astype(size.dtype))


def check_state(state: LogAttentionState | HeinsenAttentionState, **arrays: Array) -> None:
    """Raise ValueError if `query`, `key`, `value` or `log_value` do not fit the state."""
    groups, key_depth = state.log_z.shape[-2:]
    values = state.log_s if isinstance(state, LogAttentionState) else state.mean
    sources = {name: x for name, x in arrays.items() if name != "query" and x.ndim >= 3}
    lengths = {name: x.shape[-3] for name, x in sources.items()}
    if len({*lengths.values()}) > 1:
        raise ValueError(f"{' and '.join(lengths)} must have the same number of tokens: {lengths}")
    for name, array in arrays.items():
        depth = values.shape[-1] if name.endswith("value") else key_depth
        heads_fit = array.ndim >= 3 and (
            array.shape[-2] % groups == 0 if name == "query" else array.shape[-2] == groups
        )
        if not heads_fit or array.shape[-1] != depth or array.shape[:-3] != state.log_z.shape[:-2]:
            raise ValueError(
                f"{name} of shape {array.shape} does not fit a state with batch shape "
                f"{state.log_z.shape[:-2]}, {groups} key/value heads and depth {depth}: "
                f"expected [*batch, tokens, heads, {depth}]"
            )


def _check_decay(key: Array, log_decay: Array | None) -> None:
    """Raise ValueError if a log decay has not the shape of keys or of their heads, or is above
    0."""
    check_array("log_decay", log_decay, (key.shape[:-1], key.shape), jnp.floating)
    check_decay("log_decay", log_decay)


def _promoted(
    state: State, key: Array, value: Array, log_decay: Array | None
) -> tuple[State, Array, Array, Array | None]:
    """The state and its next tokens in one dtype, at least float32, or its complex dtype."""
    given = state, key, value, log_decay
    dtype = wide(*(jnp.finfo(x.dtype).dtype for x in jax.tree.leaves(given)))
    return jax.tree.map(lambda x: x.astype(dtype if jnp.isrealobj(x) else x.dtype), given)


def narrowed(state: State, before: State) -> State:
    """A state in the dtype of the one before, or the complex dtype of the same precision."""
    real, complex_dtype = before.log_z.dtype, common_dtype(before.log_z, jnp.complex64)
    return jax.tree.map(lambda x: x.astype(real if jnp.isrealobj(x) else complex_dtype), state)


def _decayed(state: State, log_decay: Array | None) -> State:
    """Decay a state by `[..., K]`, and add this to its total decay."""
    if log_decay is None:
        return state
    total = log_decay if state.log_decay is None else state.log_decay + log_decay
    if isinstance(state, LogAttentionState):
        log_s, log_z = state.log_s + log_decay[..., None], state.log_z + log_decay
        return LogAttentionState(log_s, log_z, total)
    log_z, mean = decayed_averages(state.to_averages(), log_decay, is_log=False)
    return HeinsenAttentionState(mean, log_z, total)


def _decayed_keys(key: Array, log_decay: Array | None) -> tuple[Array, Array | None]:
    """Return keys decayed up to the last token, and the total decay `[..., K]`."""
    if log_decay is None:
        return key, None
    if log_decay.ndim < key.ndim:
        log_decay = log_decay[..., None]
    log_decay = jnp.broadcast_to(log_decay, key.shape)
    return key + decay_to_end(log_decay, -3), jnp.sum(log_decay, -3)


def _rows_of(query: Array, groups: int) -> Float[Array, "*B G RT K"]:
    """Reshape queries `[..., T, N, K]` to rows of their key/value heads."""
    *batch, length, num_heads, depth = query.shape
    grouped = query.reshape(*batch, length, groups, num_heads // groups, depth)
    return jnp.moveaxis(grouped, -4, -2).reshape(*batch, groups, -1, depth)


def _queries_of(rows: Array, query: Array, groups: int) -> Inexact[Array, "*B T N V"]:
    """Invert `_rows_of`."""
    *batch, length, num_heads, _ = query.shape
    depth = rows.shape[-1]
    rows = rows.reshape(*batch, groups, num_heads // groups, length, depth)
    return jnp.moveaxis(rows, -2, -4).reshape(*batch, length, num_heads, depth)
