"""Prompts of different lengths in one batch, each processed as if it were alone."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.errors import UserError
from heinsen_jax.generate.states import Read, where_rows
from heinsen_jax.models import LanguageModelState
from heinsen_jax.typing import Array, ArrayLike, Bool, Float, Integer

CHUNK = 32  # tokens that are processed in one call

Padding = Literal["right", "left"]
PromptLengths: TypeAlias = ArrayLike | Sequence[int]
Carry: TypeAlias = tuple[Float[Array, "B 1 D"], LanguageModelState]


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
    tokens: Integer[Array, "B T"],
    lengths: Integer[Array, "B"],
    state: LanguageModelState,
) -> tuple[Float[Array, "B 1 D"], LanguageModelState]:
    """Features `[B, 1, D]` of the last token of each row, and the states after it.

    All rows are processed together, CHUNK tokens at a time and then one by one; the states of rows
    that have ended do not change.
    """
    length = tokens.shape[1]

    def step(carry: Carry, here: Integer[Array, "B T"], is_read: Bool[Array, "B"]) -> Carry:
        features, state = carry
        new, after = advance(here, state)
        features = jnp.where(is_read[:, None, None], new[:, -1:], features)
        return features, where_rows(is_read, after, state)

    def chunk(carry: Carry, index: Integer[Array, ""]) -> tuple[Carry, None]:
        here = lax.dynamic_slice_in_dim(tokens, index * CHUNK, CHUNK, 1)
        return step(carry, here, (index + 1) * CHUNK <= lengths), None

    def one(carry: Carry, index: Integer[Array, ""]) -> tuple[Carry, None]:
        place = lengths // CHUNK * CHUNK + index
        here = jnp.take_along_axis(tokens, place[:, None], 1, mode="clip")
        return step(carry, here, place < lengths), None

    features, _ = jax.eval_shape(advance, tokens[:, :1], state)
    carry = jnp.zeros(features.shape, features.dtype), state
    if length >= CHUNK:
        carry, _ = lax.scan(chunk, carry, jnp.arange(length // CHUNK))
    carry, _ = lax.scan(one, carry, jnp.arange(min(CHUNK, length)))
    return carry
