"""Mechanisms whose states merge, on the devices of a mesh."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import jax
from jax.sharding import PartitionSpec

from heinsen_jax.attention.base import CallArguments
from heinsen_jax.ops.context import Mergeable, over_context, summary_of
from heinsen_jax.sharding import batch_names, current_mesh, rules_or_default, spec
from heinsen_jax.typing import Array

MergeableT = TypeVar("MergeableT", bound=Mergeable)


def recur(
    call: CallArguments[MergeableT],
    op: Callable[..., Array | tuple[Array, MergeableT]],
    *arrays: Array,
    empty: MergeableT,
    summary: Callable[..., MergeableT] | None = None,
    state_axes: tuple[str | None, ...] = ("heads",),
    tokens_axis: int = -3,
) -> tuple[Array, MergeableT | None]:
    """`call.recur(op, *arrays)`; with a mesh, each device has its own sequences, tokens and heads.

    Devices exchange only states, if sequences are split (see `ops.context`).

    Args:
      call: arguments of the call.
      op: function of the arrays, `is_causal`, `segment_ids`, `initial_state` and `return_state`.
      arrays: `[*B, T, heads, ...]`; the axis of heads may be any axis of independent elements.
        Arrays may have fewer heads, each shared by consecutive heads of the others; an array of a
        single head is replicated. The result has as many heads as the array with most.
      empty: the state before the first token.
      summary: computes the state of the arrays' tokens; `summary_of(op)` by default.
      state_axes: logical axes of states after the batch axes.
      tokens_axis: the axis T of the first array.

    Raises:
      ValueError: the devices that split heads do not divide them.
    """
    mesh, rules = current_mesh(), rules_or_default()
    if mesh is None or mesh.manual_axes or call.source is not None:
        return call.recur(op, *arrays, **call.keywords)
    batch, tokens_axes = arrays[0].ndim + tokens_axis, rules.get("tokens", ())
    rows = batch_names(batch)
    heads = math.prod(mesh.shape[name] for name in rules.get("heads", ()) if name in mesh.auto_axes)

    largest = max(arrays, key=lambda x: x.shape[batch + 1])

    def place(axes: tuple[str | None, ...], x: Array) -> PartitionSpec:
        axes = (*rows, *axes)
        if (number := x.shape[axes.index("heads")]) == 1 < largest.shape[batch + 1]:
            axes = tuple(None if axis == "heads" else axis for axis in axes)
        else:
            _check_heads(heads, number)
        return spec(mesh, x.shape, (*axes, *[None] * (x.ndim - len(axes))))

    # Some mechanisms have several keys and values per token.
    tokens = None if place(("tokens", "heads"), arrays[0])[batch] is None else "tokens"
    array_specs = tuple(place((tokens, "heads"), x) for x in arrays)
    state_specs = jax.tree.map(partial(place, state_axes), empty)
    token_spec = PartitionSpec(*array_specs[0][: batch + 1])
    wants_state = call.state is not None

    def on_device(
        arrays: tuple[Array, ...],
        segment_ids: Array | None,
        empty: MergeableT,
        state: MergeableT | None,
    ) -> tuple[Array, MergeableT | None]:
        here = replace(call, segment_ids=segment_ids, state=state)
        if array_specs[0][batch] is None:
            return here.recur(op, *arrays, **here.keywords)
        return over_context(
            cast("Callable[..., tuple[Array, MergeableT]]", partial(op, return_state=True)),
            *arrays,
            summary=summary or summary_of(op),
            empty=empty,
            axis_name=tokens_axes[0] if len(tokens_axes) == 1 else tokens_axes,
            initial_state=state,
            return_state=wants_state,
            **here.keywords,
        )

    return jax.shard_map(
        on_device,
        in_specs=(array_specs, token_spec, state_specs, state_specs if wants_state else None),
        out_specs=(place((tokens, "heads"), largest), state_specs if wants_state else None),
        axis_names=frozenset(mesh.auto_axes),
    )(arrays, call.segment_ids, empty, call.state)


def _check_heads(devices: int, heads: int) -> None:
    if heads % devices:
        raise ValueError(
            f"the {devices} devices that split heads do not divide {heads} heads; choose another "
            "mesh, or another num_heads, num_kv_heads or num_key_heads"
        )
