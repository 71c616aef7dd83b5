"""Recurrent memory (RMT): a layer applied segment by segment, with memory vectors in between.

References:
  Bulatov, Kuratov and Burtsev, 2022, Recurrent Memory Transformer, arXiv:2207.06881.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import check_array, is_integer
from heinsen_jax.ops.devices import in_mesh_of_arguments, split_like
from heinsen_jax.ops.layout import astype_like, varying_like
from heinsen_jax.typing import Array, Features, Float, Integer, common_dtype, pytree_dataclass

Layer = Callable[[Array], Array]


@pytree_dataclass
class SegmentState:
    """Streaming state of a recurrence over segments, of constant size.

    Attributes:
      memory: `[*B, M, D]`, after the last complete segment.
      tokens: `[*B, segment_length, D]`, the inputs of the incomplete segment, then zeros.
      count: number of these inputs, an integer below segment_length.
    """

    memory: Float[Array, "*B M D"]
    tokens: Float[Array, "*B L D"]
    count: Integer[Array, "*_"]

    @classmethod
    def start(cls, memory: Array, segment_length: int) -> SegmentState:
        """Return the state before the first token, with a copy of the initial memory `[*B, M, D]`,
        which may be a parameter, while the state may be donated."""
        tokens = jnp.zeros((*memory.shape[:-2], segment_length, memory.shape[-1]), memory.dtype)
        return cls(jnp.copy(memory), tokens, jnp.zeros((), jnp.int32))

    def close(self, layer: Layer) -> SegmentState:
        """End the segment here: its memory is written after the tokens so far.

        Without tokens since the last segment, the state is unchanged.
        """
        size, length = self.memory.shape[-2], self.tokens.shape[-2]
        sequence = jnp.concatenate([self.memory, self.tokens, self.memory], -2)
        place, end = jnp.arange(size + length + size), size + self.count
        # Padding repeats an actual input: the layer may not be finite at zeros.
        rest = jnp.where(place < end + size, place + length - self.count, 0)
        y = _apply(layer, jnp.take(sequence, jnp.where(place < end, place, rest), -2, mode="clip"))
        written = lax.dynamic_slice_in_dim(y, end, size, -2)
        memory = jnp.where(self.count > 0, written, self.memory)
        return SegmentState(memory, jnp.zeros_like(self.tokens), jnp.zeros_like(self.count))


@overload
def segment_recurrence(
    layer: Layer,
    x: Features,
    memory: Float[Array, "*B M D"] | Float[Array, "M D"] | None = None,
    *,
    segment_length: int,
    initial_state: SegmentState | None = None,
    return_state: Literal[False] = False,
) -> Features: ...


@overload
def segment_recurrence(
    layer: Layer,
    x: Features,
    memory: Float[Array, "*B M D"] | Float[Array, "M D"] | None = None,
    *,
    segment_length: int,
    initial_state: SegmentState | None = None,
    return_state: Literal[True],
) -> tuple[Features, SegmentState]: ...


@in_mesh_of_arguments
def segment_recurrence(
    layer: Layer,
    x: Features,
    memory: Float[Array, "*B M D"] | Float[Array, "M D"] | None = None,
    *,
    segment_length: int,
    initial_state: SegmentState | None = None,
    return_state: bool = False,
) -> Features | tuple[Features, SegmentState]:
    r"""Apply a causal layer to the segments of a sequence, with memory carried between them.

        [_, Y_s, m_{s+1}] = layer([m_s, X_s, m_s]),    s = 0, 1, ...

    for segments X_s of `segment_length` tokens. The memory is placed on both sides: every token can
    attend to the copy before it, and the next memory is written to the copy at the end, which
    attends to the whole segment. To use a stack of layers, pass the stack: RMT reads the memory
    from the last layer.

    Tokens may be streamed in chunks of any length, down to one token: with `return_state`, then
    `initial_state`, the results are the same as in one call. Each call applies the layer again to
    the whole segment that it continues, so a single token costs as much as a segment. Gradients
    flow through every memory and through the state; the layer is rematerialized, so that memory
    holds one segment plus the inputs. Apply `stop_gradient` to a state to truncate.

    Args:
      layer: maps `[*B, L, D]` to the same shape, for L = M + segment_length + M. Must be causal and
        a pure function; its positions, if any, restart with each segment.
      x: `[*B, T, D]`. The last segment may be shorter.
      memory: initial memory `[*B, M, D]`, or `[M, D]` shared by all.
      segment_length: tokens in a segment.
      initial_state: state returned by an earlier call, instead of `memory`.
      return_state: whether to also return the state after the T tokens.

    Returns:
      Y `[*B, T, D]`, or the pair (Y, `SegmentState`). The state has the memory after the last
      complete segment; see `SegmentState.close` for the memory after all tokens.

    Raises:
      ValueError: shapes or dtypes do not fit, or not exactly one of `memory` and `initial_state` is
        given; the message says which.

    Examples:
      >>> def layer(x):  # causal
      ...     return jnp.cumsum(x, -2)
      >>> y = segment_recurrence(layer, jnp.ones((4, 1)), jnp.zeros((1, 1)), segment_length=2)
      >>> y.ravel().tolist()
      [1.0, 2.0, 3.0, 4.0]
    """
    state = _state(x, memory, segment_length, initial_state)
    dtype = common_dtype(x, state.memory)
    given = _cast(state, dtype) if initial_state is None else initial_state
    x, state = x.astype(dtype), _cast(state, dtype)
    length = x.shape[-2]
    if length == 0:
        return (x, given) if return_state else x

    # If the count is static, so are the boundaries of segments. Otherwise one more segment may be
    # needed, and the last one may be empty. Padding repeats the last token.
    if initial_state is None:
        count, num_segments, may_be_empty = 0, -(-length // segment_length), False
        padding = jnp.repeat(x[..., -1:, :], num_segments * segment_length - length, -2)
        stream = jnp.concatenate([x, padding], -2)
    else:
        count, num_segments = state.count, -(-(length + segment_length - 1) // segment_length)
        may_be_empty = length <= (num_segments - 1) * segment_length
        place = jnp.arange(num_segments * segment_length, dtype=jnp.int32)
        place = jnp.where(place < count, place, place - count + segment_length)
        stream = jnp.take(jnp.concatenate([state.tokens, x], -2), place, -2, mode="clip")

    run = jax.checkpoint(partial(_segment, layer), prevent_cse=False)

    def step(memory: Array, segment: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens, left = segment
        if may_be_empty:
            y, written = lax.cond(
                left > 0, run, lambda memory, tokens: (tokens, memory), memory, tokens
            )
        else:
            y, written = run(memory, tokens)
        return jnp.where(left >= segment_length, written, memory), y

    *batch, _, width = x.shape
    segments = stream.reshape(*batch, num_segments, segment_length, width)
    left = count + length - segment_length * jnp.arange(num_segments, dtype=jnp.int32)
    memory, y = lax.scan(step, varying_like(state.memory, x), (jnp.moveaxis(segments, -3, 0), left))
    y = jnp.moveaxis(y, 0, -3).reshape(stream.shape)
    y = lax.dynamic_slice_in_dim(y, count, length, -2)
    if not return_state:
        return y
    after = _after(stream, memory, jnp.asarray(count + length, jnp.int32), segment_length)
    return y, astype_like(after, given)


def _segment(layer: Layer, memory: Array, tokens: Array) -> tuple[Array, Array]:
    """Return the outputs of a segment, and the memory that it writes."""
    y = _apply(layer, jnp.concatenate([memory, tokens, memory], -2))
    size = memory.shape[-2]
    end = size + tokens.shape[-2]
    return y[..., size:end, :], y[..., end:, :]


def _apply(layer: Layer, x: Array) -> Array:
    y = layer(x)
    check_array("the result of layer", y, (x.shape,), jnp.floating)
    return y.astype(x.dtype)


def _after(stream: Array, memory: Array, end: Array, segment_length: int) -> SegmentState:
    """Return the state after the first `end` tokens of a stream of segments."""
    count = end % segment_length
    tokens = lax.dynamic_slice_in_dim(stream, end - count, segment_length, -2)
    index = jnp.arange(segment_length, dtype=jnp.int32)
    valid = index.reshape([1] * (tokens.ndim - 2) + [-1, 1]) < count
    return SegmentState(memory, jnp.where(valid, tokens, 0), count)


def _cast(state: SegmentState, dtype: Any) -> SegmentState:
    return SegmentState(state.memory.astype(dtype), state.tokens.astype(dtype), state.count)


def _state(
    x: Array, memory: Array | None, segment_length: int, initial_state: SegmentState | None
) -> SegmentState:
    """Check the arguments and return the initial state."""
    length = segment_length
    if not is_integer(length) or length < 1:
        raise ValueError(f"segment_length must be an integer >= 1, got {length!r}")
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be [..., tokens, features] and floating point, got {x.shape} {x.dtype}"
        )
    if (memory is None) == (initial_state is None):
        raise ValueError("memory, initial_state: exactly one is required; begin with memory")
    *batch, _, width = x.shape
    if initial_state is not None:
        size = initial_state.memory.shape[-2]
        memories = ((*batch, size, width),)
        check_array("initial_state.memory", initial_state.memory, memories, jnp.floating)
        buffers = ((*batch, length, width),)
        check_array("initial_state.tokens", initial_state.tokens, buffers, jnp.floating)
        check_array("initial_state.count", initial_state.count, ((),), jnp.integer)
        return initial_state
    assert memory is not None
    if memory.ndim < 2:
        raise ValueError(f"memory must be [..., vectors, features], got shape {memory.shape}")
    shape = (*batch, memory.shape[-2], width)
    check_array("memory", memory, (shape, shape[-2:]), jnp.floating)
    memory = jnp.broadcast_to(
        memory.reshape((1,) * (len(shape) - memory.ndim) + memory.shape), shape
    )
    return SegmentState.start(split_like(memory, x, len(batch)), length)
