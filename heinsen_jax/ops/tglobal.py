"""Transient-global attention (TGlobal): near tokens, and the sum of every block of tokens.

References:
  Guo et al., 2021, LongT5, arXiv:2112.07916.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops.arguments import check_array, check_heads, check_same_length, is_there
from heinsen_jax.ops.layout import fold_heads, unfold_heads
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array, Features, Float, Integer, Keys, Lengths, Mixed, Query, Values


def relative_position_bucket(
    relative_position: Integer[Array, "*B"],
    *,
    is_bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Integer[Array, "*B"]:
    """T5's buckets of relative positions: one each for small ones, wider ones farther away.

    With n buckets (half of them for each side, if bidirectional), distances below n/2 have their
    own, the others n/2 + floor(n/2 log(2 distance / n) / log(2 max_distance / n)), at most n - 1.

    Args:
      relative_position: key's minus query's, integers of any shape.
      is_bidirectional: whether later keys have buckets of their own, the upper half; or else are
        all in bucket 0.
      num_buckets: how many there are.
      max_distance: from where on all are in one.

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
            f"num_buckets={num_buckets} must be at least {4 if is_bidirectional else 2} and "
            f"max_distance={max_distance} above {own}, the distances with buckets of their own"
        )
    # A table, in the published float32, since rounding decides at the buckets' borders.
    far = np.arange(own, max_distance + 1, dtype=np.float32)
    steps = np.log(far / np.float32(own)) / np.float32(np.log(max_distance / own))
    steps = (steps * np.float32(one_side - own)).astype(np.int32)
    table = np.concatenate([np.arange(own), np.minimum(own + steps, one_side - 1)])
    relative_position = jnp.asarray(relative_position)
    before = jnp.maximum(-relative_position, 0)
    distance = jnp.abs(relative_position) if is_bidirectional else before
    bucket = jnp.asarray(table, jnp.int32)[jnp.minimum(distance, max_distance)]
    return bucket + one_side * (relative_position > 0) if is_bidirectional else bucket


