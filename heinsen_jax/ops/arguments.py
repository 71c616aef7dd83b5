"""Argument checks and padding shared by all attention ops."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from heinsen_jax.typing import Array, ArrayLike, common_dtype


def check_heads(
    query: Array, key: Array | jax.ShapeDtypeStruct, value: Array, value_name: str = "value"
) -> None:
    """Raise ValueError unless query `[*B, T, N, K]`, key `[*B, S, G, K]` and value `[*B, S, G, V]`
    have matching shapes, with N a multiple of G."""
    shapes = f"query {query.shape}, key {key.shape}, {value_name} {value.shape}"
    for name, x in {"query": query, "key": key, value_name: value}.items():
        if x.ndim < 3:
            raise ValueError(f"{name} must be [..., tokens, heads, depth], got shape {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"batch axes (all but the last three) must be equal: {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and {value_name} must have the same tokens and heads: {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same depth: {shapes}")
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"num_heads {query.shape[-2]} must be a multiple of num_kv_heads {key.shape[-2]}: "
            f"{shapes}"
        )


def check_same_length(
    query: Array,
    key: Array,
    what: str = "causal attention",
    fix: str = "for others pass is_causal=False",
) -> None:
    """Raise ValueError unless the numbers of queries and keys are equal, as `what` requires."""
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{what} needs as many queries as keys, got query {query.shape}, key {key.shape}; {fix}"
        )


def check_paired_heads(name: str, query: Array, key: Array, value: Array) -> None:
    """Raise ValueError unless queries, keys and values of a causal op have the same tokens and
    heads."""
    check_heads(query, key, value)
    check_same_length(query, key, name, "it is causal only")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query and key must have the same heads, got query {query.shape}, key {key.shape}; "
            "repeat the keys and values"
        )


def check_segments(segment_ids: Array | None, query: Array, key: Array) -> None:
    """Raise ValueError if segment ids of keys are given and the number of queries differs."""
    if segment_ids is not None:
        fix = "call the function once for each segment"
        check_same_length(query, key, "segment_ids", fix)


def check_tokens(
    tokens: tuple[int, ...], *, segment_ids: Array | None, key_value_seq_lengths: Array | None
) -> None:
    """Raise ValueError unless segment_ids is `[*B, S]` and key_value_seq_lengths `[*B]` or
    `[*B, 2]`, both of integers, where `tokens` is `(*B, S)`."""
    check_array("segment_ids", segment_ids, (tokens,), jnp.integer)
    lengths = tokens[:-1], (*tokens[:-1], 2)
    check_array("key_value_seq_lengths", key_value_seq_lengths, lengths, jnp.integer)


def is_integer(x: Any) -> bool:
    """Whether x is an integer of Python or NumPy, and no bool."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def check_array(name: str, x: Array | None, shapes: tuple, kind: Any) -> None:
    """Raise ValueError unless `x` is None, or has one of the shapes and a dtype of this kind."""
    if x is None:
        return
    if x.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {expected}, got {x.shape}")
    if not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name} must have a dtype of kind {kind.__name__}, got {x.dtype}")


def check_scores(name: str, x: ArrayLike | None, full: tuple[int, ...]) -> None:
    """Raise ValueError unless `x` is None, or broadcasts to scores `[*B, num_heads, T, S]`, whose
    shape is `full`."""
    shape = () if x is None else np.shape(x)
    pairs = zip(shape[::-1], full[::-1], strict=False)
    if len(shape) > len(full) or any(size not in (1, whole) for size, whole in pairs):
        raise ValueError(
            f"{name} must broadcast to [*B, num_heads, T, S] = {full}, got shape {shape}"
        )


