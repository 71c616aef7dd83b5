"""A window of softmax attention and log-attention over earlier tokens, with one sum."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from heinsen_jax.ops.arguments import positions_in_segments, segment_starts
from heinsen_jax.ops.layout import astype_like, fold_heads, unfold_heads
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.scan import Scan
from heinsen_jax.ops.log_attention.state import HeinsenAttentionState
from heinsen_jax.ops.log_attention.variants import AttentionPasses
from heinsen_jax.ops.log_window.state import LogWindowState
from heinsen_jax.ops.masks import Window
from heinsen_jax.ops.softmax import folded_attention
from heinsen_jax.typing import Array, Bool, Float, Integer, wide


class _Tokens(NamedTuple):
    """Arguments of a call, with folded heads.

    Attributes:
      query, query_features, log_weight: arrays of the queries; the query is scaled.
      key, value, key_features, log_decay: arrays of the initial state's window, if any, followed
        by the tokens.
      starts: tokens that begin a segment.
      runs: ids of segments; -1 for empty slots of the window.
      position: position of each query in its segment; None for complete sequences of one segment.
    """

    query: Float[Array, "X R T K"]
    query_features: Float[Array, "X R T F"]
    log_weight: Float[Array, "X R T"] | None
    key: Float[Array, "X S K"]
    value: Float[Array, "X S V"]
    key_features: Float[Array, "X S F"]
    log_decay: Float[Array, "X S 1"] | None
    starts: Bool[Array, "X S"] | None
    runs: Integer[Array, "X S"] | None
    position: Integer[Array, "X T"] | None

    @property
    def window(self) -> tuple[Array, Array, Array, Array | None]:
        """The arrays that a state keeps of its last tokens."""
        return self.key, self.value, self.key_features, self.log_decay


@partial(jax.jit, static_argnums=(0, 1))  # compiled once outside another `jit`
def attend(
    window_size: int,
    attention: AttentionPasses,
    arrays: tuple[Array, ...],
    log_weight: Array | None,
    log_decay: Array | None,
    segment_ids: Array | None,
    state: LogWindowState | None,
    scale: Any,
) -> tuple[Array, LogWindowState | None]:
    """Return the output and, given a state, the state after the tokens, for arguments that passed
    the checks."""
    query, key, value = arrays[:3]
    groups = key.shape[-2]
    folds = math.prod(key.shape[:-3]) * groups
    floats = [x for x in jax.tree.leaves((arrays, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = wide(*floats)

    def fold(x: Array) -> Array:
        return fold_heads(x.astype(dtype), groups)

    def fold_state(x: Array) -> Array:
        x = x.reshape(folds, *x.shape[key.ndim - 2 :])
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    starts = position = runs = None
    if segment_ids is not None:
        starts = segment_starts(segment_ids, None).reshape(folds // groups, key.shape[-3])
        starts = jnp.repeat(starts, groups, 0)
    before = None if state is None else jax.tree.map(fold_state, state)
    if starts is not None or before is not None:
        num_tokens = None if before is None else before.num_tokens
        position = positions_in_segments(starts, (folds, key.shape[-3]), num_tokens)
        runs = jnp.zeros_like(position) if starts is None else jnp.cumsum(starts, 1, jnp.int32)
    tokens = _Tokens(
        query=scale * fold(query),
        query_features=fold(arrays[3]),
        log_weight=None if log_weight is None else fold(log_weight[..., None])[..., 0],
        key=fold(key)[:, 0],
        value=fold(value)[:, 0],
        key_features=fold(arrays[4])[:, 0],
        log_decay=None if log_decay is None else fold(log_decay[..., None])[:, 0],
        starts=starts,
        runs=runs,
        position=position,
    )
    if before is None:
        y, _ = _mix(window_size, attention, tokens, None)
        return unfold_heads(y, query, value), None
    tokens = _after_window(tokens, before)
    y, averages = _mix(window_size, attention, tokens, before.earlier.to_averages())
    assert averages is not None
    after = _state_after(window_size, tokens, averages, before.earlier.log_decay)
    after = jax.tree.map(lambda x, of: x.reshape(of.shape), after, state)
    return unfold_heads(y, query, value), astype_like(after, state)


def _after_window(tokens: _Tokens, state: LogWindowState) -> _Tokens:
    """Prepend the tokens of a state's window."""
    assert tokens.runs is not None
    starts, window_size = tokens.starts, state.key.shape[1]
    is_token = _are_tokens(window_size, state.num_tokens)
    features = jnp.where(is_token[..., None], state.key_features, -jnp.inf)
    runs = jnp.where(is_token, 0, -1).astype(tokens.runs.dtype)
    window = state.key, state.value, features, state.log_decay
    joined = jax.tree.map(lambda *x: jnp.concatenate(x, 1), window, tokens.window)
    key, value, features, log_decay = joined
    return tokens._replace(
        key=key,
        value=value,
        key_features=features,
        log_decay=log_decay,
        starts=None if starts is None else jnp.pad(starts, [(0, 0), (window_size, 0)]),
        runs=jnp.concatenate([runs, tokens.runs], 1),
    )


