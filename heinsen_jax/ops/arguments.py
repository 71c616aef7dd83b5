"""What the arguments of all attention ops have in common: checks, and padding."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from heinsen_jax.typing import Array


def check_heads(
    query: Array, key: Array | jax.ShapeDtypeStruct, value: Array, value_name: str = "value"
) -> None:
    """Raises ValueError unless query `[*B, T, N, K]`, key `[*B, S, G, K]` and value
    `[*B, S, G, V]` fit, N being a multiple of G."""
    shapes = f"query {query.shape}, key {key.shape}, {value_name} {value.shape}"
    for name, x in {"query": query, "key": key, value_name: value}.items():
        if x.ndim < 3:
            raise ValueError(f"{name} must be [..., tokens, heads, depth], has shape {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, is {x.dtype}")
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
    """Raises ValueError unless there are as many queries as keys, as `what` needs."""
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{what} needs as many queries as keys; {fix}: query {query.shape}, key {key.shape}"
        )


def check_segments(segment_ids: Array | None, query: Array, key: Array) -> None:
    """Raises ValueError where segments are given, of keys, and there are not as many queries."""
    if segment_ids is not None:
        fix = "those of the queries are not given: call it for each segment"
        check_same_length(query, key, "segment_ids", fix)


def check_tokens(
    tokens: tuple[int, ...], *, segment_ids: Array | None, key_value_seq_lengths: Array | None
) -> None:
    """Raises ValueError unless segment_ids is `[*B, S]` and key_value_seq_lengths `[*B]` or
    `[*B, 2]`, both of integers, where `tokens` is `(*B, S)`."""
    check_array("segment_ids", segment_ids, (tokens,), jnp.integer)
    lengths = tokens[:-1], (*tokens[:-1], 2)
    check_array("key_value_seq_lengths", key_value_seq_lengths, lengths, jnp.integer)


def check_array(name: str, x: Array | None, shapes: tuple, kind: Any) -> None:
    """Raises ValueError unless `x` is None, or has one of the shapes and a dtype of the kind."""
    if x is None:
        return
    if x.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {expected}, has {x.shape}")
    if not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name} must be of a kind of {kind.__name__}, is {x.dtype}")


def is_there(key_value_seq_lengths: Array, batch: tuple[int, ...], length: int) -> Array:
    """Which tokens are no padding, `[*B, S]`, given how many there are, `[*B]`, or the first one
    and the one past the last, `[*B, 2]`."""
    bounds = jnp.asarray(key_value_seq_lengths)
    bounds = bounds[..., None] if bounds.ndim == len(batch) else bounds
    index = jnp.arange(length).reshape((1,) * len(batch) + (length,))
    inside = index < bounds[..., -1:]
    return inside & (index >= bounds[..., :1]) if bounds.shape[-1] == 2 else inside


def without_padding(
    query: Array, key: Array, value: Array, key_value_seq_lengths: Array | None
) -> tuple[Array, Array, Array]:
    """With zeros at padding, since NaN times a weight or cotangent of 0 would be NaN.

    Of queries `[*B, T, N, K]`, too, where there are as many as keys `[*B, S, G, K]`.
    """
    if key_value_seq_lengths is None:
        return query, key, value
    there = is_there(key_value_seq_lengths, key.shape[:-3], key.shape[-3])[..., None, None]
    if query.shape[-3] == key.shape[-3]:
        query = jnp.where(there | jnp.isfinite(query), query, 0)
    return query, jnp.where(there, key, 0), jnp.where(there, value, 0)


def document_starts(segment_ids: Array, there: Array | None) -> Array:
    """Which tokens begin a document, a run of equal numbers, after the first: bool `[*B, S]`.

    Padding, where `there` `[*B, S]` is False, belongs to the document beside it.
    """
    starts = segment_ids[..., 1:] != segment_ids[..., :-1]
    if there is not None:
        starts = starts & there[..., 1:] & there[..., :-1]
    padding = [(0, 0)] * (starts.ndim - 1) + [(1, 0)]
    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]


def check_bias(denominator_bias: float) -> None:
    """Raises ValueError unless the bias is a finite number >= 0."""
    if not 0 <= denominator_bias < math.inf:
        raise ValueError(f"denominator_bias must be at least 0 and finite, is {denominator_bias}")
