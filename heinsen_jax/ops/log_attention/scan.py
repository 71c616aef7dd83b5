"""Log-attention as in the paper: the state after every token, computed by a blocked scan.

Exact for any finite input, in log space or (for values of either sign) as convex averages. Stores
`[T, K, V]` states: for short sequences only.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from heinsen_jax.ops.linear_recurrence import (
    convex_recurrence,
    linear_recurrence,
    log_linear_recurrence,
)
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.state import read_all
from heinsen_jax.ops.numerics import einsum, log_add_exp, log_sum_exp, softmax, softmax_pair
from heinsen_jax.typing import Array, Float


@dataclass(frozen=True)
class Scan:
    """implementation="scan": eqs. (4)-(6), log Y_t = LSE_K(Q_t + H_S,t) - LSE_K(Q_t + H_Z,t)."""

    def causal(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"], Averages]:
        if inputs.length == 1:
            return _step(inputs, state, is_log=is_log)
        decay = inputs.decay_and_starts
        if decay is None:
            decay = jnp.zeros((1, inputs.length, 1, 1), inputs.key.dtype)
        both = convex_recurrence(decay, inputs.key, state.log_z, axis=1)
        reading = softmax((inputs.query + both.log_z[..., None, :],), -1)
        if is_log:
            kept, added = (x[..., None] for x in both.log_weights)
            terms = added + inputs.value[..., None, :]
            mean = log_linear_recurrence(kept, terms, initial=state.mean, axis=1)
            (log_weights,) = reading.log_weights
            y = log_sum_exp(log_weights[..., None] + mean[..., None, :, :], -2)
        else:
            kept, added = (x[..., None] for x in both.weights)
            new = added * inputs.value[..., None, :]
            mean = linear_recurrence(kept, new, initial=state.mean, axis=1)
            y = einsum("btgrk,btgkv->btgrv", *reading.weights, mean)
        return y, reading.log_z, Averages(both.log_z[:, -1], mean[:, -1])

    def bidirectional(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Averages]:
        return read_all(inputs, state, is_log=is_log)


def _step(inputs: Inputs, state: Averages, *, is_log: bool) -> tuple[Array, Array, Averages]:
    """Process one token in few operations, since their number determines the time of a decoding
    step."""
    decay = inputs.decay_and_starts
    query, key, value = inputs.query[:, 0], inputs.key[:, 0], inputs.value[:, 0, :, None]
    before = state.log_z if decay is None else state.log_z + decay[:, 0]
    both = softmax_pair(before, key)
    reading = softmax((query + both.log_z[..., None, :],), -1)
    if is_log:
        kept, added = (x[..., None] for x in both.log_weights)
        mean = log_add_exp(kept + state.mean, added + value)
        (log_weights,) = reading.log_weights
        y = log_sum_exp(log_weights[..., None] + mean[..., None, :, :], -2)
    else:
        kept, added = (x[..., None] for x in both.weights)
        mean = kept * state.mean + added * value
        y = einsum("bgrk,bgkv->bgrv", *reading.weights, mean)
    return y[:, None], reading.log_z[:, None], Averages(both.log_z, mean)
