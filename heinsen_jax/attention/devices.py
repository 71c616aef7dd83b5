"""Mechanisms whose states merge, on the devices of a mesh."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import jax
from jax.sharding import PartitionSpec

from heinsen_jax.attention.base import CallArguments
from heinsen_jax.ops.context import Mergeable, over_context, summary_of
from heinsen_jax.sharding import current_mesh, spec
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
      empty: the state before the first token.
      summary: computes the state of the arrays' tokens; `summary_of(op)` by default.
      state_axes: logical axes of states after the batch axes.
      tokens_axis: the axis T of the first array.

    Raises:
      ValueError: the tensor axis does not divide the heads.
    """
    mesh = current_mesh()
    if mesh is None or call.source is not None:
        return call.recur(op, *arrays, **call.keywords)
    batch = arrays[0].ndim + tokens_axis
    rows = ("batch", *[None] * (batch - 1)) if batch else ()

    def place(axes: tuple[str | None, ...], x: Array) -> PartitionSpec:
        axes = (*rows, *axes)
        _check_heads(mesh.shape.get("tensor", 1), x.shape[axes.index("heads")])
        return spec(mesh, x.shape, (*axes, *[None] * (x.ndim - len(axes))))

    array_specs = tuple(place(("tokens", "heads"), x) for x in arrays)
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
            initial_state=state,
            return_state=wants_state,
            **here.keywords,
        )

    return jax.shard_map(
        on_device,
        in_specs=(array_specs, token_spec, state_specs, state_specs if wants_state else None),
        out_specs=(array_specs[0], state_specs if wants_state else None),
    )(arrays, call.segment_ids, empty, call.state)


def _check_heads(devices: int, heads: int) -> None:
    if heads % devices:
        raise ValueError(
            f"a mesh with tensor={devices} does not divide {heads} heads; choose another tensor, "
            "or another num_heads or num_kv_heads"
        )
