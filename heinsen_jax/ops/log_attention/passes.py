"""What is not one causal pass, made of causal passes and reads of a state.

A pass returns log Z with its output, so that passes over disjoint sets of tokens merge exactly:

    Z = Z_1 + Z_2,    Y = (Z_1 / Z) Y_1 + (Z_2 / Z) Y_2
"""

from dataclasses import replace
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.linear_recurrence import decay_to_end
from heinsen_jax.ops.log_attention import state as log_states
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.ops.numerics import log_add_exp, log_difference, share
from heinsen_jax.typing import Array


class Implementation(Protocol):
    """Where `state` is a `MeanState`, values and outputs are in linear space, else in log space."""

    def causal(self, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
        """Output `[B, T, G, R, V]`, log Z `[B, T, G, R]` and the state after all tokens."""
        ...

    def bidirectional(self, tokens: Tokens, state: Any) -> tuple[Array, Any]:
        """Output and the state after all tokens, all of which every query sees. Without decay and
        starts."""
        ...


def attend(
    implementation: Implementation,
    tokens: Tokens,
    state: Any,
    *,
    is_causal: bool,
    window: int | None,
) -> tuple[Array, Any]:
    """Output and the state after all tokens; with a window that is no state to go on from."""
    if window is not None and window < tokens.length:
        return _windowed(implementation, tokens, state, window), state
    if is_causal:
        y, _, state = implementation.causal(tokens, state)
        return y, state
    if tokens.starts is not None:
        return _whole_documents(implementation, tokens, state)
    if tokens.log_decay is not None:
        tokens, state = _decayed_to_the_end(tokens, state)
    return implementation.bidirectional(tokens, state)


def read_all(tokens: Tokens, state: Any) -> tuple[Array, Any]:
    """`Implementation.bidirectional`: absorbs all tokens, then reads the state, eq. (3)."""
    key, value = (jnp.moveaxis(x, 1, 2) for x in (tokens.key, tokens.value))
    batch, length, groups, heads, depth = tokens.query.shape
    rows = jnp.moveaxis(tokens.query, 1, 3).reshape(batch, groups, heads * length, depth)
    if isinstance(state, MeanState):
        state = state.merge(MeanState.of(key, value))
        y = state.attend(rows)
    else:
        state = log_states.absorb(state, key, value)
        y = log_states.attend(state, rows)
    return jnp.moveaxis(y.reshape(batch, groups, heads, length, value.shape[-1]), 3, 1), state


def _whole_documents(
    implementation: Implementation, tokens: Tokens, state: Any
) -> tuple[Array, Any]:
    """Every query sees its document: the tokens up to it, and those after it."""
    assert tokens.starts is not None
    y, log_z, after = implementation.causal(tokens, state)
    # Read backwards, the state at the next token is what a query sees after itself.
    backwards = _reversed(replace(tokens, query=_moved(tokens.query, 1)))
    later = implementation.causal(backwards, _nothing(state))[:2]
    later = tuple(_moved(x[:, ::-1], -1) for x in later)
    goes_on = jnp.logical_not(_ends(tokens.starts))
    return _merge((y, log_z), _only(goes_on, later, state), state), after


def _windowed(implementation: Implementation, tokens: Tokens, state: Any, window: int) -> Array:
    """Causal, over the last `window` tokens: cut documents into blocks of that many; a query sees
    its block up to itself, and the end of the block before, read backwards."""
    position = _positions(tokens)
    starts = position % window == 0
    tokens = replace(tokens, starts=starts)
    recent = implementation.causal(tokens, _nothing(state))[:2]

    # A query t reads the end of the block before from its first token in sight, t - window + 1.
    before = tokens
    if tokens.log_decay is not None:
        so_far = _running_sum(tokens.log_decay, starts)
        before = Tokens(
            query=tokens.query + so_far[:, :, :, None],
            key=tokens.key + _decay_to_the_end(tokens.log_decay, starts),
            value=tokens.value,
            starts=starts,
        )
    before = _reversed(replace(before, query=_moved(before.query, 1 - window)))
    earlier = implementation.causal(before, _nothing(state))[:2]
    earlier = tuple(_moved(x[:, ::-1], window - 1) for x in earlier)
    reaches_back = (position >= window) & (position % window != window - 1)
    return _merge(recent, _only(reaches_back, earlier, state), state)


def _decayed_to_the_end(tokens: Tokens, state: Any) -> tuple[Tokens, Any]:
    """The same without decay: keys and state as the last token finds them."""
    assert tokens.log_decay is not None
    key = tokens.key + decay_to_end(tokens.log_decay, 1)
    state = log_states.decayed(state, jnp.sum(tokens.log_decay, 1))
    return replace(tokens, key=key, log_decay=None), state


Reading = tuple[Array, ...]  # output, log Z


def _merge(a: Reading, b: Reading, state: Any) -> Array:
    (y_a, log_z_a), (y_b, log_z_b) = ((y, log_z[..., None]) for y, log_z in (a, b))
    log_z = log_add_exp(log_z_a, log_z_b)
    if isinstance(state, MeanState):
        return share(log_z_a, log_z) * y_a + share(log_z_b, log_z) * y_b
    return log_difference(log_add_exp(y_a + log_z_a, y_b + log_z_b), log_z)


def _only(where: Array, reading: Reading, state: Any) -> Reading:
    """`reading` by queries `where` `[B, T]`, and nothing by the others."""
    y, log_z = reading
    nothing = 0.0 if isinstance(state, MeanState) else -jnp.inf
    where = where[:, :, None, None]
    return jnp.where(where[..., None], y, nothing), jnp.where(where, log_z, -jnp.inf)


def _nothing(state: Any) -> Any:
    """The state of no tokens, like `state`."""
    log_z = jnp.full_like(state.log_z, -jnp.inf)
    if isinstance(state, MeanState):
        return MeanState(log_z, jnp.zeros_like(state.mean))
    return LogAttentionState(jnp.full_like(state.log_s, -jnp.inf), log_z)


def _reversed(tokens: Tokens) -> Tokens:
    """In reversed order, documents beginning at what was their end. Without decay."""
    assert tokens.starts is not None
    return Tokens(
        tokens.query[:, ::-1],
        tokens.key[:, ::-1],
        tokens.value[:, ::-1],
        starts=_ends(tokens.starts)[:, ::-1],
    )


def _positions(tokens: Tokens) -> Array:
    """Of tokens in their documents, `[B, T]`."""
    position = jnp.broadcast_to(jnp.arange(tokens.length)[None], tokens.key.shape[:2])
    if tokens.starts is None:
        return position
    return position - lax.cummax(jnp.where(tokens.starts, position, 0), axis=1)


def _ends(starts: Array) -> Array:
    """Whether a token is the last of its document."""
    return jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], 1)


def _moved(x: Array, by: int) -> Array:
    """x with token t at t + `by`; 0 where none comes from."""
    length = x.shape[1]
    widths = [(0, 0), (max(by, 0), max(-by, 0)), *[(0, 0)] * (x.ndim - 2)]
    return lax.slice_in_dim(jnp.pad(x, widths), max(-by, 0), max(-by, 0) + length, axis=1)


def _running_sum(x: Array, starts: Array) -> Array:
    """Of x `[B, T, G, F]` over tokens, beginning anew at `starts`; a sum may be -inf."""

    def compose(earlier, later):
        (start_1, sum_1), (start_2, sum_2) = earlier, later
        return start_1 | start_2, jnp.where(start_2, sum_2, sum_1 + sum_2)

    return lax.associative_scan(compose, (starts[..., None, None], x), axis=1)[1]


def _decay_to_the_end(log_decay: Array, starts: Array) -> Array:
    """`decay_to_end` within documents."""
    ends = _ends(starts)
    of_next = jnp.where(ends[..., None, None], 0.0, _moved(log_decay, -1))
    return _running_sum(of_next[:, ::-1], ends[:, ::-1])[:, ::-1]
