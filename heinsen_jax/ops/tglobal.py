"""Transient-global attention (TGlobal): nearby tokens, and one summary per block of tokens.

References:
  Guo et al., 2021, LongT5, arXiv:2112.07916.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops.arguments import (
    check_array,
    check_heads,
    check_same_length,
    int32_lengths,
    valid_tokens,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import fold_heads, unfold_heads
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import (
    Array,
    Features,
    Float,
    Integer,
    Keys,
    Lengths,
    Mixed,
    Query,
    Values,
    common_dtype,
    wide,
)


@over_devices
def relative_position_bucket(
    relative_position: Integer[Array, "*B"],
    *,
    is_bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Integer[Array, "*B"]:
    """Return T5's buckets of relative positions: exact for short distances, then logarithmic.

    With n buckets (half of them per side if bidirectional), distances below n/2 have one bucket
    each, longer ones bucket n/2 + floor(n/2 log(2 distance / n) / log(2 max_distance / n)), at most
    n - 1.

    Args:
      relative_position: position of the key minus position of the query, integers of any shape.
      is_bidirectional: whether later keys have separate buckets, the upper half; otherwise they are
        all in bucket 0.
      num_buckets: number of buckets.
      max_distance: distance from which on all positions share the last bucket.

    Returns:
      Integers below num_buckets, of the same shape.

    Examples:
      >>> relative_position_bucket(jnp.array([-2, 0, 3, 100])).tolist()
      [2, 0, 19, 31]

    References:
      Raffel et al., 2019, Exploring the Limits of Transfer Learning, arXiv:1910.10683.
    """
    one_side = num_buckets // 2 if is_bidirectional else num_buckets
    own = one_side // 2
    if own < 1 or max_distance <= own:
        raise ValueError(
            f"num_buckets={num_buckets} must be at least {4 if is_bidirectional else 2}, and "
            f"max_distance={max_distance} above {own}, the number of exact buckets"
        )
    # A table in float32, as published, since rounding matters at the boundaries of buckets.
    far = np.arange(own, max_distance + 1, dtype=np.float32)
    steps = np.log(far / np.float32(own)) / np.float32(np.log(max_distance / own))
    steps = (steps * np.float32(one_side - own)).astype(np.int32)
    table = np.concatenate([np.arange(own), np.minimum(own + steps, one_side - 1)])
    relative_position = jnp.asarray(relative_position)
    relative_position = relative_position.astype(common_dtype(relative_position, jnp.int32))
    before = jnp.maximum(-relative_position, 0)
    distance = jnp.abs(relative_position) if is_bidirectional else before
    bucket = jnp.asarray(table, jnp.int32)[jnp.minimum(distance, max_distance)]
    return bucket + one_side * (relative_position > 0) if is_bidirectional else bucket


@over_devices
def block_sums(
    x: Features,
    block_size: int,
    *,
    is_causal: bool = False,
    key_value_seq_lengths: Lengths | None = None,
) -> tuple[Float[Array, "*B J D"], Integer[Array, "*B T"]]:
    """Return the sum of tokens in each complete block, and the block index of each token.

    Tokens after the last complete block (orphans) join it; or, if causal, form a block without a
    sum, since later tokens would otherwise change the outputs of earlier ones.

    Args:
      x: `[*B, T, D]`.
      block_size: tokens in a block.
      is_causal: whether orphans form a separate block.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding.

    Returns:
      Sums `[*B, T // block_size, D]`, in at least float32, 0 for incomplete blocks; and the block
      index of each token `[*B, T]`, -1 for padding and for tokens without a block.

    Raises:
      ValueError: shapes do not fit; the message says which.
      NotImplementedError: padding on the left, `[*B, 2]`.

    Examples:
      >>> sums, blocks = block_sums(jnp.arange(1.0, 6.0).reshape(5, 1), block_size=2)
      >>> sums.ravel().tolist(), blocks.tolist()
      ([3.0, 12.0], [0, 0, 1, 1, 1])
    """
    if x.ndim < 2:
        raise ValueError(f"x must be [..., tokens, features], got shape {x.shape}")
    *batch, length, features = x.shape
    _check_blocks(key_value_seq_lengths, tuple(batch), block_size)
    lengths = jnp.full(batch, length) if key_value_seq_lengths is None else key_value_seq_lengths
    valid, own, complete = _block_layout(lengths, length, block_size, is_causal)
    complete, count = complete[..., None], length // block_size
    x = jnp.where(valid[..., None], x, 0).astype(wide(x))
    sums = x[..., : count * block_size, :].reshape(*batch, count, block_size, features).sum(-2)
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*batch, count))
    sums = jnp.where((index < complete)[..., None], sums, 0)
    if not is_causal:
        place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), valid.shape)
        orphans = jnp.where((place >= complete * block_size)[..., None], x, 0).sum(-2)
        sums = sums + jnp.where((index == complete - 1)[..., None], orphans[..., None, :], 0)
    return sums, own


@over_devices
def tglobal_attention(
    query: Query,
    key: Keys,
    value: Values,
    global_key: Float[Array, "*B J G K"],
    global_value: Float[Array, "*B J G V"],
    *,
    radius: int,
    block_size: int,
    local_bias: Float[Array, "_ N"] | None = None,
    global_bias: Float[Array, "_ N"] | None = None,
    max_distance: int = 128,
    is_causal: bool = False,
    key_value_seq_lengths: Lengths | None = None,
    scale: float | Float[Array, ""] = 1.0,
) -> Mixed:
    """One softmax over the 2 radius + 1 nearest tokens and the summaries of all blocks.

        Y_t = softmax_j(scale Q_t . [K_t-r .. K_t+r, K'_0 .. K'_M-1] + bias_tj) [V, V']

    The caller computes the summaries: the `block_sums` of the layer's inputs, normalized, in the
    same projections as keys and values of tokens. If causal, a token attends to itself, the
    `radius` tokens before it, and the blocks completed before its own block began. Time and
    memory are O(T (radius + T / block_size)).

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, T, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, T, num_kv_heads, value_depth]`.
      global_key: K' `[*B, M, num_kv_heads, key_depth]`, M = T // block_size.
      global_value: V' `[*B, M, num_kv_heads, value_depth]`.
      radius: number of visible tokens on each side.
      block_size: tokens in a block; orphans are treated as in `block_sums`.
      local_bias: `[num_buckets, num_heads]`, added to the scores of tokens by the bucket of their
        relative position (`relative_position_bucket`, bidirectional unless causal); 0 when None.
      global_bias: likewise, by the index of a block minus the index of the token's own.
      max_distance: as in `relative_position_bucket`.
      is_causal: whether later tokens and blocks are masked.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding. Values at
        padding, NaN included, have no effect; its outputs are 0.
      scale: factor of the scores; 1, not 1 / sqrt(key_depth), as in T5, whose initial queries are
        smaller.

    Returns:
      Y `[*B, T, num_heads, value_depth]`.

    Raises:
      ValueError: shapes or dtypes do not fit; the message says which.
      NotImplementedError: padding on the left, `[*B, 2]`.

    Examples:
      >>> key, value = jnp.zeros((4, 1, 2)), jnp.ones((4, 1, 3))
      >>> blocks = jnp.zeros((2, 1, 2)), jnp.ones((2, 1, 3))
      >>> tglobal_attention(key, key, value, *blocks, radius=1, block_size=2).shape
      (4, 1, 3)

    References:
      Guo et al., 2021, LongT5, arXiv:2112.07916.
    """
    check_heads(query, key, value)
    check_same_length(query, key, "tglobal_attention", "they must be of the same tokens")
    *batch, length, heads, _ = query.shape
    _check_blocks(key_value_seq_lengths, tuple(batch), block_size)
    blocks = *batch, length // block_size
    check_array("global_key", global_key, ((*blocks, *key.shape[-2:]),), jnp.floating)
    check_array("global_value", global_value, ((*blocks, *value.shape[-2:]),), jnp.floating)
    if radius < 0:
        raise ValueError(f"radius must not be negative, got {radius}")
    for name, table in {"local_bias": local_bias, "global_bias": global_bias}.items():
        if table is not None:
            check_array(name, table, ((len(table), heads),), jnp.floating)
    if 0 in query.shape[:-1]:
        return unfold_heads(jnp.zeros((*query.shape[:-1], value.shape[-1])), query, value)
    lengths = jnp.full((1,), length)
    inputs = query, key, value
    if key_value_seq_lengths is not None:
        lengths = key_value_seq_lengths.reshape(-1)
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)[..., None, None]
        inputs = (jnp.where(valid, x, 0) for x in inputs)

    groups = key.shape[-2]
    rows, *near = (_folded(x, groups) for x in inputs)
    far = [_folded(x, groups)[:, :, 0] for x in (global_key, global_value)]
    size = min(radius + 1, length)
    rows = _rows(scale * rows, size)
    near = [_windows(x[:, :, 0], size, is_causal) for x in near]
    blocks = _block_layout(lengths, length, block_size, is_causal)
    near_scores = jnp.einsum("bgrjck,bgjwk->bgrjcw", rows, near[0])
    far_scores = jnp.einsum("bgrjck,bgmk->bgrjcm", rows, far[0])
    buckets = {"is_bidirectional": not is_causal, "max_distance": max_distance}
    if local_bias is not None:
        near_scores = near_scores + _near_bias(local_bias, near_scores.shape, buckets)
    if global_bias is not None:
        far_scores = far_scores + _far_bias(global_bias, far_scores.shape, blocks.own, buckets)
    near_visible, far_visible = _visibility(
        blocks, near_scores.shape, far[0].shape[2], radius, is_causal
    )
    y = _average(near_scores, near_visible, near[1], far_scores, far_visible, far[1])
    y = y.reshape(*y.shape[:3], -1, y.shape[-1])[..., :length, :]
    return unfold_heads(y, query, value)


class _BlockLayout(NamedTuple):
    """Layout of the tokens of padded sequences.

    Attributes:
      valid: `[*B, T]`, False for padding.
      own: `[*B, T]`, block index of each token, -1 for padding and tokens without a block.
      complete: `[*B]`, number of complete blocks.
    """

    valid: Array
    own: Array
    complete: Array


def _block_layout(lengths: Array, length: int, size: int, is_causal: bool) -> _BlockLayout:
    lengths = jnp.clip(int32_lengths(lengths), 0, length)
    valid = valid_tokens(lengths, lengths.shape, length)
    complete = lengths // size
    own = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) // size, valid.shape)
    own = own if is_causal else jnp.minimum(own, complete[..., None] - 1)
    return _BlockLayout(valid, jnp.where(valid, own, -1), complete)


def _folded(x: Array, groups: int) -> Array:
    """`[*B, T, N, F]` -> `[B, G, R, T, F]` in at least float32."""
    x = fold_heads(x, groups)
    return x.reshape(x.shape[0] // groups, groups, *x.shape[1:])


def _rows(x: Array, size: int) -> Array:
    """`[..., T, F]` -> `[..., J, C, F]`: chunks of C = size tokens, padded with zeros at the
    end."""
    *lead, length, features = x.shape
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -length % size), (0, 0)])
    return x.reshape(*lead, -(-length // size), size, features)


def _windows(x: Array, size: int, is_causal: bool) -> Array:
    """`[..., T, F]` -> `[..., J, W, F]`: each chunk with the preceding one and, unless causal, the
    next one; zeros out of range."""
    x = _rows(x, size)
    chunks = x.shape[-3]
    around = (1, 0 if is_causal else 1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [around, (0, 0), (0, 0)])
    parts = [x[..., i : i + chunks, :, :] for i in range(1 + sum(around))]
    return jnp.concatenate(parts, -2)


def _offsets(size: int, width: int) -> np.ndarray:
    """Return the positions of the W tokens of a window relative to the C queries, `[C, W]`."""
    return np.arange(width)[None] - size - np.arange(size)[:, None]


def _visibility(
    blocks: _BlockLayout, near: tuple[int, ...], num_blocks: int, radius: int, is_causal: bool
) -> tuple[Array, Array]:
    """Return the masks of visible tokens and of visible sums; they broadcast to the scores."""
    size, width = near[-2:]
    offset = _offsets(size, width)
    within = (offset >= -radius) & (offset <= (0 if is_causal else radius))
    queries = _rows(blocks.valid[:, None, None, :, None], size)
    keys = _windows(blocks.valid[:, None, None, :, None], size, is_causal)
    near_visible = queries & jnp.swapaxes(keys, -1, -2) & within.reshape(1, 1, 1, 1, *offset.shape)
    limit = blocks.complete[:, None, None, None, None, None]
    if is_causal:
        limit = _rows(blocks.own[:, None, None, :, None], size)
    far_visible = queries & (
        jnp.arange(num_blocks, dtype=jnp.int32).reshape(1, 1, 1, 1, 1, -1) < limit
    )
    return near_visible, far_visible


def _near_bias(table: Array, shape: tuple[int, ...], buckets: dict[str, Any]) -> Array:
    """Return the bias `[1, G, R, 1, C, W]` from a table `[num_buckets, num_heads]`."""
    _, groups, _, _, size, width = shape
    bucket = relative_position_bucket(
        jnp.asarray(_offsets(size, width)), num_buckets=len(table), **buckets
    )
    return jnp.asarray(table).T[:, bucket].reshape(1, groups, -1, 1, size, width)


def _far_bias(table: Array, shape: tuple[int, ...], own: Array, buckets: dict[str, Any]) -> Array:
    """Return the bias `[1 or B, G, R, J, C, M]` for tokens of blocks `own` `[1 or B, T]`."""
    _, groups, _, _, size, count = shape
    offset = np.arange(count)[None] - np.arange(count + 1)[:, None]
    bucket = relative_position_bucket(jnp.asarray(offset), num_buckets=len(table), **buckets)
    by_block = jnp.asarray(table).T[:, bucket]  # [N, M + 1, M]
    bias = by_block[:, jnp.maximum(own, 0)]  # [N, B, T, M]
    bias = bias.reshape(groups, len(bias) // groups, *bias.shape[1:])
    return _rows(jnp.moveaxis(bias, 2, 0), size)


def _average(
    near: Array,
    near_visible: Array,
    near_value: Array,
    far: Array,
    far_visible: Array,
    far_value: Array,
) -> Array:
    """Return one softmax over both, `[B, G, R, J, C, V]`; 0 without visible keys."""
    near, far = jnp.where(near_visible, near, -jnp.inf), jnp.where(far_visible, far, -jnp.inf)
    largest = jnp.max(near, -1, keepdims=True)
    largest = jnp.maximum(largest, jnp.max(far, -1, keepdims=True, initial=-jnp.inf))
    largest = where_empty(jax.lax.stop_gradient(largest), 0.0)
    near, far = jnp.exp(near - largest), jnp.exp(far - largest)
    total = jnp.sum(near, -1, keepdims=True) + jnp.sum(far, -1, keepdims=True)
    y = jnp.einsum("bgrjcw,bgjwv->bgrjcv", near, near_value)
    y = y + jnp.einsum("bgrjcm,bgmv->bgrjcv", far, far_value)
    return y / jnp.where(total == 0, 1.0, total)


def _check_blocks(lengths: Array | None, batch: tuple[int, ...], size: int) -> None:
    if size < 1:
        raise ValueError(f"block_size must be at least 1, got {size}")
    if lengths is not None and lengths.shape == (*batch, 2):
        raise NotImplementedError(
            "key_value_seq_lengths: padding on the left is unsupported; blocks begin at position 0"
        )
    check_array("key_value_seq_lengths", lengths, (batch,), jnp.integer)
