"""Log-attention over a sequence that is split over several devices."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax.numpy as jnp

from heinsen_jax.ops.context import over_context, summary_of
from heinsen_jax.ops.log_attention.api import Implementation, log_attention
from heinsen_jax.ops.log_attention.state import LogAttentionState
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
    dtype = wide(query, key, log_value)
    *batch, _, groups, key_depth = key.shape
    sizes, has_decay = (groups, key_depth, log_value.shape[-1]), log_decay is not None
    empty = LogAttentionState.empty(batch, *sizes, dtype, has_decay=has_decay)
    before = initial_state
    if before is not None and has_decay != (before.log_decay is not None):
        decay = jnp.zeros_like(before.log_z) if has_decay else None
        initial_state = replace(before, log_decay=decay)

    def op(query: Array, key: Array, log_value: Array, *log_decay: Array, **options: Any) -> Any:
        decay = log_decay[0] if log_decay else None
        options["implementation"] = implementation
        return log_attention(query, key, log_value, log_decay=decay, **options)

    y, state = over_context(
        partial(op, return_state=True),
        *(x for x in (query, key, log_value, log_decay) if x is not None),
        summary=summary_of(op),
        empty=empty,
        axis_name=axis_name,
        is_causal=is_causal,
        segment_ids=segment_ids,
        initial_state=initial_state,
        return_state=return_state,
    )
    if not return_state:
        return y
    if before is not None and before is not initial_state:
        state = replace(state, log_decay=before.log_decay)
    return y, state
