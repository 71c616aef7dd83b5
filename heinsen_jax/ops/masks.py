"""Attention masks as rules on positions, which compose with `&` and `|`.

A rule is called with query and key positions, NumPy or JAX arrays that broadcast against each
other, and returns booleans, True where the key is visible. Rules are hashable, so that functions
can be compiled for them; `tiled` derives the tiles with visible keys from the rule.
"""

from dataclasses import dataclass
from typing import Any


class Mask:
    """Attention mask as a rule on positions."""

    def __call__(self, query: Any, key: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        return _Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Either(self, other)


@dataclass(frozen=True)
class Everything(Mask):
    """All keys are visible."""

    def __call__(self, query: Any, key: Any) -> Any:
        return (query >= 0) & (key >= 0)


@dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the position of the query are visible."""

    def __call__(self, query: Any, key: Any) -> Any:
        return key <= query


@dataclass(frozen=True)
class Window(Mask):
    """Keys from `before` positions before the query to `after` positions after it are visible."""

    before: int
    after: int = 0

    def __call__(self, query: Any, key: Any) -> Any:
        return (query - key <= self.before) & (key - query <= self.after)


@dataclass(frozen=True)
class Strided(Mask):
    """Keys at a distance that is a multiple of `stride` are visible."""

    stride: int

    def __call__(self, query: Any, key: Any) -> Any:
        return (query - key) % self.stride == 0


@dataclass(frozen=True)
class SameBlock(Mask):
    """Keys in the same block of `size` positions are visible."""

    size: int

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
class Global(Mask):
    """Global tokens attend to all tokens and are visible to all.

    Attributes:
      runs: ranges of the global positions, as pairs (first, one past the last).
      visible_only: whether global tokens are only visible to all, and attend as other tokens.
    """

    runs: tuple[tuple[int, int], ...]
    visible_only: bool = False

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

    def __call__(self, query: Any, key: Any) -> Any:
        return self.first(query, key) & self.second(query, key)


@dataclass(frozen=True)
class _Either(Mask):
    first: Mask
    second: Mask

    def __call__(self, query: Any, key: Any) -> Any:
        return self.first(query, key) | self.second(query, key)


def reach(local_window_size: int | tuple[int, int], is_causal: bool) -> tuple[int, int]:
    """Return the number of visible tokens before and after a query."""
    size = local_window_size
    if isinstance(size, tuple):
        if min(size) < 0:
            raise ValueError(f"local_window_size must not be negative, got {size}")
        return size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"local_window_size must be an integer >= 1 or a pair, got {size!r}")
    return size - 1, 0 if is_causal else size - 1


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
