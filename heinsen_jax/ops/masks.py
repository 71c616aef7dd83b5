"""Attention masks as rules on positions, which compose with `&` and `|`.

A rule is called with query and key positions, NumPy or JAX arrays that broadcast against each
other, and returns booleans, True where the key is visible. Rules are hashable, so that functions
can be compiled for them; `tiled` derives the tiles with visible keys from the rule.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from heinsen_jax.ops.arguments import is_integer

Span: TypeAlias = tuple[float, float]


class Mask:
    """Attention mask as a rule on positions."""

    @property
    def is_exact(self) -> bool:
        """Whether each key of `spans` is visible to one of the queries."""
        return False

    def __call__(self, query: Any, key: Any) -> Any:
        raise NotImplementedError

    def spans(self, first: int, last: int) -> list[Span]:
        """Ranges of positions, both ends included, with all keys that are visible to the queries
        from `first` to `last`."""
        del first, last
        return [(-math.inf, math.inf)]

    def __and__(self, other: "Mask") -> "Mask":
        return _Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Either(self, other)


class _Exact(Mask):
    """A mask of which each key of `spans` is visible to one of the queries."""

    @property
    def is_exact(self) -> bool:
        return True


@dataclass(frozen=True)
class Everything(_Exact):
    """All keys are visible."""

    def __call__(self, query: Any, key: Any) -> Any:
        return (query >= 0) & (key >= 0)


@dataclass(frozen=True)
class Causal(_Exact):
    """Keys up to the position of the query are visible."""

    def spans(self, first: int, last: int) -> list[Span]:
        return [(-math.inf, last)]

    def __call__(self, query: Any, key: Any) -> Any:
        return key <= query


@dataclass(frozen=True)
class Window(_Exact):
    """Keys from `before` positions before the query to `after` positions after it are visible."""

    before: int
    after: int = 0

    def spans(self, first: int, last: int) -> list[Span]:
        return [(first - self.before, last + self.after)]

    def __call__(self, query: Any, key: Any) -> Any:
        return (query - key <= self.before) & (key - query <= self.after)


@dataclass(frozen=True)
class Strided(Mask):
    """Keys at a distance that is a multiple of `stride` are visible."""

    stride: int

    def __call__(self, query: Any, key: Any) -> Any:
        return (query - key) % self.stride == 0


@dataclass(frozen=True)
class SameBlock(_Exact):
    """Keys in the same block of `size` positions are visible."""

    size: int

    def spans(self, first: int, last: int) -> list[Span]:
        return [(first // self.size * self.size, (last // self.size + 1) * self.size - 1)]

    def __call__(self, query: Any, key: Any) -> Any:
        return query // self.size == key // self.size


@dataclass(frozen=True)
class BlockEnds(Mask):
    """The last `count` keys of every block of `size` positions are visible."""

    size: int
    count: int = 1

    def __call__(self, query: Any, key: Any) -> Any:
        return (key % self.size >= self.size - self.count) & (query >= 0)


@dataclass(frozen=True)
class Global(_Exact):
    """Global tokens attend to all tokens and are visible to all.

    Attributes:
      runs: ranges of the global positions, as pairs (first, one past the last).
      visible_only: whether global tokens are only visible to all, and attend as other tokens.
    """

    runs: tuple[tuple[int, int], ...]
    visible_only: bool = False

    def spans(self, first: int, last: int) -> list[Span]:
        is_global = any(start <= last and first < stop for start, stop in self.runs)
        if is_global and not self.visible_only:
            return [(-math.inf, math.inf)]
        return [(start, stop - 1) for start, stop in self.runs]

    def __call__(self, query: Any, key: Any) -> Any:
        visible = self._among(key) & (query >= 0)
        return visible if self.visible_only else visible | self._among(query) & (key >= 0)

    def _among(self, position: Any) -> Any:
        is_global = position < 0
        for start, stop in self.runs:
            is_global = is_global | ((position >= start) & (position < stop))
        return is_global


@dataclass(frozen=True)
class _Both(Mask):
    first: Mask
    second: Mask

    def spans(self, first: int, last: int) -> list[Span]:
        pairs = product(self.first.spans(first, last), self.second.spans(first, last))
        return [(max(x[0], y[0]), min(x[1], y[1])) for x, y in pairs]

    def __call__(self, query: Any, key: Any) -> Any:
        return self.first(query, key) & self.second(query, key)


@dataclass(frozen=True)
class _Either(Mask):
    first: Mask
    second: Mask

    @property
    def is_exact(self) -> bool:
        return self.first.is_exact and self.second.is_exact

    def spans(self, first: int, last: int) -> list[Span]:
        return self.first.spans(first, last) + self.second.spans(first, last)

    def __call__(self, query: Any, key: Any) -> Any:
        return self.first(query, key) | self.second(query, key)


def reach(local_window_size: int | tuple[int, int], is_causal: bool) -> tuple[int, int]:
    """Return the number of visible tokens before and after a query."""
    size = local_window_size
    if isinstance(size, tuple):
        if len(size) != 2 or not all(map(is_integer, size)) or min(size) < 0:
            raise ValueError(f"local_window_size must be a pair of integers >= 0, got {size}")
        return int(size[0]), int(size[1])
    if not is_integer(size) or size < 1:
        raise ValueError(f"local_window_size must be an integer >= 1 or a pair, got {size!r}")
    return int(size) - 1, 0 if is_causal else int(size) - 1


def last_tokens(local_window_size: int | tuple[int, int] | None, is_causal: bool) -> int | None:
    """Return the number of tokens that a causal window has, the query included; None for all."""
    if local_window_size is None:
        return None
    before, _ = reach(local_window_size, is_causal)
    if not is_causal:
        raise NotImplementedError(
            "local_window_size: unsupported with is_causal=False; windows end at the token"
        )
    return before + 1