def check_decay(name: str, log_decay: Array | None) -> None:
    """Raise ValueError if a log decay is above 0. Values are unknown, and not checked, under a
    transformation such as `jit`."""
    if log_decay is None or isinstance(log_decay, Tracer):
        return
    if isinstance(log_decay, jax.Array) and not log_decay.is_fully_addressable:
        return
    if np.any(np.asarray(log_decay) > 0):
        raise ValueError(
            f"{name} must be at most 0, got {np.nanmax(np.asarray(log_decay, np.float32)):g}; give "
            "the logarithm of a factor in [0, 1], such as jax.nn.log_sigmoid(x)"
        )


def signed_ids(ids: Array) -> Array:
    """Return ids as int32 or int64. Equality is kept, and so is order unless ids are unsigned
    numbers of 32 or 64 bits. Sums with other numbers would exceed small dtypes."""
    ids = jnp.asarray(ids)
    if ids.dtype in (jnp.uint32, jnp.uint64):
        return ids.view(f"int{8 * ids.dtype.itemsize}")
    return ids.astype(common_dtype(ids, jnp.int32))


def int32_lengths(lengths: Array) -> Array:
    """Return numbers of tokens as int32, clipped to its largest value."""
    lengths = jnp.asarray(lengths)
    if lengths.dtype.itemsize >= 4:
        lengths = jnp.minimum(lengths, np.array(np.iinfo(np.int32).max, lengths.dtype))
    return lengths.astype(jnp.int32)


def valid_tokens(key_value_seq_lengths: Array, batch: tuple[int, ...], length: int) -> Array:
    """Return the mask of valid tokens `[*B, S]`, given their number `[*B]`, or the first one and
    the one past the last `[*B, 2]`."""
    bounds = int32_lengths(key_value_seq_lengths)
    bounds = bounds[..., None] if bounds.ndim == len(batch) else bounds
    index = jnp.arange(length, dtype=jnp.int32).reshape((1,) * len(batch) + (length,))
    inside = index < bounds[..., -1:]
    return inside & (index >= bounds[..., :1]) if bounds.shape[-1] == 2 else inside


def without_padding(
    query: Array, key: Array, value: Array, key_value_seq_lengths: Array | None
) -> tuple[Array, Array, Array]:
    """Replace padding by zeros, since NaN times a weight or cotangent of 0 would be NaN.

    Queries `[*B, T, N, K]` are padded like keys `[*B, S, G, K]` if their number is equal.
    """
    if key_value_seq_lengths is None:
        return query, key, value
    valid = valid_tokens(key_value_seq_lengths, key.shape[:-3], key.shape[-3])[..., None, None]
    if query.shape[-3] == key.shape[-3]:
        query = jnp.where(valid | jnp.isfinite(query), query, 0)
    return query, jnp.where(valid, key, 0), jnp.where(valid, value, 0)


def segment_starts(segment_ids: Array, valid: Array | None) -> Array:
    """Return the mask `[*B, S]` of tokens that begin a segment, a run of equal ids, but the first.

    Padding, where `valid` `[*B, S]` is False, belongs to the adjacent segment.
    """
    starts = segment_ids[..., 1:] != segment_ids[..., :-1]
    if valid is not None:
        starts = starts & valid[..., 1:] & valid[..., :-1]
    padding = [(0, 0)] * (starts.ndim - 1) + [(1, 0)]
    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]


def positions_in_segments(
    starts: Array | None, shape: tuple[int, ...], before: Array | None = None
) -> Array:
    """Return the position of each token in its segment, of shape `(*B, S)`, given the tokens that
    begin segments.

    The first segment has `before` `[*B]` tokens before these, none when None.
    """
    index = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)
    start = jnp.zeros_like(index)
    if starts is not None:
        start = jax.lax.cummax(jnp.where(starts, index, 0), axis=len(shape) - 1)
    if before is None:
        return index - start
    return index - start + jnp.where(start == 0, before[..., None], 0)


def check_bias(denominator_bias: float) -> None:
    """Raise ValueError unless the bias is a finite number >= 0."""
    if not 0 <= denominator_bias < math.inf:
        raise ValueError(f"denominator_bias must be at least 0 and finite, got {denominator_bias}")