def _mix(
    window_size: int, attention: AttentionPasses, tokens: _Tokens, earlier: Averages | None
) -> tuple[Array, Averages | None]:
    """Return the output `[X, R, T, V]` and the averages `[X, ...]` of all tokens but the last
    `window_size`; the given averages if no others precede these."""
    length, num_keys = tokens.query.shape[2], tokens.key.shape[1]
    y, log_z = folded_attention(
        tokens.query,
        tokens.key,
        tokens.value,
        rule=Window(window_size - 1),
        ids=None if tokens.runs is None else (tokens.runs[:, num_keys - length :], tokens.runs),
        offset=num_keys - length,
        # tiles have no forward-mode derivatives
        implementation="xla" if isinstance(attention, Scan) else None,
    )
    count = num_keys - window_size  # tokens that leave the window, each read by one query
    if count <= 0:
        return y, earlier
    last = slice(length - count, None)  # these queries
    if earlier is None:
        folds, _, depth = tokens.value.shape
        sizes = folds, tokens.key_features.shape[-1], depth, tokens.key.dtype
        earlier = HeinsenAttentionState.empty((), *sizes).to_averages()
    inputs = Inputs(
        query=jnp.moveaxis(tokens.query_features[:, :, last], 1, 2)[:, :, None],
        key=tokens.key_features[:, :count, None],
        value=tokens.value[:, :count, None],
        log_decay=None if tokens.log_decay is None else tokens.log_decay[:, :count, None],
        starts=None if tokens.starts is None else tokens.starts[:, :count],
    )
    before = Averages(earlier.log_z[:, None], earlier.mean[:, None])
    y_earlier, log_weight, after = attention.causal(inputs, before, is_log=False)
    y_earlier, log_weight = (jnp.moveaxis(x[:, :, 0], 1, 2) for x in (y_earlier, log_weight))
    if tokens.position is not None:
        has_earlier = tokens.position[:, None, last] >= window_size
        log_weight = jnp.where(has_earlier, log_weight, -jnp.inf)
    if tokens.log_weight is not None:
        log_weight = log_weight + tokens.log_weight[:, :, last]
    excess = (log_weight - log_z[:, :, last])[..., None]
    # Unlike exp(log Z_1 - log Z), these add up to 1 however large log Z is.
    window_weight, earlier_weight = jax.nn.sigmoid(-excess), jax.nn.sigmoid(excess)
    both = window_weight * y[:, :, last] + earlier_weight * y_earlier
    y = jnp.concatenate([y[:, :, : length - count], both], 2)
    return y, Averages(after.log_z[:, 0], after.mean[:, 0])


def _state_after(
    window_size: int, tokens: _Tokens, averages: Averages, total_decay: Array | None
) -> LogWindowState:
    """Return the state after the tokens, given the total decay of those before the window of the
    initial state."""
    assert tokens.position is not None
    assert tokens.runs is not None
    num_tokens = tokens.position[:, -1] + 1
    is_token = _are_tokens(window_size, num_tokens)[..., None]
    window = jax.tree.map(lambda x: jnp.where(is_token, x[:, -window_size:], 0), tokens.window)
    key, value, features, log_decay = window
    has_earlier = (num_tokens > window_size)[:, None]
    log_z = jnp.where(has_earlier, averages.log_z, -jnp.inf)
    mean = jnp.where(has_earlier[..., None], averages.mean, 0)
    if tokens.log_decay is not None:
        assert total_decay is not None
        last = tokens.runs[:, -1:]
        decays = jnp.where((tokens.runs == last)[..., None], tokens.log_decay, 0)
        total_decay = jnp.where(last == 0, total_decay, 0) + jnp.sum(decays[:, :-window_size], 1)
    earlier = HeinsenAttentionState(mean, log_z, total_decay)
    return LogWindowState(earlier, key, value, features, num_tokens, log_decay)


def _are_tokens(window_size: int, num_tokens: Array) -> Array:
    """Return which slots of a window `[X, w]` hold a token, after `num_tokens` `[X]`."""
    return jnp.arange(window_size, dtype=jnp.int32)[None] >= window_size - num_tokens[:, None]
