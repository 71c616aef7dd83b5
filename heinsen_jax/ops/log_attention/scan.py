"""Log-attention as the paper writes it: the states after every token, by associative scan.

Exact for any finite input, in log space or (for values of either sign) as convex averages. Holds
`[T, K, V]` states: short sequences only.
"""

import jax.numpy as jnp

from heinsen_jax.ops.linear_recurrence import (
    cumulative_log_sum_exp,
    linear_recurrence,
    log_linear_recurrence,
)
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState, absorb, attend
from heinsen_jax.ops.numerics import log_add_exp, log_difference, log_sum_exp, share
from heinsen_jax.typing import Array, Float, typed


@typed
def log_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X S K"],
    log_value: Float[Array, "X S V"],
    state: LogAttentionState,
    *,
    is_causal: bool,
) -> tuple[Float[Array, "X R T V"], LogAttentionState]:
    """Eqs. (4)-(6): log Y_t = LSE_K(Q_t + H_S,t) - LSE_K(Q_t + H_Z,t)."""
    if not is_causal:
        state = absorb(state, key, log_value)
        return attend(state, _rows(query)).reshape(*query.shape[:-1], log_value.shape[-1]), state
    terms = key[:, :, :, None] + log_value[:, :, None, :]
    no_decay = jnp.zeros((1, key.shape[1], 1), key.dtype)
    h_s = log_linear_recurrence(no_decay[..., None], terms, initial=state.log_s, axis=1)
    h_z = log_linear_recurrence(no_decay, key, initial=state.log_z, axis=1)
    log_s = log_sum_exp(query[..., None] + h_s[:, None], 3)
    log_z = log_sum_exp(query + h_z[:, None], 3)
    return log_difference(log_s, log_z[..., None]), LogAttentionState(h_s[:, -1], h_z[:, -1])


@typed
def mean_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X S K"],
    value: Float[Array, "X S V"],
    state: MeanState,
    *,
    is_causal: bool,
) -> tuple[Float[Array, "X R T V"], MeanState]:
    """Y_t = sum_K softmax_K(Q_t + H_Z,t) M_t, where M_t[k] is the average of the values under
    softmax_{s<=t}(K_sk)."""
    if not is_causal:
        state = state.absorb(key, value)
        return state.attend(_rows(query)).reshape(*query.shape[:-1], value.shape[-1]), state
    h_z = log_add_exp(cumulative_log_sum_exp(key), state.log_z[:, None])
    before = jnp.concatenate([state.log_z[:, None], h_z[:, :-1]], 1)
    mean = linear_recurrence(
        share(before, h_z)[..., None],
        share(key, h_z)[..., None] * value[:, :, None],
        initial=state.mean,
        axis=1,
    )
    every_state = MeanState(h_z[:, None], mean[:, None])
    y = every_state.attend(query[..., None, :])[..., 0, :]
    return y, MeanState(h_z[:, -1], mean[:, -1])


def _rows(query: Array) -> Array:
    """[X, R, T, K] -> [X, R T, K]: the queries of all heads that read one state."""
    return query.reshape(query.shape[0], query.shape[1] * query.shape[2], query.shape[3])
