"""Log-attention over a sequence that is split over several devices."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from heinsen_jax.ops.context import over_context, summary_of
from heinsen_jax.ops.layout import astype_like
from heinsen_jax.ops.log_attention.api import Implementation, log_attention
from heinsen_jax.ops.log_attention.state import LogAttentionState, narrowed
from heinsen_jax.typing import Array, Decay, Inexact, Keys, Query, Segments, wide


@overload
def sharded_log_attention(
    query: Query,
    key: Keys,
    log_value: Inexact[Array, "*B S G V"],
    *,
    axis_name: str = "context",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    log_decay: Decay | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Inexact[Array, "*B T N V"]: ...


@overload
def sharded_log_attention(
    query: Query,
    key: Keys,
    log_value: Inexact[Array, "*B S G V"],
    *,
    axis_name: str = "context",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    log_decay: Decay | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Inexact[Array, "*B T N V"], LogAttentionState]: ...


def sharded_log_attention(
    query: Query,
    key: Keys,
    log_value: Inexact[Array, "*B S G V"],
    *,
    axis_name: str = "context",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    log_decay: Decay | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Inexact[Array, "*B T N V"] | tuple[Inexact[Array, "*B T N V"], LogAttentionState]:
    """`log_attention` inside `jax.shard_map`, each device holding a part of the tokens, in order.

    Output, state and gradients are the same as for the whole sequence. Devices exchange their
    states, `[*B, num_kv_heads, key_depth, value_depth]`, in one all-gather, and nothing else.

    Args:
      query, key, log_value, segment_ids, log_decay: as in `log_attention`, for this device's
        tokens, the same number on each device.
      axis_name: mesh axis over which the tokens are split.
      is_causal: as in `log_attention`. If not, without segments and decay.
      initial_state: the state before the whole sequence, the same on all devices.
      return_state: whether to also return the state after the whole sequence, the same on all
        devices.
      implementation: as in `log_attention`.

    Returns:
      log Y of this device's tokens, or a pair of it and the state.

    Raises:
      ValueError, NotImplementedError: as `log_attention`; decay or segments with is_causal=False.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843, eq. (6).
    """
    if log_decay is not None and not is_causal:
        raise NotImplementedError(
            "log_decay: unsupported with is_causal=False on a split sequence; call "
            "log_attention with the whole sequence on each device"
        )
    has_decay = log_decay is not None or segment_ids is not None
    dtype = wide(query, key, log_value, *jax.tree.leaves(initial_state))
    *batch, _, groups, key_depth = key.shape
    sizes = groups, key_depth, log_value.shape[-1]
    empty = LogAttentionState.empty(batch, *sizes, dtype, has_decay=has_decay)

    def like_empty(state: LogAttentionState) -> LogAttentionState:
        """The state with the arrays of the empty one, in its dtypes."""
        total = jnp.zeros_like(state.log_z) if state.log_decay is None else state.log_decay
        return astype_like(replace(state, log_decay=total if has_decay else None), empty)

    def op(query: Array, key: Array, log_value: Array, *log_decay: Array, **options: Any) -> Any:
        decay = log_decay[0] if log_decay else None
        options["implementation"] = implementation
        return log_attention(query, key, log_value, log_decay=decay, **options)

    def summary(*arrays: Array, **options: Any) -> LogAttentionState:
        return like_empty(summary_of(op)(*arrays, **options))

    y, state = over_context(
        partial(op, return_state=True),
        *(x for x in (query, key, log_value, log_decay) if x is not None),
        summary=summary,
        empty=empty,
        axis_name=axis_name,
        is_causal=is_causal,
        segment_ids=segment_ids,
        initial_state=None if initial_state is None else like_empty(initial_state),
        return_state=return_state,
    )
    if not return_state:
        return y
    if initial_state is not None:
        is_given = has_decay and initial_state.log_decay is not None
        total = state.log_decay if is_given else initial_state.log_decay
        state = narrowed(replace(state, log_decay=total), initial_state)
    return y, state
