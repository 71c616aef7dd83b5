"""Which keys a query sees, as a rule on positions: rules compose with `&` and `|`.

A rule is called with positions, NumPy's or JAX's, that broadcast against one another, and answers
with booleans; True is seen. It is hashable, so that a function can be compiled for it, and what
`tiled` needs to know of it, which tiles hold anything seen, is worked out when a call is traced.
"""

from dataclasses import dataclass
from typing import Any


class Mask:
    """A rule on positions."""

    def __call__(self, query: Any, key: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        return _Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Either(self, other)


@dataclass(frozen=True)
class Everything(Mask):
    """All keys."""

    def __call__(self, query: Any, key: Any) -> Any:
        return (query >= 0) & (key >= 0)


@dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the query's own position."""

    def __call__(self, query: Any, key: Any) -> Any:
        return key <= query


@dataclass(frozen=True)
class Window(Mask):
    """Keys from `before` positions before the query to `after` positions after it."""

    before: int
    after: int = 0

    def __call__(self, query: Any, key: Any) -> Any:
        return (query - key <= self.before) & (key - query <= self.after)


@dataclass(frozen=True)
class Strided(Mask):
    """Keys that lie a multiple of `stride` positions from the query."""

    stride: int

    def __call__(self, query: Any, key: Any) -> Any:
        return (query - key) % self.stride == 0


@dataclass(frozen=True)
class SameBlock(Mask):
    """Keys of the query's own block of `size` positions."""

    size: int

    def __call__(self, query: Any, key: Any) -> Any:
        return query // self.size == key // self.size


@dataclass(frozen=True)
class BlockEnds(Mask):
    """The last `count` keys of every block of `size` positions."""

    size: int
    count: int = 1

    def __call__(self, query: Any, key: Any) -> Any:
        return (key % self.size >= self.size - self.count) & (query >= 0)


@dataclass(frozen=True)
class Global(Mask):
    """Some positions see all, and are seen by all; `seen_only`: they are seen by all.

    Attributes:
      runs: where they are, as pairs of a first position and one past the last.
    """

    runs: tuple[tuple[int, int], ...]
    seen_only: bool = False

    def __call__(self, query: Any, key: Any) -> Any:
        seen = self._among(key) & (query >= 0)
        return seen if self.seen_only else seen | self._among(query) & (key >= 0)

    def _among(self, position: Any) -> Any:
        found = position < 0
        for start, stop in self.runs:
            found = found | ((position >= start) & (position < stop))
        return found


@dataclass(frozen=True)
class _Both(Mask):
    first: Mask
    second: Mask

    def __call__(self, query: Any, key: Any) -> Any:
        return self.first(query, key) & self.second(query, key)


@dataclass(frozen=True)
class _Either(Mask):
    first: Mask
    second: Mask

    def __call__(self, query: Any, key: Any) -> Any:
        return self.first(query, key) | self.second(query, key)


def reach(local_window_size: int | tuple[int, int], is_causal: bool) -> tuple[int, int]:
    """How many tokens a query sees before itself, and after."""
    size = local_window_size
    if isinstance(size, tuple):
        if min(size) < 0:
            raise ValueError(f"local_window_size must not be negative, is {size}")
        return size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"local_window_size must be an integer >= 1 or a pair, is {size!r}")
    return size - 1, 0 if is_causal else size - 1
