r"""Additive attention: weighted averages of the tokens up to each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import check_array, check_tokens, segment_starts, valid_tokens
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import astype_like
from heinsen_jax.ops.masks import last_tokens
from heinsen_jax.ops.numerics import softmax
from heinsen_jax.ops.pooling import WeightedTokens, average, merged, pool, weighted
from heinsen_jax.typing import (
    Array,
    Float,
    Integer,
    Lengths,
    Mixed,
    common_dtype,
    pytree_dataclass,
    wide,
)


@pytree_dataclass
class AdditiveState:
    """State of additive pooling: S weighted tokens.

    Without a window, S = 1: the average of all tokens, whose logit is the log of their total
    weight, rounded to a float of the size of the logits. With a window of w, S = w - 1: the last
    w - 1 tokens. Unused entries have the logit log 0 = -inf.

    Attributes:
      x: `[*B, S, num_heads, depth]`.
      logits: `[*B, S, num_heads]`.
    """

    x: Float[Array, "*B S N K"]
    logits: Float[Array, "*B S N"]

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_heads: int,
        depth: int,
        local_window_size: int | None = None,
        dtype: Any = jnp.float32,
    ) -> AdditiveState:
        """Return the state of no tokens, in at least float32."""
        slots = 1 if local_window_size is None else local_window_size - 1
        shape = (*batch_shape, slots, num_heads)
        dtype = wide(dtype)
        return cls(jnp.zeros((*shape, depth), dtype), jnp.full(shape, -jnp.inf, dtype))

    def merge(self, other: AdditiveState) -> AdditiveState:
        """Merge two states without a window; `empty` is the neutral element.

        Raises:
          ValueError: a state has a window.
        """
        if self.logits.shape[-2:-1] != (1,) or other.logits.shape[-2:-1] != (1,):
            raise ValueError("states with a window cannot be merged; give states of all tokens")
        both = merged(*(weighted(state.x, state.logits) for state in (self, other)))
        return AdditiveState(both.x, both.log_weight)


@overload
def additive_pooling(
    x: Mixed,
    logits: Float[Array, "*B T N"],
    *,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Integer[Array, "*B T"] | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: AdditiveState | None = None,
    return_state: Literal[False] = False,
) -> Mixed: ...


@overload
def additive_pooling(
    x: Mixed,
    logits: Float[Array, "*B T N"],
    *,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Integer[Array, "*B T"] | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: AdditiveState | None = None,
    return_state: Literal[True],
) -> tuple[Mixed, AdditiveState]: ...


@over_devices
def additive_pooling(
    x: Mixed,
    logits: Float[Array, "*B T N"],
    *,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Integer[Array, "*B T"] | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: AdditiveState | None = None,
    return_state: bool = False,
) -> Mixed | tuple[Mixed, AdditiveState]:
    r"""Weighted averages of tokens, the building block of additive attention.

        g_t = sum_s exp(logits_s) x_s / sum_s exp(logits_s),    s in window(t)

    window(t) is the last w tokens, t itself included. Without `local_window_size`, it is all tokens
    up to t; and if not causal, all tokens, so that every token has the same average. The caller
    computes the logits: the published layer uses logits_s = w . x_s / sqrt(depth). Time and
    memory are linear in T for any window. Finite for every finite input; computed in at least
    float32, also for half-precision inputs. Only reverse-mode differentiation is supported, for
    second derivatives `grad` of `grad`; in forward mode JAX raises "can't apply forward-mode
    autodiff (jvp) to a custom_vjp function".

    Args:
      x: `[*B, T, num_heads, depth]`.
      logits: `[*B, T, num_heads]`. A token with logit -inf is masked.
      is_causal: whether tokens attend only to themselves and earlier tokens.
      local_window_size: w, of which 1 gives g = x; or a pair, the numbers of tokens before t and
        after it. Causal only.
      segment_ids: `[*B, T]`, integers: tokens attend only within their own segment, a run of equal
        ids. `initial_state` belongs to the first segment, the returned state to the last.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last. Values at padding, NaN included,
        have no effect; tokens of padding on the left are counted in windows.
      initial_state: state after the preceding tokens; the empty state when None.
      return_state: whether to also return the state after all tokens.

    Returns:
      g `[*B, T, num_heads, depth]`, or a pair of it and an `AdditiveState`. Rows without visible
      tokens are 0, with zero gradients.

    Raises:
      ValueError: shapes, dtypes or the state do not fit; the message says which.
      NotImplementedError: local_window_size is given with is_causal=False.

    Examples:
      >>> x = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)  # three tokens, one head
      >>> additive_pooling(x, logits=jnp.zeros((3, 1))).ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Wu et al., 2021, Fastformer: Additive Attention Can Be All You Need, arXiv:2108.09084.
    """
    _check(logits, segment_ids, key_value_seq_lengths)
    window = last_tokens(local_window_size, is_causal)
    _check_vectors(x, logits, initial_state, window)
    *batch, length, heads, depth = x.shape
    arrays = jax.tree.leaves((x, logits, initial_state))
    dtype = wide(*arrays)
    state = initial_state
    if state is None:
        state = AdditiveState.empty(batch, heads, depth, window, dtype)
    before = _folded(weighted(state.x, state.logits), len(batch), dtype)
    valid = segments = None
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)
        x = jnp.where(valid[..., None, None], x, 0)
        logits = jnp.where(valid[..., None], logits, -jnp.inf)
    if segment_ids is not None:
        runs = _runs(segment_ids, valid).reshape(math.prod(batch), length)
        segments = jnp.repeat(runs, heads, 0)
    tokens = _folded(weighted(x, logits), len(batch), dtype)

    pooled, after = tokens, before
    if length > 0:
        initial = None if initial_state is None else before
        pooled = _pooled(tokens, initial, segments, window, is_causal)
        if window is None:
            after = jax.tree.map(lambda x: x[:, -1:], pooled)
        elif return_state:
            end = None if valid is None else jnp.repeat(_end(valid).reshape(-1), heads)
            after = _last_tokens(before, tokens, segments, end)
    y = _unfolded(pooled, batch, heads).x.astype(common_dtype(x, logits))
    if not return_state:
        return y
    after = _unfolded(after, batch, heads)
    return y, astype_like(AdditiveState(after.x, after.log_weight), state)


def additive_summary(
    x: Mixed, logits: Float[Array, "*B T N"], *, key_value_seq_lengths: Lengths | None = None
) -> AdditiveState:
    """Return the state of these tokens, without a window. Args: as `additive_pooling`."""
    options = {"key_value_seq_lengths": key_value_seq_lengths, "return_state": True}
    return additive_pooling(x, logits, is_causal=False, **options)[1]


@over_devices
def additive_weights(
    logits: Float[Array, "*B T N"],
    *,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Integer[Array, "*B T"] | None = None,
    key_value_seq_lengths: Lengths | None = None,
) -> Float[Array, "*B T T N"]:
    """Weights of tokens in each average: g_t = sum_s weights_ts x_s.

    Computed by definition, for inspection: time and memory are quadratic in T.

    Args:
      logits: `[*B, T, num_heads]`.
      is_causal, local_window_size, segment_ids, key_value_seq_lengths: as in `additive_pooling`.

    Returns:
      `[*B, T, T, num_heads]`, weights[t, s] of token s in average t: they sum to 1 over s, or to 0
      without visible tokens.

    Raises:
      ValueError, NotImplementedError: as `additive_pooling`.

    Examples:
      >>> additive_weights(jnp.zeros((2, 1)))[..., 0].tolist()
      [[1.0, 0.0], [0.5, 0.5]]
    """
    _check(logits, segment_ids, key_value_seq_lengths)
    window = last_tokens(local_window_size, is_causal)
    *batch, length, _ = logits.shape
    index = jnp.arange(length)
    age = index[:, None] - index[None]
    visible = (age >= 0) | (not is_causal)
    if window is not None:
        visible &= age < window
    visible = jnp.broadcast_to(visible, (*batch, length, length))
    valid = None
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)
        visible &= valid[..., None, :]
    if segment_ids is not None:
        runs = _runs(segment_ids, valid)
        visible &= runs[..., :, None] == runs[..., None, :]
    scores = logits.astype(wide(logits))
    scores = jnp.where(visible[..., None], scores[..., None, :, :], -jnp.inf)
    (weights,) = softmax((scores,), -2).weights
    return weights.astype(logits.dtype)


def _check(logits, segment_ids, lengths) -> None:
    if logits.ndim < 2:
        raise ValueError(f"logits must be [..., tokens, heads], got shape {logits.shape}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    check_tokens(logits.shape[:-1], segment_ids=segment_ids, key_value_seq_lengths=lengths)


def _check_vectors(x, logits, state, window) -> None:
    if x.ndim < 3:
        raise ValueError(f"x must be [..., tokens, heads, depth], got shape {x.shape}")
    check_array("x", x, ((*logits.shape, x.shape[-1]),), jnp.floating)
    if state is None:
        return
    slots = 1 if window is None else window - 1
    shape = (*x.shape[:-3], slots, *x.shape[-2:])
    check_array("initial_state.x", state.x, (shape,), jnp.floating)
    check_array("initial_state.logits", state.logits, (shape[:-1],), jnp.floating)


def _folded(tokens: WeightedTokens, axis: int, dtype: Any) -> WeightedTokens:
    """`[*B, T, N, ...]` -> `[X, T, ...]`, where T is on `axis`."""

    def fold(x: Array) -> Array:
        x = jnp.swapaxes(x.astype(dtype), axis, axis + 1)
        return x.reshape(math.prod(x.shape[: axis + 1]), *x.shape[axis + 1 :])

    return jax.tree.map(fold, tokens)


def _unfolded(tokens: WeightedTokens, batch: Sequence[int], heads: int) -> WeightedTokens:
    """`[X, T, ...]` -> `[*B, T, N, ...]`"""

    def unfold(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(*batch, heads, *x.shape[1:]), len(batch), len(batch) + 1)

    return jax.tree.map(unfold, tokens)


def _runs(segment_ids: Array, valid: Array | None) -> Array:
    """Number the runs of equal ids from 0. Padding belongs to the adjacent run."""
    return jnp.cumsum(segment_starts(segment_ids, valid), -1, jnp.int32)


def _end(valid: Array) -> Array:
    """Return the position past the last valid token; 0 if all is padding."""
    positions = 1 + jnp.arange(valid.shape[-1]).reshape((1,) * (valid.ndim - 1) + (-1,))
    return jnp.max(jnp.where(valid, positions, 0), -1)


def _last_tokens(
    before: WeightedTokens, tokens: WeightedTokens, segments: Any, end: Array | None
) -> WeightedTokens:
    """Return the state of a window after the tokens; tokens past `end` `[X]` are padding."""
    slots = before.x.shape[1]
    if segments is not None:
        last = segments[:, -1:]
        before = _keep_where(before, segments[:, :1] == last)
        tokens = _keep_where(tokens, segments == last)
    both = _joined(before, tokens)
    if end is None:
        return _part(both, both.x.shape[1] - slots)
    cut = jax.vmap(partial(lax.dynamic_slice_in_dim, slice_size=slots))
    return jax.tree.map(lambda x: cut(x, end), both)


def _joined(earlier: WeightedTokens, later: WeightedTokens) -> WeightedTokens:
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), earlier, later)


def _part(tokens: WeightedTokens, start: int, stop: int | None = None) -> WeightedTokens:
    return jax.tree.map(lambda x: x[:, start:stop], tokens)


def _keep_where(tokens: WeightedTokens, where: Array) -> WeightedTokens:
    return tokens._replace(logits=jnp.where(where, tokens.logits, -jnp.inf))


def _pooled(
    tokens: WeightedTokens,
    before: WeightedTokens | None,
    segments: Array | None,
    window: int | None,
    is_causal: bool,
) -> WeightedTokens:
    """Return the average at each token: over the tokens and the state's `early` tokens, which are
    not visible to all, merged with the average of the state's other tokens, visible to all."""
    length = tokens.x.shape[1]
    reach = length if window is None else min(window, length)
    early = 0 if window is None or before is None else reach - 1
    ids = segments
    if before is not None and early > 0:
        tokens = _joined(_part(before, 0, early), tokens)
        if segments is not None:
            ids = jnp.concatenate([jnp.repeat(segments[:, :1], early, 1), segments], 1)
    if is_causal or segments is not None:
        pooled = _part(pool(reach, tokens, ids), early)
    else:
        pooled = jax.tree.map(partial(jnp.repeat, repeats=length, axis=1), average(tokens))
    if before is not None and early < before.x.shape[1]:
        shared = average(_part(before, early))
        if segments is not None:
            shared = _keep_where(shared, segments == segments[:, :1])
        pooled = merged(pooled, shared)
    if not is_causal and segments is not None:
        pooled = _at_ends(pooled, segments)
    return pooled


def _at_ends(tokens: WeightedTokens, segments: Array) -> WeightedTokens:
    """Return the values at the last token of each token's segment."""
    length = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(length)[None, :-1], (len(segments), length - 1))
    ends = jnp.where(segments[:, 1:] != segments[:, :-1], index, length - 1)
    ends = jnp.concatenate([ends, jnp.full_like(segments[:, :1], length - 1, ends.dtype)], 1)
    ends = lax.cummin(ends, axis=1, reverse=True)

    def at_ends(x: Array) -> Array:
        return jnp.take_along_axis(x, ends.reshape(ends.shape + (1,) * (x.ndim - 2)), 1)

    return jax.tree.map(at_ends, tokens)
