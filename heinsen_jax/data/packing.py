"""Rows of packed documents: segments, and the plan that fills rows with whole documents."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heinsen_jax.data.dataset import Batch


def packed_row(segments: Sequence[np.ndarray], length: int) -> Batch:
    """A row of `length + 1` tokens: these segments, whose first tokens are not predicted, and
    padding, which is a segment of its own."""
    sizes = [len(segment) for segment in segments]
    sizes.append(length + 1 - sum(sizes))
    tokens = np.concatenate([*segments, np.zeros(sizes[-1], np.int32)])
    ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    is_token = ids[1:] < len(segments)
    return Batch(tokens, is_token & (ids[1:] == ids[:-1]), ids)


class Segment(NamedTuple):
    """Consecutive tokens of a document."""

    start: int
    size: int


class Plan:
    """Rows of whole documents, shard by shard, as `(shard, segments)`.

    A document longer than a row is cut into segments of row length. The first token of each is the
    last one of the previous segment, so that every token but the first of a document is predicted.

    Args:
      ends: for each shard, the sorted positions after the last tokens of its documents.
      length: number of tokens that a row predicts; it has one more.
    """

    def __init__(self, ends: Sequence[np.ndarray], length: int) -> None:
        self._shards: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        counts, tokens = [0], 0
        for shard_ends in ends:
            starts, sizes = _segments(shard_ends, length)
            rows = best_fit(sizes, length + 1)
            order = np.argsort(rows, kind="stable")
            bounds = np.flatnonzero(np.diff(rows[order], prepend=-1, append=len(rows)))
            self._shards.append((starts[order], sizes[order], bounds))
            counts.append(counts[-1] + len(bounds) - 1)
            tokens += int(sizes.sum())
        self._counts = np.array(counts)
        self.padding = 1 - tokens / max(len(self) * (length + 1), 1)
        """Fraction of the tokens that is padding."""

    def __len__(self) -> int:
        return int(self._counts[-1])

    def __getitem__(self, index: int) -> tuple[int, list[Segment]]:
        shard = int(np.searchsorted(self._counts, index, side="right")) - 1
        starts, sizes, bounds = self._shards[shard]
        row = index - int(self._counts[shard])
        inside = slice(bounds[row], bounds[row + 1])
        return shard, [*map(Segment, starts[inside].tolist(), sizes[inside].tolist())]


def _segments(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and sizes of the segments of documents, of 2 to `length + 1` tokens; a document of a
    single token, in which nothing is predicted, has none."""
    begins = np.concatenate([[0], ends[:-1]])
    counts = -(-(ends - begins - 1) // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + length * number
    return starts, np.minimum(np.repeat(ends, counts) - starts, length + 1)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each item, by best-fit decreasing: items in order of decreasing size, each into
    the fullest row with enough space, or into a new row.

    Args:
      sizes: `[items]`, integers from 1 to `capacity`.
      capacity: size of a row.
    """
    order = np.argsort(-sizes, kind="stable")
    rows, count = np.empty(len(sizes), np.int64), 0
    spaces: list[int] = []  # in rows that are not full: distinct, increasing
    rows_by_space: defaultdict[int, list[int]] = defaultdict(list)
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect_left(spaces, size)
        if place == len(spaces):
            space, row, count = capacity, count, count + 1
        else:
            space = spaces[place]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[place]
        rows[item] = row
        if left := space - size:
            if not rows_by_space[left]:
                insort(spaces, left)
            rows_by_space[left].append(row)
    return rows
