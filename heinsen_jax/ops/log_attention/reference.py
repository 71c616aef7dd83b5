"""Oracle: eq. (1) by definition. Slow, obvious, and independent of the fast paths."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention.inputs import Averages
from heinsen_jax.typing import Array, Bool, Float, Integer


def attention(
    query: Float[Array, "B T G R K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"],
    state: Averages,
    *,
    is_log: bool,
    is_causal: bool,
    is_valid: Bool[Array, "B S"] | None = None,
    segment_ids: Integer[Array, "B S"] | None = None,
    window: int | None = None,
    log_decay: Float[Array, "B S G _"] | None = None,
) -> tuple[Float[Array, "B T G R V"], Averages]:
    """Return output and the state after all tokens.

    Args:
      query, key: exponents.
      value: log-values, or values of either sign.
      state: before the first token.
      is_log: whether values and averages of the state are logarithms.
      is_valid: False for padding.
      segment_ids: the segment of each token.
      window: number of tokens that a query attends to, itself included.
      log_decay: by key feature, or by head with a last axis of 1.
    """
    if is_valid is not None:
        valid = is_valid[:, :, None, None]
        key, value = jnp.where(valid, key, -jnp.inf), jnp.where(valid, value, 0)
        log_decay = None if log_decay is None else jnp.where(valid, log_decay, 0)
    masks = _masks(query, key, is_causal, is_valid, segment_ids, window)
    between, from_start, to_end = _decays(key, log_decay, is_causal)
    # [B, T, S, G, R]: the score of every token for every query; features are summed in one step
    terms = query[:, :, None] + (key[:, None] + between)[:, :, :, :, None]
    scores = _where(masks.tokens, _logsumexp(terms, -1))
    past = query + (state.log_z[:, None] + from_start)[..., None, :]
    past = _where(masks.state, past)
    last = _where(masks.last, key + to_end)
    kept = _where(masks.kept, state.log_z + to_end[:, 0] + _first(log_decay))

    # The state acts as one more token per key feature, whose value is the average so far.
    sources = jnp.concatenate([jnp.moveaxis(scores, 2, -1), past], -1)
    values = jnp.concatenate([jnp.moveaxis(value, 1, 2), state.mean], 2)
    keys = jnp.concatenate([kept[:, None], last], 1)
    spread = jnp.broadcast_to(value[:, :, :, None], (*key.shape, value.shape[-1]))
    means = jnp.concatenate([state.mean[:, None], spread], 1)
    average = _log_average if is_log else _average
    y = average(sources[..., None], values[:, None, :, None], -2)
    return y, Averages(_logsumexp(keys, 1), average(keys[..., None], means, 1))


class _Masks(NamedTuple):
    tokens: Array  # [B, T, S]: the tokens that each query attends to
    state: Array  # [B, T]: whether it reads the state before all tokens
    last: Array  # [B, S]: the tokens in the state after all
    kept: Array  # [B]: whether it holds the state before


def _masks(query, key, is_causal, is_valid, segment_ids, window) -> _Masks:
    batch, length, sources = query.shape[0], query.shape[1], key.shape[1]
    t, s = jnp.arange(length)[None, :, None], jnp.arange(sources)[None, None, :]
    valid = jnp.ones((batch, sources), bool) if is_valid is None else is_valid
    segment = jnp.zeros((batch, sources), int)
    if segment_ids is not None:
        changes = (segment_ids[:, 1:] != segment_ids[:, :-1]) & valid[:, 1:] & valid[:, :-1]
        segment = jnp.concatenate([segment[:, :1], jnp.cumsum(changes, 1)], 1)
    tokens = jnp.ones((batch, length, sources), bool)
    state = jnp.ones((batch, length), bool)
    if segment_ids is not None:
        tokens = segment[:, :, None] == segment[:, None, :]
        state = segment == 0
    if is_causal:
        tokens &= s <= t
    if window is not None:
        tokens &= s > t - window
    last = segment == jnp.max(segment, 1, keepdims=True, initial=0)
    return _Masks(tokens, state, last, jnp.max(segment, 1, initial=0) == 0)


def _decays(key: Array, log_decay: Array | None, is_causal: bool) -> tuple:
    """Return the sums of decay from each token (and from the start) to each query, and to the
    end."""
    batch, sources, groups, _ = key.shape
    if log_decay is None:
        zero = jnp.zeros((batch, 1, groups, 1), key.dtype)
        return zero[:, None], zero, zero
    t, s = jnp.arange(sources)[:, None], jnp.arange(sources)[None, :]
    later = (t > s)[None, :, :, None, None]
    between = lax.associative_scan(
        jnp.add, jnp.where(later, log_decay[:, :, None], 0), axis=1
    )  # [B, T, S, G, F]
    from_start = between[:, :, 0] + log_decay[:, :1]
    to_end = between[:, -1]
    if not is_causal:  # every query reads the state after the last token
        between = to_end[:, None]
        from_start = from_start[:, -1:]
    return between, from_start, to_end


def _first(log_decay: Array | None) -> Array | int:
    return 0 if log_decay is None else log_decay[:, 0]


def _where(mask: Array, x: Array) -> Array:
    """Return x, -inf where the mask of its leading axes is False."""
    return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, -jnp.inf)


def _finite(x: Array) -> Array:
    return jnp.where(x == -jnp.inf, 0.0, x)


def _logsumexp(x: Array, axis: int) -> Array:
    """LSE, with `x` replaced if all of it is -inf, so that no gradient is NaN."""
    nothing = jnp.all(x == -jnp.inf, axis, keepdims=True)
    x = jnp.where(nothing, 0.0, x)
    largest = jnp.max(x, axis, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(x - largest), axis, keepdims=True)) + largest
    return jnp.squeeze(jnp.where(nothing, -jnp.inf, total), axis)


def _average(log_weights: Array, values: Array, axis: int) -> Array:
    """sum(w v) / sum(w); 0 for an empty sum."""
    weights = jnp.exp(_from_largest(log_weights, axis))
    total = jnp.sum(weights, axis, keepdims=True)
    return jnp.sum(weights / jnp.where(total == 0, 1, total) * values, axis)


def _log_average(log_weights: Array, log_values: Array, axis: int) -> Array:
    """log(sum(w v) / sum(w)); log 0 for an empty sum."""
    log_weights = _from_largest(log_weights, axis)
    log_sum = _logsumexp(log_weights + log_values, axis)
    log_total = _finite(_logsumexp(log_weights, axis))
    return jnp.where(log_sum == -jnp.inf, -jnp.inf, log_sum - log_total)


def _from_largest(log_weights: Array, axis: int) -> Array:
    """The differences from the largest one, whose average is the same."""
    return log_weights - _finite(jnp.max(log_weights, axis, keepdims=True, initial=-jnp.inf))
