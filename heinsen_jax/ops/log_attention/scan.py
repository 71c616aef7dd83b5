"""Log-attention as in the paper: the state after every token, computed by a blocked scan.

Exact for any finite input, in log space or (for values of either sign) as convex averages. Stores
`[T, K, V]` states: for short sequences only.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from heinsen_jax.ops.linear_recurrence import linear_recurrence, log_linear_recurrence
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.state import read_all, read_averages
from heinsen_jax.ops.numerics import einsum, finite, log_add_exp, log_sum_exp, share
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
        h_z = log_linear_recurrence(decay, inputs.key, initial=state.log_z, axis=1)
        before = jnp.concatenate([state.log_z[:, None], h_z[:, :-1]], 1)
        kept, added = before + decay, inputs.key
        log_z = log_sum_exp(inputs.query + h_z[..., None, :], -1)
        total = finite(h_z)
        if is_log:
            terms = (added - total)[..., None] + inputs.value[..., None, :]
            mean = log_linear_recurrence(
                (kept - total)[..., None], terms, initial=state.mean, axis=1
            )
            logits = inputs.query + h_z[..., None, :] - finite(log_z)[..., None]
            y = log_sum_exp(logits[..., None] + mean[..., None, :, :], -2)
        else:
            mean = linear_recurrence(
                share(kept, h_z)[..., None],
                share(added, h_z)[..., None] * inputs.value[..., None, :],
                initial=state.mean,
                axis=1,
            )
            y = read_averages(Averages(h_z, mean), inputs.query)
        return y, log_z, Averages(h_z[:, -1], mean[:, -1])

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
    h_z = log_add_exp(before, key)
    kept, added = (x - finite(h_z) for x in (before, key))
    logits = query + h_z[..., None, :]
    log_z = log_sum_exp(logits, -1)
    shares = logits - finite(log_z)[..., None]
    if is_log:
        mean = log_add_exp(kept[..., None] + state.mean, added[..., None] + value)
        y = log_sum_exp(shares[..., None] + mean[..., None, :, :], -2)
    else:
        kept, added = (jnp.exp(x)[..., None] for x in (kept, added))
        mean = kept * state.mean + added * value
        y = einsum("bgrk,bgkv->bgrv", jnp.exp(shares), mean)
    return y[:, None], log_z[:, None], Averages(h_z, mean)
