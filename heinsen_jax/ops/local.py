"""Local and sparse softmax attention: windows, dilated windows, global tokens, sparse blocks.

Results are exact; time is proportional to the number of visible pairs.
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops import masks
from heinsen_jax.ops.arguments import check_heads, check_same_length, check_tokens, int32_lengths
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.masks import Mask
from heinsen_jax.ops.softmax import Implementation, dot_product_attention
from heinsen_jax.typing import Array, Keys, Lengths, Mixed, Query, Segments, Values

Pattern = Literal["local", "strided", "fixed"]


@over_devices
def sliding_window_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    local_window_size: int | tuple[int, int],
    num_sinks: int = 0,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Mixed:
    """Softmax attention over the nearest tokens (Beltagy et al., 2020, section 3.1).

    A causal query attends to the last `local_window_size` tokens, itself included; otherwise to as
    many on each side. A pair gives the numbers of tokens before and after it. All queries also
    attend to the first `num_sinks` tokens of the array, each once: trained models give them much
    weight (Xiao et al., 2024).

    Args, Returns, Raises: as `dot_product_attention`; ValueError if num_sinks < 0.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> sliding_window_attention(key, key, value, local_window_size=2).ravel().round().tolist()
      [2.0, 3.0, 8.0]
      >>> y = sliding_window_attention(key, key, value, local_window_size=1, num_sinks=1)
      >>> y.ravel().round().tolist()
      [2.0, 3.0, 7.0]

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150; Xiao et al., 2024, Efficient
      Streaming Language Models with Attention Sinks, arXiv:2309.17453.
    """
    if num_sinks < 0:
        raise ValueError(f"num_sinks must not be negative, got {num_sinks}")
    rule, size = None, local_window_size
    if num_sinks:
        rule = masks.Window(*masks.reach(local_window_size, is_causal))
        rule, size = rule | masks.Global(((0, num_sinks),), visible_only=True), None
    return dot_product_attention(
        query,
        key,
        value,
        mask=rule,
        is_causal=is_causal,
        local_window_size=size,
        segment_ids=segment_ids,
        key_value_seq_lengths=key_value_seq_lengths,
        scale=scale,
        implementation=implementation,
    )


@over_devices
def dilated_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    local_window_size: int | tuple[int, int],
    dilation: int,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Mixed:
    """Softmax attention over every `dilation`-th token (Beltagy et al., 2020, section 3.1).

    Query t attends to t, t - dilation, ...: `local_window_size` tokens, itself included, and as
    many after it if not causal. A pair gives the numbers of tokens before and after it. A dilation
    of 1 leaves no gaps. Computed as sliding windows over `dilation` interleaved sequences, in time
    independent of the dilation.

    Args, Returns, Raises: as `dot_product_attention`; ValueError if dilation < 1.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> y = dilated_attention(key, key, value, local_window_size=2, dilation=2)
      >>> y.ravel().round().tolist()
      [2.0, 4.0, 7.0]

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150.
    """
    check_heads(query, key, value)
    check_same_length(query, key, "dilated_attention", "they must be of the same tokens")
    tokens = key.shape[:-2]
    check_tokens(tokens, segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths)
    if dilation < 1:
        raise ValueError(f"dilation must be at least 1, got {dilation}")
    *batch, length = tokens
    axis = len(batch)
    rows = -(-length // dilation)

    def interleaved(x: Array | None) -> Array | None:
        """`[*B, T, ...]` -> `[*B, dilation, rows, ...]`"""
        if x is None:
            return None
        after = x.ndim - axis - 1
        x = jnp.pad(x, [(0, 0)] * axis + [(0, rows * dilation - length)] + [(0, 0)] * after)
        return jnp.swapaxes(x.reshape(*batch, rows, dilation, *x.shape[axis + 1 :]), axis, axis + 1)

    bounds = jnp.asarray(length, jnp.int32)
    if key_value_seq_lengths is not None:
        bounds = int32_lengths(key_value_seq_lengths)
    bounds = bounds[..., None] if bounds.ndim in (0, axis) else bounds
    bounds = jnp.broadcast_to(bounds[..., None, :], (*batch, dilation, bounds.shape[-1]))
    first = jnp.arange(dilation, dtype=jnp.int32).reshape((1,) * axis + (dilation, 1))
    bounds = -(-jnp.maximum(bounds - first, 0) // dilation)  # in the sequence from `first`
    heads = [interleaved(query), interleaved(key), interleaved(value)]
    y = dot_product_attention(
        *(x for x in heads if x is not None),
        is_causal=is_causal,
        local_window_size=local_window_size,
        segment_ids=interleaved(segment_ids),
        key_value_seq_lengths=bounds if bounds.shape[-1] == 2 else bounds[..., 0],
        scale=scale,
        implementation=implementation,
    )
    y = jnp.swapaxes(y, axis, axis + 1)
    y = y.reshape(*batch, rows * dilation, *y.shape[axis + 2 :])
    return y[..., :length, :, :]


@over_devices
def longformer_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    local_window_size: int | tuple[int, int],
    global_positions: Sequence[int],
    global_heads: tuple[Query, Keys, Values] | None = None,
    is_causal: bool = False,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Mixed:
    """Sliding-window attention with global tokens (Beltagy et al., 2020, section 3.1).

    Global tokens attend to all tokens and are visible to all tokens.

    Args:
      query, key, value, local_window_size: as `sliding_window_attention`. A global key inside a
        window counts once.
      global_positions: positions of the global tokens.
      global_heads: query, key and value `[*B, T, ., .]` of separate projections, for the queries of
        global tokens; the same projections as for other tokens when None.
      is_causal: whether tokens, global ones included, attend only to themselves and earlier tokens.
      segment_ids, key_value_seq_lengths, scale, implementation: as `dot_product_attention`.

    Returns:
      Y `[*B, T, num_heads, value_depth]`.

    Raises:
      ValueError, NotImplementedError: as `dot_product_attention`; a global position is out of
        range.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> y = longformer_attention(
      ...     key, key, value, local_window_size=1, global_positions=[0], is_causal=True
      ... )
      >>> y.ravel().round().tolist()
      [2.0, 3.0, 7.0]

    References:
      Beltagy, Peters, Cohan, 2020, Longformer, arXiv:2004.05150.
    """
    check_heads(query, key, value)
    check_same_length(query, key, "longformer_attention", "they must be of the same tokens")
    positions = sorted(set(global_positions))
    length = query.shape[-3]
    if positions and not 0 <= positions[0] <= positions[-1] < length:
        raise ValueError(f"global_positions must be in 0 .. {length - 1}, got {positions}")
    rule = masks.Window(*masks.reach(local_window_size, is_causal))
    rule = rule | masks.Global(_runs(positions), visible_only=global_heads is not None)
    y = dot_product_attention(
        query,
        key,
        value,
        mask=rule,
        is_causal=is_causal,
        segment_ids=segment_ids,
        key_value_seq_lengths=key_value_seq_lengths,
        scale=scale,
        implementation=implementation,
    )
    if global_heads is None or not positions:
        return y
    query, key, value = global_heads
    index = np.asarray(positions)  # static: an array of `jnp` cannot index NumPy arrays under `jit`
    mask = jnp.arange(length)[None] <= index[:, None] if is_causal else None
    if segment_ids is not None:
        same = (segment_ids[..., index, None] == segment_ids[..., None, :])[..., None, :, :]
        mask = same if mask is None else same & jnp.broadcast_to(mask, same.shape)
    rows = dot_product_attention(
        query[..., index, :, :],
        key,
        value,
        mask=mask,
        key_value_seq_lengths=key_value_seq_lengths,
        scale=scale,
    )
    return y.at[..., index, :, :].set(rows)


@over_devices
def block_sparse_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    pattern: Pattern = "fixed",
    block_size: int,
    num_summaries: int = 1,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Mixed:
    """Causal softmax attention in a sparse pattern of Child et al. (2019, section 4.2).

    With l = block_size, query i attends to key j <= i if

        local:    i - j < l
        strided:  (i - j) mod l = 0
        fixed:    floor(j / l) = floor(i / l)  or  j mod l >= l - num_summaries

    Time is O(T sqrt(T)) if l is about sqrt(T). Liu et al.'s (2018) independent blocks are `fixed`
    with no summaries. The paper alternates patterns from layer to layer.

    Args:
      query, key, value, segment_ids: as in `dot_product_attention`.
      key_value_seq_lengths, scale, implementation: as in `dot_product_attention`.
      pattern: name of the pattern.
      block_size: l.
      num_summaries: number of last tokens of each block that are visible to later blocks.

    Returns:
      Y `[*B, T, num_heads, value_depth]`.

    Raises:
      ValueError: as `dot_product_attention`; a size is out of its range.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> y = block_sparse_attention(key, key, value, pattern="local", block_size=2)
      >>> y.ravel().round().tolist()
      [2.0, 3.0, 8.0]

    References:
      Child et al., 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509.
    """
    options = {
        "segment_ids": segment_ids,
        "key_value_seq_lengths": key_value_seq_lengths,
        "scale": scale,
        "implementation": implementation,
    }
    if pattern == "strided":  # one sequence per remainder
        check_block(pattern, block_size, num_summaries)
        window = max(query.shape[-3], 1)
        return dilated_attention(
            query, key, value, local_window_size=window, dilation=block_size, **options
        )
    rule = block_rule(pattern, block_size, num_summaries)
    return dot_product_attention(query, key, value, mask=rule, is_causal=True, **options)


def block_rule(pattern: Pattern, block_size: int, num_summaries: int) -> Mask:
    """Return the mask of a pattern, to be combined with the causal one."""
    check_block(pattern, block_size, num_summaries)
    if pattern == "local":
        return masks.Window(block_size - 1)
    if pattern == "strided":
        return masks.Strided(block_size)
    return masks.SameBlock(block_size) | masks.BlockEnds(block_size, num_summaries)


def check_block(pattern: str, block_size: int, num_summaries: int) -> None:
    if pattern not in ("local", "strided", "fixed"):
        raise ValueError(f"pattern must be 'local', 'strided' or 'fixed', not {pattern!r}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if pattern == "fixed" and not 0 <= num_summaries <= block_size:
        raise ValueError(
            f"num_summaries must be in 0 .. block_size={block_size}, got {num_summaries}"
        )


def _runs(positions: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return tuple(runs)
