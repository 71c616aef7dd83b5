"""Batches of the adapter to the lm-evaluation-harness: padded tokens, and predictions of them."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from heinsen_jax.attention.cache import bucket

SMALLEST = 16
"""Padded lengths are multiples of it, so that few shapes are compiled."""
T = TypeVar("T")


def windows(
    context: list[int], continuation: list[int], max_length: int | None
) -> list[tuple[list[int], list[int]]]:
    """The context and continuation, cut on the left so that at most `max_length` tokens are given.

    A continuation of more tokens than that is split: each part follows the tokens before it.
    """
    if max_length is None:
        return [(context, continuation)]
    tokens, parts = context + continuation, []
    for start in range(len(context), len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        parts.append((tokens[max(0, end - max_length - 1) : start], tokens[start:end]))
    return parts


def batches(number: int, items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Iterate over batches of up to `number` items."""
    return (items[start : start + number] for start in range(0, len(items), number))


def padded(rows: list[list[int]], number: int, length: int = SMALLEST) -> np.ndarray:
    """Pad to `[number, T]` with zeros, where T has few values."""
    longest = max(map(len, rows), default=0)
    tokens = np.zeros((number, max(length, bucket(longest, SMALLEST))), np.int32)
    for row, given in zip(tokens, rows, strict=False):
        row[: len(given)] = given
    return tokens


def padded_row(numbers: list[int], length: int) -> np.ndarray:
    """Pad to `length` with zeros."""
    return np.asarray([*numbers, *[0] * (length - len(numbers))], np.int32)
