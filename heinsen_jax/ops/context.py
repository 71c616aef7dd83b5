"""Context parallelism: a sequence is split over devices, which exchange only states.

Each device holds consecutive tokens and computes their state. One all-gather distributes the
states, of a size independent of the sequence length. A device merges the states of the preceding
devices and continues from there.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from heinsen_jax.ops.arguments import segment_starts, signed_ids
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.typing import Array

Tree = TypeVar("Tree")


@runtime_checkable
class Mergeable(Protocol):
    """State that can be merged with the state of the tokens that follow."""

    def merge(self, other: Any, /) -> Any:
        """Return the state of these tokens followed by the tokens of `other`."""
        ...


def over_context(
    op: Callable[..., tuple[Array, Any]],
    *arrays: Array,
    summary: Callable[..., Mergeable],
    empty: Mergeable,
    axis_name: str | tuple[str, ...] = "context",
    is_causal: bool = True,
    segment_ids: Array | None = None,
    initial_state: Mergeable | None = None,
    return_state: bool = False,
) -> tuple[Array, Any]:
    """Run a mechanism on a sequence that is split over the devices of a mesh axis.

    Call it inside `jax.shard_map`. Output, state and gradients are the same as for the whole
    sequence. The forward pass needs one all-gather of states, the backward pass one reduce-scatter
    (an all-reduce with `return_state`).

    Args:
      op: called with the arrays, and the keywords is_causal, initial_state and, if given,
        segment_ids; returns the output and the state after these tokens.
      arrays: inputs at this device's tokens.
      summary: called with the arrays and, with segments, key_value_seq_lengths `[*B, 2]`; returns
        the state of those tokens alone.
      empty: the state of no tokens; it may have an `after_cut`, that at the start of a segment.
      axis_name: name of the mesh axis, or names of several.
      is_causal: whether tokens attend only to themselves and earlier tokens. If not, states must
        merge in any order.
      segment_ids: `[*B, T / devices]`, ids of this device's tokens, integers: tokens attend only
        within their own segment, a run of equal ids. Causal only.
      initial_state: state before the whole sequence, the same on all devices; the empty state when
        None.
      return_state: whether to return the state after the whole sequence, the same on all devices;
        None is returned otherwise.

    Raises:
      NotImplementedError: segments are given without is_causal.
    """
    if segment_ids is not None and not is_causal:
        raise NotImplementedError(
            "segment_ids: unsupported with is_causal=False on a split sequence; use a mesh "
            "without a context axis, or call it for each segment"
        )
    edges, last, options = None, {}, {}
    if segment_ids is not None:
        segment_ids = signed_ids(segment_ids)
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

    def merge_next(carry: tuple[Any, Any], entry: Any) -> tuple[Any, None]:
        """Return the state after a device's tokens, and the part of other devices' states that is
        visible here."""
        (after, visible), (device, state, (continues, is_whole)) = carry, entry
        before = _where(continues, after, cut)
        if is_causal:
            visible = _where(device == index, before, visible)
        else:
            visible = _where(device == index, visible, visible.merge(state))
        return (_where(is_whole, before, cut).merge(state), visible), None

    first = empty if initial_state is None else initial_state
    cut = getattr(empty, "after_cut", empty)
    first, empty, cut = varying_like((first, empty, cut), states)
    visible = varying_like(empty if is_causal else first, own)
    devices = jnp.arange(lax.axis_size(axis_name)), states, joins
    (after, visible), _ = lax.scan(merge_next, (first, visible), devices)
    y, _ = op(*arrays, is_causal=is_causal, initial_state=visible, **options)
    return y, after if return_state else None


def summary_of(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the state from keys and values, for an op of query, key and
    value."""

    def summary(query: Array, *visible: Array, **options: Any) -> Any:
        one = query[..., :1, :, :]  # the output is not used
        return op(one, *visible, is_causal=False, return_state=True, **options)[1]

    return summary


def _last_begin(segment_ids: Array) -> Array:
    """Return the position where the last token's segment begins, or 0 if it may begin on an earlier
    device."""
    starts = segment_starts(segment_ids, None)
    positions = jnp.arange(segment_ids.shape[-1]).reshape((1,) * (starts.ndim - 1) + (-1,))
    return jnp.max(jnp.where(starts, positions, 0), -1).astype(segment_ids.dtype)


def _joins(edges: Array) -> tuple[Array, Array]:
    """Return for each device `[devices, *B]`, given `[devices, 3, parts, *B]`: whether its first
    token continues the preceding device's segment, and whether its tokens form a single segment."""
    first, last, begin = (edges[:, edge] for edge in range(3))
    before = jnp.concatenate([first[:1], last[:-1]])
    return jnp.all(first == before, 1), jnp.all(begin == 0, 1)


def _in_floats(x: Array) -> Array:
    """Split integers `[3, ...]` into parts `[3, parts, ...]` that float32 represents, to gather
    them together with the states."""
    parts = [(x >> shift) & 0xFFFF for shift in range(0, 8 * x.dtype.itemsize, 16)]
    return jnp.stack(parts, 1).astype(jnp.float32)


def _all_gather(tree: Tree, axis_name: str | tuple[str, ...], to: str) -> Tree:
    """Gather the arrays of all devices, stacked on a first axis, in one collective operation."""
    flat, unravel = ravel_pytree(tree)
    return jax.vmap(unravel)(lax.all_gather(flat, axis_name, to=to))


def _where(condition: Array | None, x: Tree, y: Tree) -> Tree:
    """Select between two states by row; the first one without a condition."""
    if condition is None:
        return x

    def choose(x: Array, y: Array) -> Array:
        rows = condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))
        return jnp.where(rows, x, y)

    return jax.tree.map(choose, x, y)
