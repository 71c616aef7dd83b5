"""Prompts of different lengths in one batch, each processed as if it were alone."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.attention.cache import bucket
from heinsen_jax.errors import UserError
from heinsen_jax.generate.states import Read, loop_with_state, where_rows
from heinsen_jax.models import LanguageModelState
from heinsen_jax.typing import Array, ArrayLike, Float, Integer

CHUNKS = (512, 32, 1)
"""Numbers of tokens that are processed in one call: as often as they fit, the largest first."""

Padding = Literal["right", "left"]
PromptLengths: TypeAlias = ArrayLike | Sequence[int]
Carry: TypeAlias = tuple[Float[Array, "*B 1 D"], LanguageModelState]


def padded(
    tokens: Integer[Array, "*B T"],
    lengths: Integer[Array, "B"] | None = None,
    *,
    max_length: int | None,
) -> tuple[Integer[Array, "*B T2"], Integer[Array, "*#B"]]:
    """Pad prompts to one of few lengths, at most the model's `max_length`; also return their
    lengths, a scalar if all are equal.

    Single tokens stay as they are.
    """
    length = tokens.shape[-1]
    if length > 1:
        padding = [(0, 0)] * (tokens.ndim - 1) + [(0, bucket(length) - length)]
        tokens = jnp.pad(tokens, padding)[..., :max_length]  # a chunk must not exceed it
    return tokens, jnp.asarray(length, jnp.int32) if lengths is None else lengths


def right_padded(
    tokens: Integer[Array, "*B T"], lengths: PromptLengths, padding: Padding
) -> tuple[Integer[Array, "B T"], Integer[Array, "B"]]:
    """Move padding to the right; return the prompts `[B, T]` and their lengths `[B]`.

    Raises:
      UserError: the lengths are invalid for the prompts.
    """
    lengths = np.asarray(lengths)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise UserError(
            f"lengths{[*lengths.shape]} must be [B], one for each row of tokens [B, T], which are "
            f"{[*tokens.shape]}"
        )
    length = tokens.shape[-1]
    if not np.issubdtype(lengths.dtype, np.integer) or np.any((lengths < 1) | (lengths > length)):
        raise UserError(f"lengths={lengths.tolist()} must be integers in 1 .. {length}")
    if padding not in ("right", "left"):
        raise UserError(f"padding={padding!r} must be 'right' or 'left'")
    lengths = jnp.asarray(lengths, jnp.int32)
    if padding == "left":
        place = (jnp.arange(length)[None] - lengths[:, None]) % length
        tokens = jnp.take_along_axis(tokens, place, 1)
    return tokens, lengths


def read(
    advance: Read,
    tokens: Integer[Array, "*B T"],
    lengths: Integer[Array, "*#B"],
    state: LanguageModelState,
) -> Carry:
    """Features `[*B, 1, D]` of the last token of each row, and the states after it.

    Args:
      advance: maps tokens `[*B, n]` and a state to features and the state after them.
      tokens: the prompts, padded on the right.
      lengths: length of all prompts, or one `[B]` for each; then the states of rows that have ended
        do not change.
      state: state before the prompts.

    The number of calls depends on the lengths, not on the padding, so that prompts of any lengths
    up to T share one compiled function.
    """
    if tokens.shape[-1] == 1 and not lengths.ndim:
        return advance(tokens, state)
    features, _ = jax.eval_shape(advance, tokens[..., :1], state)
    last = jnp.zeros(features.shape, features.dtype)
    done = jnp.zeros_like(lengths)
    for size in (size for size in CHUNKS if size <= tokens.shape[-1]):
        step = partial(_read_chunk, advance, tokens, lengths, done, size)
        count = jnp.max((lengths - done) // size)
        state, last = loop_with_state(count, step, state, last, length=size)
        done = lengths // size * size
    return last, state


def _read_chunk(
    advance: Read,
    tokens: Integer[Array, "*B T"],
    lengths: Integer[Array, "*#B"],
    done: Integer[Array, "*#B"],
    size: int,
    index: Integer[Array, ""],
    state: LanguageModelState,
    last: Float[Array, "*B 1 D"],
) -> tuple[LanguageModelState, Float[Array, "*B 1 D"]]:
    """Process the chunk `index` of `size` tokens after those that are done."""
    first = done + index * size
    if not lengths.ndim:
        new, state = advance(lax.dynamic_slice_in_dim(tokens, first, size, -1), state)
        return state, new[..., -1:, :]
    places = first[:, None] + jnp.arange(size)[None]
    new, after = advance(jnp.take_along_axis(tokens, places, 1, mode="clip"), state)
    is_read = first + size <= lengths
    features = jnp.where(is_read[:, None, None], new[:, -1:], last)
    return where_rows(is_read, after, state), features
