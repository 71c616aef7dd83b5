"""States that hold tokens: all of them, or a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer

from heinsen_jax.ops.layout import is_symbolic, varying_like
from heinsen_jax.typing import Array, Bool, DTypeLike, Float, Integer, pytree_dataclass

AXIS = -3  # the axis of tokens of a window
CHUNK = 512
"""Least number of tokens that are appended to the last and first ones in one call."""
State = TypeVar("State")


def bucket(length: int, smallest: int = 256) -> int:
    """Round up to a multiple of `smallest`, and to one of eight lengths between two powers of two,
    so that functions of padded sequences are compiled for few lengths."""
    step = max(smallest, 1 << max(length - 1, 0).bit_length() >> 3)
    return max(step, -(-length // step) * step)


@runtime_checkable
class Cache(Protocol):
    """A state that holds all tokens, up to its capacity."""

    @property
    def capacity(self) -> int: ...

    @property
    def length(self) -> Array | None:
        """Number of tokens so far; equal to the capacity when None."""
        ...

    def with_capacity(self, capacity: int) -> Cache:
        """A copy with a larger capacity."""
        ...


def is_cache(node: object) -> TypeGuard[Cache]:
    """Whether a node of a state is a cache."""
    return hasattr(node, "with_capacity")  # `isinstance` would look at all members, slowly


def check_capacity(capacity: int, before: Array, count: int) -> None:
    """Raise ValueError if `count` further tokens exceed the capacity, where that is known."""
    least = count if isinstance(before, Tracer) else int(before) + count
    if least > capacity:
        raise ValueError(
            f"state: its capacity of {capacity} tokens is less than {least}; create it with "
            "init_state(batch_shape, capacity=...)"
        )


@pytree_dataclass
class TokenCache:
    """Arrays of every token so far, such as keys and values.

    Without a `length` the cache is full and grows with each call, to a new shape. With a `length`
    the capacity is fixed, as loops under `jit` require; beyond it results are NaN (outside `jit`,
    an error).

    Attributes:
      arrays: `[*B, heads, capacity, depth]`: the tokens of a head are contiguous, as attention
        reads them.
      length: number of tokens, a scalar.
    """

    arrays: tuple[Float[Array, "*B G capacity _"], ...]
    length: Integer[Array, ""] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        shapes: Sequence[tuple[int, int]],
        dtype: DTypeLike,
        capacity: int | None,
    ) -> TokenCache:
        """An empty cache for arrays of `shapes` = (heads, depth) per token."""
        stored = ((*batch_shape, heads, capacity or 0, depth) for heads, depth in shapes)
        arrays = tuple(jnp.zeros(shape, dtype) for shape in stored)
        return cls(arrays, None if capacity is None else jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[-2]

    @property
    def tokens(self) -> tuple[Float[Array, "*B capacity G _"], ...]:
        """The arrays with the token axis before the head axis."""
        return tuple(jnp.swapaxes(x, -3, -2) for x in self.arrays)

    @property
    def num_tokens(self) -> int | Array:
        """Number of tokens so far."""
        return self.capacity if self.length is None else self.length

    def append(self, *new: Array) -> tuple[TokenCache, int | Array]:
        """Append tokens `[*B, T, heads, depth]`; return the cache and the position of the first."""
        pairs = zip(new, self.arrays, strict=True)
        new = tuple(jnp.swapaxes(x, -3, -2).astype(old.dtype) for x, old in pairs)
        if self.length is None:
            pairs = zip(self.arrays, new, strict=True)
            return TokenCache(tuple(jnp.concatenate(p, -2) for p in pairs)), self.capacity
        start, count = self.length, new[0].shape[-2]
        check_capacity(self.capacity, start, count)

        def write(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
            pairs = zip(arrays, new, strict=True)
            return tuple(lax.dynamic_update_slice_in_dim(x, y, start, x.ndim - 2) for x, y in pairs)

        arrays = varying_like(self.arrays, new)
        if jax.default_backend() == "cpu":
            # A branch writes in place; a plain write is fused with each reader, and copies for it.
            arrays = lax.cond(start + count <= self.capacity, write, lambda x: x, arrays)
        else:
            arrays = write(arrays)
        return TokenCache(arrays, start + count), start

    def or_nan(self, y: Array) -> Array:
        """y, or NaN if the number of tokens exceeds the capacity."""
        return y if self.length is None else jnp.where(self.length > self.capacity, jnp.nan, y)

    def with_capacity(self, capacity: int) -> TokenCache:
        """A copy with a larger capacity."""
        padding = [(0, 0)] * self.arrays[0].ndim
        padding[-2] = (0, capacity - self.capacity)
        length = jnp.asarray(self.capacity, jnp.int32) if self.length is None else self.length
        return TokenCache(tuple(jnp.pad(x, padding) for x in self.arrays), length)


@pytree_dataclass
class WindowCache:
    """Arrays of the last `size` tokens, of constant shape.

    Attributes:
      arrays: `[*B, size, heads, depth]`, the latest token last.
      num_tokens: number of tokens so far, a scalar; the first slots may be empty.
    """

    arrays: tuple[Float[Array, "*B size G _"], ...]
    num_tokens: Integer[Array, ""]

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        shapes: Sequence[tuple[int, int]],
        dtype: DTypeLike,
        size: int,
    ) -> WindowCache:
        arrays = tuple(jnp.zeros((*batch_shape, size, *shape), dtype) for shape in shapes)
        return cls(arrays, jnp.zeros((), jnp.int32))

    @property
    def size(self) -> int:
        return self.arrays[0].shape[AXIS]

    @property
    def first(self) -> Array:
        """Index of the first slot that holds a token."""
        return jnp.maximum(self.size - self.num_tokens, 0)

    def bounds(self, count: int, batch_shape: Sequence[int]) -> Array:
        """`[*B, 2]`: range of the valid positions among all slots and `count` new tokens."""
        valid = jnp.stack([self.first, jnp.asarray(self.size + count, self.first.dtype)])
        return jnp.broadcast_to(valid, (*batch_shape, 2))

    def append(self, *new: Array) -> tuple[tuple[Array, ...], WindowCache]:
        """The window and the new tokens, `[*B, size + T, ...]`, and the cache after them."""
        together = tuple(
            jnp.concatenate([old, x.astype(old.dtype)], AXIS)
            for old, x in zip(self.arrays, new, strict=True)
        )
        length = new[0].shape[AXIS]
        kept = tuple(
            lax.slice_in_dim(x, length, length + self.size, axis=x.ndim + AXIS) for x in together
        )
        return together, WindowCache(kept, self.num_tokens + length)


@pytree_dataclass
class FirstAndLast:
    """The last tokens and the first ones, of constant shape.

    Attributes:
      window: arrays of the last tokens.
      first: arrays of the first tokens `[*B, count, heads, depth]`: the arrays of the window, and
        others, if any.
    """

    window: WindowCache
    first: tuple[Float[Array, "*B count G _"], ...]

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        shapes: Sequence[tuple[int, int]],
        dtype: DTypeLike,
        *,
        size: int,
        count: int,
        others: Sequence[tuple[int, int]] = (),
    ) -> FirstAndLast:
        """No tokens, for arrays of `shapes` = (heads, depth) per token, and others of the first
        tokens."""
        window = WindowCache.empty(batch_shape, shapes, dtype, size)
        first = (jnp.zeros((*batch_shape, count, *x), dtype) for x in (*shapes, *others))
        return cls(window, tuple(first))

    def append(self, *new: Array) -> tuple[tuple[Array, ...], Bool[Array, "T S"], FirstAndLast]:
        """Append tokens `[*B, T, heads, depth]`.

        Returns:
          arrays: the arrays of the first tokens, of the window and of the new tokens, together
            `[*B, S, heads, depth]`.
          visible: which of them causal queries of the new tokens attend to, each token once, within
            `size` tokens before them or among the first.
          state: the state after the new tokens.
        """
        before, length = self.window.num_tokens, new[0].shape[AXIS]
        size, count = self.window.size, self.first[0].shape[AXIS]
        first = tuple(_kept(old, x, before) for old, x in zip(self.first, new, strict=True))
        together, window = self.window.append(*new[: len(self.window.arrays)])
        pairs = zip(first, together, strict=False)
        arrays = tuple(jnp.concatenate(pair, AXIS) for pair in pairs)
        places = jnp.arange(size + length, dtype=jnp.int32)
        at, place = before + places[:length], before - size + places
        near = (place >= count)[None] & (at[:, None] - place[None] <= size)
        near = near & (place[None] <= at[:, None])
        earlier = jnp.arange(count, dtype=jnp.int32)[None] <= at[:, None]
        return arrays, jnp.concatenate([earlier, near], 1), FirstAndLast(window, first)


def in_chunks(
    step: Callable[[Any, Any, State], tuple[Array, State]],
    layer: nnx.Module,
    arrays: Any,
    state: State,
    *,
    size: int,
    axis: int = AXIS,
) -> tuple[Array, State]:
    """`step(layer, arrays, state)`, a function of new tokens and the state before them that returns
    their result and the state after them, for `size` tokens at a time: a step's memory may be
    quadratic in its tokens, but then grows only in proportion to all tokens.

    Args:
      step: the function, such as a method of the layer's class; its result has as many axes after
        the tokens as the arrays.
      layer: the layer, whose parameters the function reads.
      arrays: pytree of arrays with tokens at an axis.
      state: the state before the first token.
      size: number of tokens.
      axis: the axis of tokens, counted from the end.
    """
    length = jax.tree.leaves(arrays)[0].shape[axis]
    if is_symbolic(length) or length < 2 * size:
        return step(layer, arrays, state)
    return _in_chunks(step, size, axis, *nnx.split(layer), arrays, state)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # compiled once outside another `jit`
def _in_chunks(
    step: Callable[[Any, Any, State], tuple[Array, State]],
    size: int,
    axis: int,
    graph: nnx.GraphDef,
    parameters: nnx.State,
    arrays: Any,
    state: State,
) -> tuple[Array, State]:
    length = jax.tree.leaves(arrays)[0].shape[axis]
    whole, layer = length // size * size, nnx.merge(graph, parameters)

    def chunks(x: Array) -> Array:
        x = lax.slice_in_dim(x, 0, whole, axis=axis)
        place = x.ndim + axis
        return jnp.moveaxis(x.reshape(*x.shape[:place], -1, size, *x.shape[place + 1 :]), place, 0)

    one = jax.checkpoint(lambda state, arrays: step(layer, arrays, state)[::-1])
    state, y = lax.scan(one, varying_like(state, arrays), jax.tree.map(chunks, arrays))
    y = jnp.moveaxis(y, 0, axis - 1)
    y = y.reshape(*y.shape[: axis - 1], whole, *y.shape[y.ndim + axis + 1 :])
    if whole == length:
        return y, state
    rest = jax.tree.map(lambda x: lax.slice_in_dim(x, whole, length, axis=axis), arrays)
    last, state = step(layer, rest, state)
    return jnp.concatenate([y, last], axis), state


def _kept(old: Array, new: Array, num_tokens: Array) -> Array:
    """The first tokens `[*B, count, G, F]`; `new` may contain some of them."""
    if new.shape[AXIS] == 0:
        return old
    place = jnp.arange(old.shape[AXIS], dtype=jnp.int32) - num_tokens
    taken = jnp.take(new, jnp.clip(place, 0, new.shape[AXIS] - 1), AXIS)
    is_new = (place >= 0) & (place < new.shape[AXIS])
    return jnp.where(is_new[:, None, None], taken.astype(old.dtype), old)
