"""Causal log-attention over a stream of small blocks: exact for finite input, in constant memory.

Inside a block eq. (1) by direct definition, in log space or (for values of either sign) by softmax
weights; what came before is read from the state. `chunked` falls back on it.
"""

import jax
import jax.numpy as jnp

from heinsen_jax.ops.log_attention.blocks import scan_blocks
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.numerics import log_add_exp, log_difference, log_sum_exp, share
from heinsen_jax.typing import Array, Float, typed

BLOCK = 16


@typed
def log_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X T K"],
    log_value: Float[Array, "X T V"],
    state: LogAttentionState,
) -> tuple[Float[Array, "X R T V"], LogAttentionState]:
    """log Y = logaddexp(log S of the past, of the block) - the same of Z."""

    @jax.checkpoint
    def body(state: LogAttentionState, block: tuple[Array, ...]):
        key, log_value, query = block
        scores = _causal_scores(query, key)
        past_s = log_sum_exp(query[..., None] + state.log_s[:, None, None], 3)
        past_z = log_sum_exp(query + state.log_z[:, None, None], 3)
        log_s = log_add_exp(past_s, log_sum_exp(scores[..., None] + log_value[:, None, None], 3))
        log_z = log_add_exp(past_z, log_sum_exp(scores, 3))
        added = LogAttentionState(
            log_sum_exp(key[:, :, :, None] + log_value[:, :, None], 1), log_sum_exp(key, 1)
        )
        return state.merge(added), log_difference(log_s, log_z[..., None])

    state, log_y = scan_blocks(body, state, (key, log_value, query), block_size=BLOCK)
    assert log_y is not None
    return log_y, state


@typed
def mean_attention(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X T K"],
    value: Float[Array, "X T V"],
    state: MeanState,
) -> tuple[Float[Array, "X R T V"], MeanState]:
    """Y = the average of the past's average values and the block's values, by softmax."""

    @jax.checkpoint
    def body(state: MeanState, block: tuple[Array, ...]):
        key, value, query = block
        scores = _causal_scores(query, key)
        past = query + state.log_z[:, None, None]
        log_z = log_add_exp(log_sum_exp(past, 3), log_sum_exp(scores, 3))[..., None]
        y = jnp.einsum("xrts,xsv->xrtv", share(scores, log_z), value)
        y = y + jnp.einsum("xrtk,xkv->xrtv", share(past, log_z), state.mean)
        return state.absorb(key, value), y

    state, y = scan_blocks(body, state, (key, value, query), block_size=BLOCK)
    assert y is not None
    return y, state


def _causal_scores(query: Array, key: Array) -> Array:
    """log(exp(Q) exp(K)^T) `[X, R, T, T]`; -inf where a query must not see."""
    scores = log_sum_exp(query[:, :, :, None] + key[:, None, None], 4)
    return jnp.where(jnp.tri(query.shape[2], dtype=bool)[None, None], scores, -jnp.inf)
