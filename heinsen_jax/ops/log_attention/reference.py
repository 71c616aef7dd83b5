"""The oracle: eq. (1) by definition. Slow, obvious, and sharing no code with the fast paths."""

import jax.numpy as jnp

from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.typing import Array, Float, typed


def _logsumexp(x: Array, axis: int) -> Array:
    """With `x` replaced, not merely masked, where all of it is -inf, so that no gradient is NaN."""
    nothing = jnp.all(x == -jnp.inf, axis, keepdims=True)
    x = jnp.where(nothing, 0.0, x)
    largest = jnp.max(x, axis, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(x - largest), axis, keepdims=True)) + largest
    return jnp.squeeze(jnp.where(nothing, -jnp.inf, total), axis)


def _scores(query: Array, key: Array, is_causal: bool) -> Array:
    """log(exp(Q) exp(K)^T): LSE over features of Q_t + K_s, `[X, R, T, S]`; -inf where unseen."""
    scores = _logsumexp(query[:, :, :, None, :] + key[:, None, None, :, :], -1)
    if is_causal:
        scores = jnp.where(jnp.tri(query.shape[2], dtype=bool)[None, None], scores, -jnp.inf)
    return scores


@typed
def log_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X S K"],
    log_value: Float[Array, "X S V"],
    state: LogAttentionState,
    *,
    is_causal: bool,
) -> tuple[Float[Array, "X R T V"], LogAttentionState]:
    scores = _scores(query, key, is_causal)
    new_s = _logsumexp(scores[..., None] + log_value[:, None, None], 3)
    new_z = _logsumexp(scores, 3)
    past_s = _logsumexp(query[..., None] + state.log_s[:, None, None], 3)
    past_z = _logsumexp(query + state.log_z[:, None, None], 3)
    log_s = _logsumexp(jnp.stack([new_s, past_s]), 0)
    log_z = _logsumexp(jnp.stack([new_z, past_z]), 0)[..., None]
    log_y = log_s - jnp.where(log_z == -jnp.inf, 0.0, log_z)

    all_keys = jnp.concatenate([state.log_z[:, None], key], 1)
    all_terms = jnp.concatenate(
        [state.log_s[:, None], key[:, :, :, None] + log_value[:, :, None, :]], 1
    )
    return log_y, LogAttentionState(_logsumexp(all_terms, 1), _logsumexp(all_keys, 1))


@typed
def mean_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X S K"],
    value: Float[Array, "X S V"],
    state: MeanState,
    *,
    is_causal: bool,
) -> tuple[Float[Array, "X R T V"], MeanState]:
    def weighted_sum(log_weights: Array, values: Array, axis: int) -> Array:
        """Softmax average of values over an axis; 0 where there is nothing."""
        log_total = jnp.expand_dims(_logsumexp(log_weights, axis), axis)
        nothing = log_total == -jnp.inf
        log_weights = jnp.where(nothing, -jnp.inf, log_weights)
        weights = jnp.exp(log_weights - jnp.where(nothing, 0.0, log_total))
        return jnp.sum(weights[..., None] * values, axis)

    # The state acts as one more source a key feature, whose value is the average so far.
    from_tokens = _scores(query, key, is_causal)
    from_state = query + state.log_z[:, None, None]
    sources = jnp.concatenate([from_tokens, from_state], -1)
    values = jnp.concatenate([value, state.mean], 1)[:, None, None]
    y = weighted_sum(sources, values, 3)

    all_keys = jnp.concatenate([state.log_z[:, None], key], 1)
    spread = jnp.broadcast_to(value[:, :, None, :], (*key.shape, value.shape[-1]))
    all_values = jnp.concatenate([state.mean[:, None], spread], 1)
    mean = weighted_sum(all_keys, all_values, 1)
    return y, MeanState(_logsumexp(all_keys, 1), mean)
