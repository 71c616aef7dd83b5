"""Texts split over devices, each of which holds consecutive tokens: they exchange states alone.

A device makes the state of its own tokens; one all-gather tells each the states of all, of a size
that does not grow with the text; it merges those before its own, and continues from there.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from heinsen_jax.ops.arguments import document_starts
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.typing import Array

Tree = TypeVar("Tree")


@runtime_checkable
class Mergeable(Protocol):
    """A state of which those of consecutive texts make that of both together."""

    def merge(self, other: Any, /) -> Any:
        """The state of this one's tokens and then the other's."""
        ...


def over_context(
    op: Callable[..., tuple[Array, Any]],
    *arrays: Array,
    summary: Callable[..., Mergeable],
    empty: Mergeable,
    axis_name: str = "context",
    is_causal: bool = True,
    segment_ids: Array | None = None,
    initial_state: Mergeable | None = None,
    return_state: bool = False,
) -> tuple[Array, Any]:
    """A mechanism over a text whose tokens are split, in order, over the devices of a mesh axis.

    To be called inside `jax.shard_map`. Output, state and gradients are those of the whole text.
    What devices exchange is one all-gather of states, and in backward one reduce-scatter (with
    `return_state` an all-reduce).

    Args:
      op: called with the arrays, and is_causal, initial_state and, if there are any, segment_ids as
        keywords; returns the output and the state after these tokens.
      arrays: this device's tokens.
      summary: called with the arrays and, if there are segments, key_value_seq_lengths `[*B, 2]`;
        returns the state of those tokens alone.
      empty: the state of no tokens.
      axis_name: of the mesh.
      is_causal: whether a token sees only itself and earlier ones. If not, states must merge in
        any order.
      segment_ids: `[*B, T / devices]`, this device's, integers: tokens see only those of their
        own segment, a run of equal numbers. Causal only.
      initial_state: what was seen before the whole text, the same on all devices; nothing when
        None.
      return_state: whether to return the state after the whole text, the same on all devices; None
        otherwise.

    Raises:
      NotImplementedError: segments that are not causal.
    """
    if segment_ids is not None and not is_causal:
        raise NotImplementedError(
            "segment_ids with is_causal=False, where texts are split over devices: use a mesh "
            "without a context axis, or call it for each segment"
        )
    edges, last, options = None, {}, {}
    if segment_ids is not None:
        options = {"segment_ids": segment_ids}
        begin = _last_begin(segment_ids)
        bounds = jnp.stack([begin, jnp.full_like(begin, segment_ids.shape[-1])], -1)
        last = {"key_value_seq_lengths": bounds}
        edges = _in_floats(jnp.stack([segment_ids[..., 0], segment_ids[..., -1], begin]))
    own = summary(*arrays, **last)
    to = "invarying" if return_state else "varying"
    states, edges = _all_gather((own, edges), axis_name, to)
    joins = (None, None) if edges is None else _joins(edges)
    index = lax.axis_index(axis_name)

    def merge_next(carry: tuple[Any, Any], device: Any) -> tuple[Any, None]:
        """The state after a device's tokens, and what this device sees of those of others."""
        (after, seen), (place, state, (continues, is_whole)) = carry, device
        before = _where(continues, after, empty)
        if is_causal:
            seen = _where(place == index, before, seen)
        else:
            seen = _where(place == index, seen, seen.merge(state))
        return (_where(is_whole, before, empty).merge(state), seen), None

    first = empty if initial_state is None else initial_state
    first, empty = varying_like((first, empty), states)
    seen = varying_like(empty if is_causal else first, own)
    devices = jnp.arange(lax.axis_size(axis_name)), states, joins
    (after, seen), _ = lax.scan(merge_next, (first, seen), devices)
    y, _ = op(*arrays, is_causal=is_causal, initial_state=seen, **options)
    return y, after if return_state else None


def summary_of(op: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the state of keys and values alone, for an op of query, key and value."""

    def summary(query: Array, *seen: Array, **options: Any) -> Any:
        one = query[..., :1, :, :]  # its result is not used
        return op(one, *seen, is_causal=False, return_state=True, **options)[1]

    return summary


def _last_begin(segment_ids: Array) -> Array:
    """Where the last token's segment begins, or 0 if it may have begun on an earlier device."""
    starts = document_starts(segment_ids, None)
    places = jnp.arange(segment_ids.shape[-1]).reshape((1,) * (starts.ndim - 1) + (-1,))
    return jnp.max(jnp.where(starts, places, 0), -1).astype(segment_ids.dtype)


def _joins(edges: Array) -> tuple[Array, Array]:
    """For each device `[devices, *B]`, given `[devices, 3, pieces, *B]`: whether its first token
    continues the segment of the device before, and whether all its tokens are of one segment."""
    first, last, begin = (edges[:, edge] for edge in range(3))
    before = jnp.concatenate([first[:1], last[:-1]])
    return jnp.all(first == before, 1), jnp.all(begin == 0, 1)


def _in_floats(x: Array) -> Array:
    """Integers `[3, ...]` as pieces `[3, pieces, ...]` that float32 holds: they travel with
    states."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.int32))
    pieces = [(x >> shift) & 0xFFFF for shift in range(0, 8 * x.dtype.itemsize, 16)]
    return jnp.stack(pieces, 1).astype(jnp.float32)


def _all_gather(tree: Tree, axis_name: str, to: str) -> Tree:
    """The arrays of all devices, stacked on a first axis, in one collective operation."""
    flat, unravel = ravel_pytree(tree)
    return jax.vmap(unravel)(lax.all_gather(flat, axis_name, to=to))


def _where(condition: Array | None, x: Tree, y: Tree) -> Tree:
    """Of two states, by row; the first without a condition."""
    if condition is None:
        return x

    def choose(x: Array, y: Array) -> Array:
        rows = condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))
        return jnp.where(rows, x, y)

    return jax.tree.map(choose, x, y)