def block_sums(
    x: Features,
    block_size: int,
    *,
    is_causal: bool = False,
    key_value_seq_lengths: Lengths | None = None,
) -> tuple[Float[Array, "*B J D"], Integer[Array, "*B T"]]:
    """The sum of the tokens of every complete block, and in which block each token is.

    Tokens after the last complete block (orphans) join it; or, if causal, are in a block of their
    own, which has no sum: otherwise what comes later would change what earlier ones see.

    Args:
      x: `[*B, T, D]`.
      block_size: tokens in a block.
      is_causal: as above.
      key_value_seq_lengths: `[*B]`, how many tokens there are, the rest being padding.

    Returns:
      Sums `[*B, T // block_size, D]`, in float32 at least, 0 of blocks that a text does not
      complete; and the blocks' numbers `[*B, T]`, -1 of padding and of tokens that have none.

    Raises:
      ValueError: shapes do not fit; the message says which.
      NotImplementedError: padding on the left, `[*B, 2]`.

    Examples:
      >>> sums, blocks = block_sums(jnp.arange(1.0, 6.0).reshape(5, 1), block_size=2)
      >>> sums.ravel().tolist(), blocks.tolist()
      ([3.0, 12.0], [0, 0, 1, 1, 1])
    """
    if x.ndim < 2:
        raise ValueError(f"x must be [..., tokens, features], has shape {x.shape}")
    *batch, length, features = x.shape
    _check_blocks(key_value_seq_lengths, tuple(batch), block_size)
    lengths = jnp.full(batch, length) if key_value_seq_lengths is None else key_value_seq_lengths
    there, own, complete = _blocks(lengths, length, block_size, is_causal)
    complete, count = complete[..., None], length // block_size
    x = jnp.where(there[..., None], x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))
    sums = x[..., : count * block_size, :].reshape(*batch, count, block_size, features).sum(-2)
    index = jnp.broadcast_to(jnp.arange(count), (*batch, count))
    sums = jnp.where((index < complete)[..., None], sums, 0)
    if not is_causal:
        place = jnp.broadcast_to(jnp.arange(length), there.shape)
        orphans = jnp.where((place >= complete * block_size)[..., None], x, 0).sum(-2)
        sums = sums + jnp.where((index == complete - 1)[..., None], orphans[..., None, :], 0)
    return sums, own


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

    Summaries are made by the caller: with `block_sums` of the layer's inputs, normalised, by the
    projections that the tokens' keys and values have. They see nothing themselves. If causal, a
    token sees the radius tokens before it, itself, and the blocks that were complete before its
    own block began. Time and memory are O(T (radius + T / block_size)).

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, T, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, T, num_kv_heads, value_depth]`.
      global_key: K' `[*B, M, num_kv_heads, key_depth]`, M = T // block_size.
      global_value: V' `[*B, M, num_kv_heads, value_depth]`.
      radius: how many tokens are seen on each side.
      block_size: tokens in a block; those after the last complete one are as in `block_sums`.
      local_bias: `[num_buckets, num_heads]`, added to the scores of tokens by the bucket of their
        relative position (`relative_position_bucket`, bidirectional unless causal); 0 when None.
      global_bias: likewise by a block's number minus that of the token's own block.
      max_distance: of the buckets.
      is_causal: as above.
      key_value_seq_lengths: `[*B]`, how many tokens there are, the rest being padding. What lies
        there, NaN included, changes nothing; its outputs are 0.
      scale: of the scores; 1, not 1 / sqrt(key_depth), as in T5, whose initial queries are smaller.

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
    check_same_length(query, key)
    *batch, length, heads, _ = query.shape
    _check_blocks(key_value_seq_lengths, tuple(batch), block_size)
    blocks = *batch, length // block_size
    check_array("global_key", global_key, ((*blocks, *key.shape[-2:]),), jnp.floating)
    check_array("global_value", global_value, ((*blocks, *value.shape[-2:]),), jnp.floating)
    if radius < 0:
        raise ValueError(f"radius must not be negative, is {radius}")
    for name, table in {"local_bias": local_bias, "global_bias": global_bias}.items():
        if table is not None:
            check_array(name, table, ((len(table), heads),), jnp.floating)
    if 0 in query.shape[:-1]:
        return unfold_heads(jnp.zeros((*query.shape[:-1], value.shape[-1])), query, value)
    lengths = jnp.full((1,), length)
    inputs = query, key, value
    if key_value_seq_lengths is not None:
        lengths = key_value_seq_lengths.reshape(-1)
        there = is_there(key_value_seq_lengths, tuple(batch), length)[..., None, None]
        inputs = (jnp.where(there, x, 0) for x in inputs)

    groups = key.shape[-2]
    rows, *near = (_folded(x, groups) for x in inputs)
    far = [_folded(x, groups)[:, :, 0] for x in (global_key, global_value)]
    size = min(radius + 1, length)
    rows = _rows(scale * rows, size)
    near = [_windows(x[:, :, 0], size, is_causal) for x in near]
    blocks = _blocks(lengths, length, block_size, is_causal)
    near_scores = jnp.einsum("bgrjck,bgjwk->bgrjcw", rows, near[0])
    far_scores = jnp.einsum("bgrjck,bgmk->bgrjcm", rows, far[0])
    buckets = {"is_bidirectional": not is_causal, "max_distance": max_distance}
    if local_bias is not None:
        near_scores = near_scores + _near_bias(local_bias, near_scores.shape, buckets)
    if global_bias is not None:
        far_scores = far_scores + _far_bias(global_bias, far_scores.shape, blocks.own, buckets)
    near_seen, far_seen = _seen(blocks, near_scores.shape, far[0].shape[2], radius, is_causal)
    y = _average(near_scores, near_seen, near[1], far_scores, far_seen, far[1])
    y = y.reshape(*y.shape[:3], -1, y.shape[-1])[..., :length, :]
    return unfold_heads(y, query, value)


class _Blocks(NamedTuple):
    """Where the tokens of texts are.

    Attributes:
      there: `[*B, T]`, which are no padding.
      own: `[*B, T]`, the number of each token's block, -1 of padding and of a token without one.
      complete: `[*B]`, how many blocks are complete.
    """

    there: Array
    own: Array
    complete: Array


def _blocks(lengths: Array, length: int, size: int, is_causal: bool) -> _Blocks:
    lengths = jnp.clip(lengths, 0, length)
    there = is_there(lengths, lengths.shape, length)
    complete = lengths // size
    own = jnp.broadcast_to(jnp.arange(length) // size, there.shape)
    own = own if is_causal else jnp.minimum(own, complete[..., None] - 1)
    return _Blocks(there, jnp.where(there, own, -1), complete)


def _folded(x: Array, groups: int) -> Array:
    """`[*B, T, N, F]` -> `[B, G, R, T, F]` in float32 at least."""
    x = fold_heads(x, groups)
    return x.reshape(x.shape[0] // groups, groups, *x.shape[1:])


def _rows(x: Array, size: int) -> Array:
    """`[..., T, F]` -> `[..., J, C, F]`: pieces of C = size tokens, with zeros at the end."""
    *lead, length, features = x.shape
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -length % size), (0, 0)])
    return x.reshape(*lead, -(-length // size), size, features)


def _windows(x: Array, size: int, is_causal: bool) -> Array:
    """`[..., T, F]` -> `[..., J, W, F]`: each piece after the one before it, and before the one
    after it unless causal; zeros where there is none."""
    x = _rows(x, size)
    pieces = x.shape[-3]
    around = (1, 0 if is_causal else 1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [around, (0, 0), (0, 0)])
    parts = [x[..., i : i + pieces, :, :] for i in range(1 + sum(around))]
    return jnp.concatenate(parts, -2)


def _offsets(size: int, width: int) -> np.ndarray:
    """Positions of the W tokens of a window, less those of the C of its piece, `[C, W]`."""
    return np.arange(width)[None] - size - np.arange(size)[:, None]


def _seen(
    blocks: _Blocks, near: tuple[int, ...], num_blocks: int, radius: int, is_causal: bool
) -> tuple[Array, Array]:
    """Which tokens of its window, and which sums, each token sees: as scores, with fewer axes."""
    size, width = near[-2:]
    offset = _offsets(size, width)
    within = (offset >= -radius) & (offset <= (0 if is_causal else radius))
    queries = _rows(blocks.there[:, None, None, :, None], size)
    keys = _windows(blocks.there[:, None, None, :, None], size, is_causal)
    near_seen = queries & jnp.swapaxes(keys, -1, -2) & within.reshape(1, 1, 1, 1, *offset.shape)
    limit = blocks.complete[:, None, None, None, None, None]
    if is_causal:
        limit = _rows(blocks.own[:, None, None, :, None], size)
    far_seen = queries & (jnp.arange(num_blocks).reshape(1, 1, 1, 1, 1, -1) < limit)
    return near_seen, far_seen


def _near_bias(table: Array, shape: tuple[int, ...], buckets: dict[str, Any]) -> Array:
    """`[1, G, R, 1, C, W]` from a table `[num_buckets, num_heads]`."""
    _, groups, _, _, size, width = shape
    bucket = relative_position_bucket(
        jnp.asarray(_offsets(size, width)), num_buckets=len(table), **buckets
    )
    return jnp.asarray(table).T[:, bucket].reshape(1, groups, -1, 1, size, width)


def _far_bias(table: Array, shape: tuple[int, ...], own: Array, buckets: dict[str, Any]) -> Array:
    """`[1 or B, G, R, J, C, M]`, for tokens of blocks `own` `[1 or B, T]`."""
    _, groups, _, _, size, count = shape
    offset = np.arange(count)[None] - np.arange(count + 1)[:, None]
    bucket = relative_position_bucket(jnp.asarray(offset), num_buckets=len(table), **buckets)
    by_block = jnp.asarray(table).T[:, bucket]  # [N, M + 1, M]
    bias = by_block[:, jnp.maximum(own, 0)]  # [N, B, T, M]
    bias = bias.reshape(groups, len(bias) // groups, *bias.shape[1:])
    return _rows(jnp.moveaxis(bias, 2, 0), size)


def _average(
    near: Array, near_seen: Array, near_value: Array, far: Array, far_seen: Array, far_value: Array
) -> Array:
    """One softmax over both, `[B, G, R, J, C, V]`; 0 where nothing is seen."""
    near, far = jnp.where(near_seen, near, -jnp.inf), jnp.where(far_seen, far, -jnp.inf)
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
        raise ValueError(f"block_size must be at least 1, is {size}")
    if lengths is not None and lengths.shape == (*batch, 2):
        raise NotImplementedError("key_value_seq_lengths of padding on the left: blocks begin at 0")
    check_array("key_value_seq_lengths", lengths, (batch,), jnp.integer)
