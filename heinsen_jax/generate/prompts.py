"""Prompts of different lengths in one batch."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array, ArrayLike, Integer

Padding = Literal["right", "left"]
PromptLengths: TypeAlias = ArrayLike | Sequence[int]


def right_padded(
    tokens: Integer[Array, "*B T"], lengths: PromptLengths, padding: Padding
) -> tuple[Integer[Array, "B T"], Integer[np.ndarray, "B"]]:
    """Move padding to the right; return the prompts `[B, T]` and their lengths `[B]`.

    Raises:
      UserError: the lengths are invalid for the prompts.
    """
    lengths, length = checked_lengths(tokens, lengths, least=1), tokens.shape[-1]
    if padding not in ("right", "left"):
        raise UserError(f"padding={padding!r} must be 'right' or 'left'")
    if padding == "left":
        columns = (np.arange(length)[None] - lengths[:, None]) % length
        tokens = jnp.take_along_axis(tokens, columns, 1)
    return tokens, lengths


def checked_lengths(
    tokens: Integer[Array | np.ndarray, "*B T"], lengths: PromptLengths, *, least: int
) -> Integer[np.ndarray, "B"]:
    """The lengths `[B]` of prompts `[B, T]`, in least .. T.

    Raises:
      UserError: the lengths are invalid for the prompts.
    """
    lengths = np.asarray(lengths)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise UserError(
            f"lengths{[*lengths.shape]} must be [B], one for each row of tokens [B, T], which are "
            f"{[*tokens.shape]}"
        )
    is_integer, length = np.issubdtype(lengths.dtype, np.integer), tokens.shape[-1]
    if not is_integer or np.any((lengths < least) | (lengths > length)):
        raise UserError(f"lengths={lengths.tolist()} must be integers in {least} .. {length}")
    return lengths


def to_array(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts in one array `[B, T]`, padded on the right, and their lengths `[B]`."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths
