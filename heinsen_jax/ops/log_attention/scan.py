"""Log-attention as the paper writes it: the states after every token, by associative scan.

Exact for any finite input, in log space or (for values of either sign) as convex averages. Holds
`[T, K, V]` states: short sequences only.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.linear_recurrence import linear_recurrence, log_linear_recurrence
from heinsen_jax.ops.log_attention import state as log_states
from heinsen_jax.ops.log_attention.passes import read_all
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.ops.numerics import log_difference, log_sum_exp, share, where_empty
from heinsen_jax.typing import Array


@dataclass(frozen=True)
class Scan:
    """As `Chunked`, by eqs. (4)-(6): log Y_t = LSE_K(Q_t + H_S,t) - LSE_K(Q_t + H_Z,t)."""

    def causal(self, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
        decay = tokens.decay_and_starts
        if decay is None:
            decay = jnp.zeros((1, tokens.length, 1, 1), tokens.key.dtype)
        if isinstance(state, MeanState):
            h_z = log_linear_recurrence(decay, tokens.key, initial=state.log_z, axis=1)
            before = jnp.concatenate([state.log_z[:, None], h_z[:, :-1]], 1)
            mean = linear_recurrence(
                share(before + decay, h_z)[..., None],
                share(tokens.key, h_z)[..., None] * tokens.value[..., None, :],
                initial=state.mean,
                axis=1,
            )
            y = MeanState(h_z, mean).attend(tokens.query)
            log_z = log_sum_exp(tokens.query + h_z[..., None, :], -1)
            return y, log_z, MeanState(h_z[:, -1], mean[:, -1])
        # Log S and log Z are of the size of keys, their difference is not: keys near 0 lose less.
        middle = lax.stop_gradient(_middle(tokens.key, state.log_z))
        tokens = replace(tokens, key=tokens.key - middle[:, None])
        state = log_states.decayed(state, -middle)
        h_z = log_linear_recurrence(decay, tokens.key, initial=state.log_z, axis=1)
        terms = tokens.key[..., :, None] + tokens.value[..., None, :]
        h_s = log_linear_recurrence(decay[..., None], terms, initial=state.log_s, axis=1)
        log_s = log_sum_exp(tokens.query[..., None] + h_s[..., None, :, :], -2)
        log_z = log_sum_exp(tokens.query + h_z[..., None, :], -1)
        after = LogAttentionState(h_s[:, -1], h_z[:, -1])
        log_y = log_difference(log_s, log_z[..., None])
        return log_y, log_z + middle[:, None], log_states.decayed(after, middle)

    def bidirectional(self, tokens: Tokens, state: Any) -> tuple[Array, Any]:
        return read_all(tokens, state)


def _middle(key: Array, log_z: Array) -> Array:
    """The largest key of each head, those of the state included, `[B, G, 1]`; 0 if all are -inf."""
    largest = jnp.maximum(jnp.max(key, 1), log_z)
    return where_empty(jnp.max(largest, -1, keepdims=True), 0.0)
