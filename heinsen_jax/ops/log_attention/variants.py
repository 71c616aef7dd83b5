"""Windows and bidirectional attention, composed of causal passes and queries of a state.

Each pass returns log Z with its output, so that passes over disjoint sets of tokens merge exactly:

    Z = Z_1 + Z_2,    Y = (Z_1 / Z) Y_1 + (Z_2 / Z) Y_2
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import positions_in_segments
from heinsen_jax.ops.linear_recurrence import decay_to_end
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.state import decayed_averages
from heinsen_jax.ops.numerics import log_add_exp, softmax_pair
from heinsen_jax.typing import Array, Bool, Float


@runtime_checkable
class AttentionPasses(Protocol):
    """Computation of the passes. If `is_log`, values, outputs and averages of the state are
    logarithms."""

    def causal(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"], Averages]:
        """Return output, log Z and the state after all tokens."""
        ...

    def bidirectional(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Averages]:
        """Return output and the state after all tokens; every query attends to all of them. Without
        decay and segments."""
        ...


def bidirectional(
    implementation: AttentionPasses, inputs: Inputs, state: Averages, *, is_log: bool
) -> tuple[Float[Array, "B T G R V"], Averages]:
    """Return output and the state after all tokens; every query attends to its whole segment,
    decayed up to the last token."""
    if inputs.starts is not None:
        return _whole_segments(implementation, inputs, state, is_log)
    if inputs.log_decay is not None:
        key = inputs.key + decay_to_end(inputs.log_decay, 1)
        state = decayed_averages(state, jnp.sum(inputs.log_decay, 1), is_log=is_log)
        inputs = replace(inputs, key=key, log_decay=None)
    return implementation.bidirectional(inputs, state, is_log=is_log)


def windowed(
    implementation: AttentionPasses, inputs: Inputs, state: Averages, window: int, *, is_log: bool
) -> Float[Array, "B T G R V"]:
    """Attend causally to the last `window` tokens; `state` only gives the shape of a state.

    Segments are split into blocks of `window` tokens. A query attends to its own block up to
    itself, and to the end of the preceding block, in reversed order.
    """
    position = positions_in_segments(inputs.starts, inputs.key.shape[:2])
    starts = position % window == 0
    inputs, empty = replace(inputs, starts=starts), _empty(state, is_log)
    recent = implementation.causal(inputs, empty, is_log=is_log)[:2]

    # Query t attends to the end of the preceding block, from its first visible token on. This is
    # token t - window + 1.
    before = inputs
    if inputs.log_decay is not None:
        so_far = _running_sum(inputs.log_decay, starts)
        before = Inputs(
            query=inputs.query + so_far[:, :, :, None],
            key=inputs.key + _decay_to_segment_end(inputs.log_decay, starts),
            value=inputs.value,
            starts=starts,
        )
    before = _reversed(replace(before, query=_shift(before.query, 1 - window)))
    y, log_z, _ = implementation.causal(before, empty, is_log=is_log)
    earlier = _shift(y[:, ::-1], window - 1), _shift(log_z[:, ::-1], window - 1)
    reaches_back = (position >= window) & (position % window != window - 1)
    return _merge(recent, _only(reaches_back, earlier, is_log), is_log)


def _whole_segments(
    implementation: AttentionPasses, inputs: Inputs, state: Averages, is_log: bool
) -> tuple[Array, Averages]:
    """Attend to the tokens of the segment up to the query, then to those after it."""
    assert inputs.starts is not None
    y, log_z, after = implementation.causal(inputs, state, is_log=is_log)
    # In reversed order, the state at the next token holds all that follows a query.
    reverse = _reversed(replace(inputs, query=_shift(inputs.query, 1)))
    y_later, log_z_later, _ = implementation.causal(reverse, _empty(state, is_log), is_log=is_log)
    later = _shift(y_later[:, ::-1], -1), _shift(log_z_later[:, ::-1], -1)
    continues = jnp.logical_not(_ends(inputs.starts))
    return _merge((y, log_z), _only(continues, later, is_log), is_log), after


Reading = tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"]]  # output, log Z


def _merge(a: Reading, b: Reading, is_log: bool) -> Float[Array, "B T G R V"]:
    (y_a, log_z_a), (y_b, log_z_b) = ((y, log_z[..., None]) for y, log_z in (a, b))
    both = softmax_pair(log_z_a, log_z_b)
    if is_log:
        a_weight, b_weight = both.log_weights
        return log_add_exp(a_weight + y_a, b_weight + y_b)
    a_weight, b_weight = both.weights
    return a_weight * y_a + b_weight * y_b


def _only(where: Bool[Array, "B T"], reading: Reading, is_log: bool) -> Reading:
    """Select the results of the queries `where`, and those for no tokens elsewhere."""
    y, log_z = reading
    where = where[:, :, None, None]
    nothing = -jnp.inf if is_log else 0.0
    return jnp.where(where[..., None], y, nothing), jnp.where(where, log_z, -jnp.inf)


def _empty(state: Averages, is_log: bool) -> Averages:
    """Return the state of no tokens, of the shape of `state`."""
    nothing = -jnp.inf if is_log else 0.0
    return Averages(jnp.full_like(state.log_z, -jnp.inf), jnp.full_like(state.mean, nothing))


def _reversed(inputs: Inputs) -> Inputs:
    """Reverse the tokens; segments begin at their last token. Without decay."""
    assert inputs.starts is not None
    return Inputs(
        inputs.query[:, ::-1],
        inputs.key[:, ::-1],
        inputs.value[:, ::-1],
        starts=_ends(inputs.starts)[:, ::-1],
    )


def _ends(starts: Array) -> Array:
    """Return whether each token is the last of its segment."""
    return jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], 1)


def _shift(x: Array, by: int) -> Array:
    """Move token t of x to t + `by`; zeros elsewhere."""
    length = x.shape[1]
    widths = [(0, 0), (max(by, 0), max(-by, 0)), *[(0, 0)] * (x.ndim - 2)]
    return lax.slice_in_dim(jnp.pad(x, widths), max(-by, 0), max(-by, 0) + length, axis=1)


def _running_sum(x: Array, starts: Array) -> Array:
    """Sum x `[B, T, G, F]` over tokens, restarting at `starts`; sums may be -inf."""

    def compose(earlier, later):
        (start_1, sum_1), (start_2, sum_2) = earlier, later
        return start_1 | start_2, jnp.where(start_2, sum_2, sum_1 + sum_2)

    return lax.associative_scan(compose, (starts[..., None, None], x), axis=1)[1]


def _decay_to_segment_end(log_decay: Array, starts: Array) -> Array:
    """`decay_to_end` within segments."""
    ends = _ends(starts)
    next_decay = jnp.where(ends[..., None, None], 0.0, _shift(log_decay, -1))
    return _running_sum(next_decay[:, ::-1], ends[:, ::-1])[:, ::-1]
