"""Position encodings."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments
from heinsen_jax.attention.parameters import LayerNorm, LayerOptions, linear, parameter, uniform
from heinsen_jax.ops.arguments import segment_starts
from heinsen_jax.ops.linear_recurrence import RecurrenceState, log_linear_recurrence
from heinsen_jax.ops.numerics import log_add_exp
from heinsen_jax.typing import Array, Features, Float, Integer, wide

PositionState: TypeAlias = (
    Float[Array, "*B D"] | Integer[Array, "*B"] | Integer[Array, ""] | tuple[()]
)
SegmentIds: TypeAlias = Integer[Array, "*B T"]


class PositionRecurrence(nnx.Module):
    """x + h, with h a log-linear recurrence over the tokens (Heinsen, 2024).

        u | b = x W + c,   h_t = logaddexp(log sigmoid(u_t) + h_{t-1}, b_t),   h_0 = 0

    The state is the last h `[..., D]`, at least float32. Each segment begins with h_0 = 0, but the
    first one continues from the state.
    """

    def __init__(self, model_dim: int, **options: Unpack[LayerOptions]):
        self.dense = linear(model_dim, 2 * model_dim, ("embed", "mlp"), kind="embedding", **options)

    def __call__(
        self, x: Features, *, state: Float[Array, "*B D"], segment_ids: SegmentIds | None = None
    ) -> tuple[Features, Float[Array, "*B D"]]:
        logits, log_inputs = jnp.split(self.dense(x).astype(state.dtype), 2, -1)
        log_coefficients = jax.nn.log_sigmoid(logits)
        if segment_ids is not None:
            starts = segment_starts(segment_ids, None)[..., None]
            first = log_add_exp(log_coefficients, log_inputs)  # h_1, from h_0 = 0
            log_inputs = jnp.where(starts, first, log_inputs)
            log_coefficients = jnp.where(starts, -jnp.inf, log_coefficients)
        h, after = devices.recur(
            CallArguments(state=RecurrenceState.begun(state)),
            _recurrence,
            log_coefficients,
            log_inputs,
            empty=RecurrenceState.empty(state.shape, state.dtype),
            summary=RecurrenceState.of,
            tokens_axis=-2,
        )
        assert after is not None
        return x + h.astype(x.dtype), after.h

    def init_state(self, batch_shape: Sequence[int]) -> Float[Array, "*B D"]:
        return jnp.zeros((*batch_shape, self.dense.in_features), wide(self.dense.param_dtype))

    def remaining(self, state: PositionState) -> float:
        """Maximum number of further tokens: unlimited."""
        del state
        return math.inf


def _recurrence(
    log_coefficients: Features,
    log_inputs: Features,
    *,
    initial_state: RecurrenceState,
    return_state: Literal[True] = True,
    is_causal: Literal[True] = True,
    segment_ids: None = None,
) -> tuple[Features, RecurrenceState]:
    del return_state, is_causal, segment_ids
    h = log_linear_recurrence(log_coefficients, log_inputs, initial=initial_state.h)
    last = h[..., -1, :] if h.shape[-2] else initial_state.h
    return h, RecurrenceState(initial_state.log_decay + jnp.sum(log_coefficients, -2), last)


class NoPositions(nnx.Module):
    """No position encoding: x itself, without state."""

    def __call__(
        self, x: Features, *, state: tuple[()], segment_ids: SegmentIds | None = None
    ) -> tuple[Features, tuple[()]]:
        del segment_ids
        return x, state

    def init_state(self, batch_shape: Sequence[int]) -> tuple[()]:
        del batch_shape
        return ()

    def remaining(self, state: PositionState) -> float:
        """Maximum number of further tokens: unlimited."""
        del state
        return math.inf


class LearnedPositions(nnx.Module):
    """x + P_t, with a trained vector P_t for each position; norm(x + P_t), as in Fastformer's
    language model, if `has_norm`.

    The state is the number of previous tokens. Beyond max_length tokens results are NaN; outside
    `jit`, an error. With segments, positions count from the start of each.
    """

    def __init__(
        self, max_length: int, model_dim: int, *, has_norm: bool, **options: Unpack[LayerOptions]
    ):
        self.embedding = parameter(
            uniform(model_dim**-0.5),
            max_length,
            model_dim,
            logical_axes=(None, "embed"),
            kind="embedding",
            **options,
        )
        self.norm = LayerNorm(model_dim, **options) if has_norm else None

    def __call__(
        self, x: Features, *, state: Integer[Array, ""], segment_ids: SegmentIds | None = None
    ) -> tuple[Features, Integer[Array, ""]]:
        length, after = x.shape[-2], state + x.shape[-2]
        known = length if isinstance(after, Tracer) else int(after)
        if known > (max_length := self.embedding.shape[0]):
            raise ValueError(
                f"sequence length {known} exceeds max_length={max_length}, the number of positions "
                "of the model; give a shorter sequence, or train a model with a larger max_length"
            )
        embedding, index = self.embedding[...], state + jnp.arange(length)
        if segment_ids is not None:
            index = jnp.broadcast_to(index, segment_ids.shape)
            starts = jnp.where(segment_starts(segment_ids, None), index, 0)
            index = index - lax.cummax(starts, axis=starts.ndim - 1)
        positions = embedding.at[index].get(mode="fill", fill_value=jnp.nan)
        x = x + jnp.broadcast_to(positions, x.shape).astype(x.dtype)
        return (x if self.norm is None else self.norm(x)), after

    def init_state(self, batch_shape: Sequence[int]) -> Integer[Array, ""]:
        del batch_shape  # all sequences have the same length
        return jnp.zeros((), jnp.int32)

    def remaining(self, state: PositionState) -> float:
        """Maximum number of further tokens; under `jit`, of the whole sequence."""
        assert not isinstance(state, tuple)
        used = 0 if isinstance(state, Tracer) else int(jnp.max(state))
        return len(self.embedding) - used
