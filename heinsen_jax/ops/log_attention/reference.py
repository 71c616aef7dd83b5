"""The oracle: eq. (1) by definition. Slow, obvious, and sharing no code with the fast paths."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.typing import Array, Bool, Float, Inexact, Integer, typed


@typed
def attention(
    query: Float[Array, "B T G R K"],
    key: Float[Array, "B S G K"],
    value: Inexact[Array, "B S G V"],
    state: LogAttentionState | MeanState,
    *,
    is_causal: bool,
    is_there: Bool[Array, "B S"] | None = None,
    segment_ids: Integer[Array, "B S"] | None = None,
    window: int | None = None,
    log_decay: Float[Array, "B S G _"] | None = None,
) -> tuple[Inexact[Array, "B T G R V"], Any]:
    """Output and the state after all tokens; in linear space where `state` is a `MeanState`.

    Args:
      query, key: exponents.
      value: log-values, or values of either sign.
      state: what was seen before, as before the first token.
      is_there: which tokens are none of the padding.
      segment_ids: the document of each token.
      window: how many tokens a query sees, itself included.
      log_decay: of K features or, for all of a head, of 1.
    """
    if is_there is not None:
        there = is_there[:, :, None, None]
        key, value = jnp.where(there, key, -jnp.inf), jnp.where(there, value, 0)
        log_decay = None if log_decay is None else jnp.where(there, log_decay, 0)
    masks = _masks(query, key, is_causal, is_there, segment_ids, window)
    between, from_start, to_end = _decays(key, log_decay, is_causal)
    # [B, T, S, G, R]: the score of every token for every query; features are summed at once
    terms = query[:, :, None] + (key[:, None] + between)[:, :, :, :, None]
    scores = _where(masks.tokens, _logsumexp(terms, -1))
    past = query + (state.log_z[:, None] + from_start)[..., None, :]
    past = _where(masks.state, past)
    last = _where(masks.last, key + to_end)
    kept = _where(masks.kept, state.log_z + to_end[:, 0] + _first(log_decay))

    if isinstance(state, MeanState):
        # The state acts as one more source a key feature, whose value is the average so far.
        sources = jnp.concatenate([jnp.moveaxis(scores, 2, -1), past], -1)
        values = jnp.concatenate([jnp.moveaxis(value, 1, 2), state.mean], 2)
        y = _average(sources[..., None], values[:, None, :, None], -2)
        keys = jnp.concatenate([kept[:, None], last], 1)
        spread = jnp.broadcast_to(value[:, :, :, None], (*key.shape, value.shape[-1]))
        means = jnp.concatenate([state.mean[:, None], spread], 1)
        return y, MeanState(_logsumexp(keys, 1), _average(keys[..., None], means, 1))

    past_s = past[..., None] + (state.log_s - _finite(state.log_z)[..., None])[:, None, :, None]
    log_s = _logsumexp(scores[..., None] + value[:, None, :, :, None], 2)
    log_s = _logsumexp(jnp.stack([log_s, _logsumexp(past_s, -2)]), 0)
    log_z = jnp.stack([_logsumexp(scores, 2), _logsumexp(past, -1)])
    log_y = jnp.where(log_s == -jnp.inf, -jnp.inf, log_s - _finite(_logsumexp(log_z, 0))[..., None])
    kept_s = kept[..., None] + (state.log_s - _finite(state.log_z)[..., None])
    all_s = jnp.concatenate([kept_s[:, None], last[..., None] + value[:, :, :, None]], 1)
    all_z = jnp.concatenate([kept[:, None], last], 1)
    return log_y, LogAttentionState(_logsumexp(all_s, 1), _logsumexp(all_z, 1))


class _Masks(NamedTuple):
    tokens: Array  # [B, T, S]: what each query sees
    state: Array  # [B, T]: whether it sees the state before all tokens
    last: Array  # [B, S]: what the state after all tokens holds
    kept: Array  # [B]: whether it holds the state before


def _masks(query, key, is_causal, is_there, segment_ids, window) -> _Masks:
    batch, length, sources = query.shape[0], query.shape[1], key.shape[1]
    t, s = jnp.arange(length)[None, :, None], jnp.arange(sources)[None, None, :]
    there = jnp.ones((batch, sources), bool) if is_there is None else is_there
    document = jnp.zeros((batch, sources), int)
    if segment_ids is not None:
        changes = (segment_ids[:, 1:] != segment_ids[:, :-1]) & there[:, 1:] & there[:, :-1]
        document = jnp.concatenate([document[:, :1], jnp.cumsum(changes, 1)], 1)
    tokens = jnp.ones((batch, length, sources), bool)
    state = jnp.ones((batch, length), bool)
    if segment_ids is not None:
        tokens = document[:, :, None] == document[:, None, :]
        state = document == 0
    if is_causal:
        tokens &= s <= t
    if window is not None:
        tokens &= s > t - window
    last = document == jnp.max(document, 1, keepdims=True, initial=0)
    return _Masks(tokens, state, last, jnp.max(document, 1, initial=0) == 0)


def _decays(key: Array, log_decay: Array | None, is_causal: bool) -> tuple:
    """Sums of decay from each token (and from the start) to each query, and to the end."""
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


def _first(log_decay: Array | None) -> Any:
    return 0 if log_decay is None else log_decay[:, 0]


def _where(mask: Array, x: Array) -> Array:
    """x, and -inf where the mask, of its leading axes, is false."""
    return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, -jnp.inf)


def _finite(x: Array) -> Array:
    return jnp.where(x == -jnp.inf, 0.0, x)


def _logsumexp(x: Array, axis: int) -> Array:
    """With `x` replaced, not merely masked, where all of it is -inf, so that no gradient is NaN."""
    nothing = jnp.all(x == -jnp.inf, axis, keepdims=True)
    x = jnp.where(nothing, 0.0, x)
    largest = jnp.max(x, axis, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(x - largest), axis, keepdims=True)) + largest
    return jnp.squeeze(jnp.where(nothing, -jnp.inf, total), axis)


def _average(log_weights: Array, values: Array, axis: int) -> Array:
    """sum(w v) / sum(w), and 0 of nothing."""
    total = jnp.expand_dims(_logsumexp(log_weights, axis), axis)
    nothing = total == -jnp.inf
    weights = jnp.exp(jnp.where(nothing, -jnp.inf, log_weights) - jnp.where(nothing, 0.0, total))
    return jnp.sum(weights * values, axis)
