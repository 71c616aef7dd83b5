"""Causal attention by small blocks of tokens, exact whatever the keys and decays.

Inside a block of 16 tokens eq. (1) by direct definition: scores LSE_k(Q_t + K_s + decays between).
What came before a block is read from the state there; those states are a recurrence over blocks.
Every scale is a maximum over what a query sees, so no token of the future can make it underflow.
Sums of decay are formed for each pair, unless all of a block's are small enough (`DIFFERENCES`) for
differences of running sums to be as exact.

`mean_attention` averages values of either sign with the softmax of those scores: for any keys.
`log_attention` stays in log space throughout: for any keys and any log-values.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.linear_recurrence import linear_recurrence, log_linear_recurrence
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState, decay_to_end
from heinsen_jax.ops.log_attention.tokens import (
    Tokens,
    chunked,
    each_head,
    fold,
    unchunked,
    unfold,
)
from heinsen_jax.ops.numerics import (
    log_add_exp,
    log_difference,
    log_matmul,
    log_sum_exp,
    share,
)
from heinsen_jax.typing import Array

BLOCK = 16  # tokens whose pairs are formed one by one
STREAMED = 128  # tokens held at once
DIFFERENCES = 32.0  # nats of decay in a block up to which differences of running sums are exact


def mean_attention(tokens: Tokens, state: MeanState) -> tuple[Array, Array, MeanState]:
    """Y, log Z and the state after all tokens; their number is a multiple of `BLOCK`."""
    return _streamed(_mean_attention, tokens, state)


def log_attention(
    tokens: Tokens, state: LogAttentionState
) -> tuple[Array, Array, LogAttentionState]:
    """log Y, log Z and the state after all tokens; their number is a multiple of `BLOCK`."""
    return _streamed(_log_attention, tokens, state)


def _streamed(attention: Callable, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
    """A few blocks at a time, computed again in backward: what is formed of pairs stays small.

    That keeps the memory of one call of all tiers small too, which the fast one gains by: the C
    library's allocator hands out large memory untouched, page by page, at every call.
    """
    size = math.gcd(tokens.length, STREAMED)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    @jax.checkpoint
    def step(state, tokens):
        y, log_z, state = attention(tokens, state)
        return state, (y, log_z)

    state, (y, log_z) = lax.scan(step, state, jax.tree.map(split, tokens))
    return join(y), join(log_z), state


def _mean_attention(tokens: Tokens, state: MeanState) -> tuple[Array, Array, MeanState]:
    blocks = _blocks(tokens)
    before = fold(state)
    added_z = log_sum_exp(blocks.to_state, -2)
    shares = share(blocks.to_state, added_z[..., None, :])
    added = jnp.einsum("jxck,jxcv->jxkv", shares, blocks.value)
    h_z = log_linear_recurrence(blocks.decay, added_z, initial=before.log_z, axis=0)
    before_z = _shift(before.log_z, h_z)
    mean = linear_recurrence(
        share(before_z + blocks.decay, h_z)[..., None],
        share(added_z, h_z)[..., None] * added,
        initial=before.mean,
        axis=0,
    )
    past = blocks.from_state + before_z[..., None, :]
    log_z = log_add_exp(log_sum_exp(past, -1), log_sum_exp(blocks.scores, -1))[..., None]
    y = jnp.einsum("jxcd,jxdv->jxcv", share(blocks.scores, log_z), blocks.value)
    y = y + jnp.einsum("jxck,jxkv->jxcv", share(past, log_z), _shift(before.mean, mean))
    return (*_unblocked(tokens, y, log_z), unfold(MeanState(h_z[-1], mean[-1]), tokens))


def _log_attention(
    tokens: Tokens, state: LogAttentionState
) -> tuple[Array, Array, LogAttentionState]:
    blocks = _blocks(tokens)
    before = fold(state)
    added_z = log_sum_exp(blocks.to_state, -2)
    added_s = log_matmul(jnp.swapaxes(blocks.to_state, -1, -2), blocks.value)
    h_z = log_linear_recurrence(blocks.decay, added_z, initial=before.log_z, axis=0)
    h_s = log_linear_recurrence(blocks.decay[..., None], added_s, initial=before.log_s, axis=0)
    past_z = log_sum_exp(blocks.from_state + _shift(before.log_z, h_z)[..., None, :], -1)
    past_s = log_matmul(blocks.from_state, _shift(before.log_s, h_s))
    log_z = log_add_exp(past_z, log_sum_exp(blocks.scores, -1))[..., None]
    log_s = log_add_exp(past_s, log_matmul(blocks.scores, blocks.value))
    after = LogAttentionState(h_s[-1], h_z[-1])
    return (*_unblocked(tokens, log_difference(log_s, log_z), log_z), unfold(after, tokens))


class _Blocks(NamedTuple):
    """Log-weights, -inf where nothing is seen, with the decays on the way.

    scores: of tokens on queries of their block `[J, X, R C, C]`.
    from_state: of features of the state before a block on its queries `[J, X, R C, K]`.
    to_state: of tokens on features of the state after their block `[J, X, C, K]`.
    decay: of the state before a block on the state after it `[J, X, K]`.
    """

    value: Array
    scores: Array
    from_state: Array
    to_state: Array
    decay: Array


def _blocks(tokens: Tokens) -> _Blocks:
    query, key, value = (chunked(x, BLOCK) for x in (tokens.query, tokens.key, tokens.value))
    heads = query.shape[-2] // BLOCK
    visible = jnp.tri(BLOCK, dtype=bool)[None, None]
    from_state, to_state, decay = query, key, jnp.zeros_like(key[..., 0, :])
    if tokens.log_decay is not None:
        steps = chunked(tokens.log_decay, BLOCK)
        scores = _decayed_scores(query, key, steps)
        so_far = jnp.cumsum(steps, -2)
        from_state = query + each_head(so_far, heads)
        to_state = key + decay_to_end(steps, -2)
        decay = decay + so_far[..., -1, :]
    else:
        scores = log_matmul(query, jnp.swapaxes(key, -1, -2))
    if tokens.starts is not None:
        documents = tokens.documents(BLOCK)
        visible = visible & (documents[..., :, None] == documents[..., None, :])
        first = each_head(documents[..., None] == 0, heads)
        from_state = jnp.where(first, from_state, -jnp.inf)
        last = documents[..., None] == documents[..., -1:, None]
        to_state = jnp.where(last, to_state, -jnp.inf)
        decay = jnp.where(documents[..., -1:] == 0, decay, -jnp.inf)
    scores = jnp.where(each_head(visible, heads), scores, -jnp.inf)
    return _Blocks(value, scores, from_state, to_state, decay)


def _decayed_scores(query: Array, key: Array, steps: Array) -> Array:
    """LSE_k(Q_t + K_s + sum_{s < r <= t} of `steps`): `[J, X, R C, C]`."""
    heads = query.shape[-2] // BLOCK
    if steps.shape[-1] == 1:
        scores = log_matmul(query, jnp.swapaxes(key, -1, -2))
        return scores + each_head(_sums_between(steps)[..., 0], heads)

    def by_differences(query, key, steps):
        so_far = jnp.cumsum(steps, -2)
        keys = jnp.swapaxes(key - so_far, -1, -2)
        return log_matmul(query + each_head(so_far, heads), keys)

    @jax.checkpoint
    def by_sums(query, key, steps):
        terms = query.reshape(*query.shape[:2], heads, BLOCK, 1, -1) + key[:, :, None, None]
        terms = terms + _sums_between(steps)[:, :, None]
        return log_sum_exp(terms, -1).reshape(*query.shape[:-1], BLOCK)

    largest = lax.stop_gradient(jnp.max(jnp.sum(-steps, -2), initial=0.0))
    way = first_safe((largest - DIFFERENCES)[None])
    return lax.switch(way, (by_differences, by_sums), query, key, steps)


def _sums_between(steps: Array) -> Array:
    """The decay of token s as seen from t, sum_{s < r <= t} of `steps`: `[J, X, t, s, F]`, and 0
    where t <= s. Sums, not differences of running sums: a large step spoils no other pair."""
    later = jnp.tri(BLOCK, k=-1, dtype=bool)[None, None, ..., None]
    return jnp.cumsum(jnp.where(later, steps[..., :, None, :], 0.0), 2)


def _shift(first: Array, rest: Array) -> Array:
    """States before each block from the first one and those after each block."""
    return jnp.concatenate([first[None], rest[:-1]])


def _unblocked(tokens: Tokens, y: Array, log_z: Array) -> tuple[Array, Array]:
    batch, _, _, heads, _ = tokens.query.shape
    return unchunked(y, batch, heads), unchunked(log_z, batch, heads)[..., 0]
