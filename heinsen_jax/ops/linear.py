"""Linear attention: a feature map of queries and keys replaces the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import (
    check_array,
    check_heads,
    check_same_length,
    check_tokens,
    valid_tokens,
    without_padding,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import astype_like
from heinsen_jax.ops.matrix_state import MatrixOperands, recur_with_normalizer, segment_decay
from heinsen_jax.ops.numerics import divide_or_zero, einsum
from heinsen_jax.typing import (
    Array,
    Float,
    Keys,
    Lengths,
    Mixed,
    Query,
    Segments,
    Values,
    common_dtype,
    pytree_dataclass,
    wide,
)

FeatureMap = Literal["elu1", "relu", "identity"] | Callable[[Array], Array]


@jax.custom_jvp
def elu1(x: Array) -> Array:
    """elu(x) + 1, as exp(x) below 0, where the sum would round to 0."""
    return jnp.maximum(x, 0) + jnp.exp(jnp.minimum(x, 0))


@elu1.defjvp
def _elu1_jvp(primals, tangents):
    features = elu1(*primals)
    return features, jnp.minimum(features, 1) * tangents[0]


FEATURE_MAPS = {"elu1": elu1, "relu": jax.nn.relu, "identity": lambda x: x}


@pytree_dataclass
class LinearAttentionState:
    """State of linear attention.

        S = sum_s phi(k_s) v_s^T,    Z = sum_s phi(k_s)

    States of disjoint sets of tokens add up.

    Attributes:
      s: S `[..., num_kv_heads, feature_depth, value_depth]`.
      z: Z `[..., num_kv_heads, feature_depth]`.
    """

    s: Float[Array, "*B G F V"]
    z: Float[Array, "*B G F"]

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_kv_heads: int,
        feature_depth: int,
        value_depth: int,
        dtype=jnp.float32,
    ) -> LinearAttentionState:
        """Return the state of no tokens: 0."""
        shape = (*batch_shape, num_kv_heads, feature_depth)
        return cls(jnp.zeros((*shape, value_depth), dtype), jnp.zeros(shape, dtype))

    def merge(self, other: LinearAttentionState) -> LinearAttentionState:
        """Add the states of two sets of tokens."""
        return jax.tree.map(jnp.add, self, other)


@overload
def linear_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    feature_map: FeatureMap = "elu1",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    epsilon: float = 1e-6,
    initial_state: LinearAttentionState | None = None,
    return_state: Literal[False] = False,
) -> Mixed: ...


@overload
def linear_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    feature_map: FeatureMap = "elu1",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    epsilon: float = 1e-6,
    initial_state: LinearAttentionState | None = None,
    return_state: Literal[True],
) -> tuple[Mixed, LinearAttentionState]: ...


@over_devices
def linear_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    feature_map: FeatureMap = "elu1",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    epsilon: float = 1e-6,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
) -> Mixed | tuple[Mixed, LinearAttentionState]:
    r"""Attention with weights phi(q) . phi(k), at constant cost per token.

        S = sum_s phi(k_s) v_s^T,    Z = sum_s phi(k_s)                 (10), (11)
        Y_t = phi(q_t) S / (phi(q_t) . Z + epsilon)                     (12)

    where s runs over the tokens up to and including t if causal, otherwise over all tokens. No
    scale 1/sqrt(K) is applied. Sums are computed in linear space, in float32 (or float64), and must
    not exceed its range.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, S, num_kv_heads, value_depth]`.
      feature_map: phi, applied to the last axis: "elu1", elu(x) + 1, which is positive; "relu";
        "identity", for features that are already computed; or a function of an array. With features
        of both signs Y is not an average of values, and the normalizer may approach 0. For exp,
        which exceeds the range of linear space, use `heinsen_attention`.
      is_causal: whether tokens attend only to themselves and earlier tokens; then S must equal T.
      segment_ids: `[*B, S]`, integers: tokens attend only within their own segment, a run of equal
        ids. `initial_state` belongs to the first segment, the returned state to the last. T must
        equal S.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last. Values at padding, NaN included,
        have no effect.
      epsilon: added to the normalizer; it shrinks Y where all features are small.
      initial_state: state after the preceding tokens; the empty state when None.
      return_state: whether to also return the state after all S tokens.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, or a pair of it and a `LinearAttentionState`. Rows
      without visible keys, or with all weights 0, are 0, with zero gradients.

    Raises:
      ValueError: shapes, dtypes, the feature map or the state do not fit; the message says which.
      NotImplementedError: segments are given and the numbers of queries and keys differ.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> linear_attention(key, key, value).ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Katharopoulos et al., 2020, Transformers are RNNs: Fast Autoregressive Transformers with
      Linear Attention, arXiv:2006.16236.
    """
    _check(query, key, value, is_causal, segment_ids, key_value_seq_lengths)
    *batch, sources, groups, value_depth = value.shape
    output_dtype = common_dtype(query, key, value)
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    sums = () if initial_state is None else (initial_state.s,)
    dtype = wide(output_dtype, *sums)
    query, key = _features(feature_map, query.astype(dtype), key.astype(dtype))
    valid = None
    if key_value_seq_lengths is not None:  # features of 0 need not be 0
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), sources)
        key = jnp.where(valid[..., None, None], key, 0)

    features = key.shape[-1]
    if initial_state is None:
        initial_state = LinearAttentionState.empty(batch, groups, features, value_depth, dtype)
    shapes = (*batch, groups, features, value_depth), (*batch, groups, features)
    check_array("initial_state.s", initial_state.s, shapes[:1], jnp.floating)
    check_array("initial_state.z", initial_state.z, shapes[1:], jnp.floating)

    # Y does not depend on the norm of phi(q): near 1, products stay in range.
    largest = lax.stop_gradient(jnp.max(jnp.abs(query), -1, keepdims=True, initial=0))
    largest = jnp.where(largest == 0, 1, largest)
    *_, length, heads, _ = query.shape
    size = math.prod(batch)
    tokens = MatrixOperands(
        (query / largest).reshape(size, length, groups, heads // groups, features),
        key.reshape(size, sources, groups, features),
        value.astype(dtype).reshape(size, sources, groups, value_depth),
        segment_decay(segment_ids, valid, groups, dtype),
    )
    state = LinearAttentionState(
        initial_state.s.astype(dtype).reshape(size * groups, features, value_depth),
        initial_state.z.astype(dtype).reshape(size * groups, features),
    )
    both_ways = _bidirectional if segment_ids is None else _within_segments
    (numerator, total), after = (_causal if is_causal else both_ways)(tokens, state)
    total = total.reshape(largest.shape) + epsilon / largest
    y = divide_or_zero(numerator.reshape(*batch, length, heads, value_depth), total).astype(
        output_dtype
    )
    if not return_state:
        return y
    after = LinearAttentionState(after.s.reshape(shapes[0]), after.z.reshape(shapes[1]))
    return y, astype_like(after, initial_state)


def _check(query, key, value, is_causal, segment_ids, key_value_seq_lengths) -> None:
    check_heads(query, key, value)
    check_tokens(
        key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths
    )
    if is_causal:
        check_same_length(query, key)
    elif segment_ids is not None and query.shape[-3] != key.shape[-3]:
        raise NotImplementedError(
            "segment_ids: unsupported with is_causal=False and different numbers of queries and "
            "keys, since ids of queries are not given"
        )


def _features(feature_map: FeatureMap, query: Array, key: Array) -> tuple[Array, Array]:
    if isinstance(feature_map, str) and feature_map not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map must be a function or one of {[*FEATURE_MAPS]}, got {feature_map!r}; for "
            "exp use heinsen_attention"
        )
    phi = FEATURE_MAPS[feature_map] if isinstance(feature_map, str) else feature_map
    features = phi(query), phi(key)
    for x, mapped in zip((query, key), features, strict=True):
        if mapped.shape[:-1] != x.shape[:-1] or mapped.dtype != x.dtype:
            raise ValueError(
                f"feature_map must change only the last axis and no dtype, but maps {x.dtype} "
                f"{x.shape} to {mapped.dtype} {mapped.shape}"
            )
    return features


def _bidirectional(
    tokens: MatrixOperands, state: LinearAttentionState
) -> tuple[tuple[Array, Array], LinearAttentionState]:
    """As `_causal`, but every query attends to all tokens; a single segment."""
    query, key, value = tokens.query, tokens.key, tokens.value
    batch, _, groups, _ = key.shape
    s = einsum("bsgf,bsgv->bgfv", key, value).reshape(state.s.shape) + state.s
    z = jnp.sum(key, 1).reshape(state.z.shape) + state.z
    numerator = einsum("btgrf,bgfv->btgrv", query, s.reshape(batch, groups, *s.shape[1:]))
    total = einsum("btgrf,bgf->btgr", query, z.reshape(batch, groups, *z.shape[1:]))
    return (numerator, total[..., None]), LinearAttentionState(s, z)


def _within_segments(
    tokens: MatrixOperands, state: LinearAttentionState
) -> tuple[tuple[Array, Array], LinearAttentionState]:
    """As `_causal`, but every query attends to its whole segment: tokens up to it, then later
    ones."""
    sums, after = _causal(tokens, state)
    backwards = jax.tree.map(partial(jnp.flip, axis=1), tokens)
    assert backwards.head_decay is not None
    backwards = backwards._replace(head_decay=jnp.roll(backwards.head_decay, 1, 1))
    later, _ = _causal(backwards, jax.tree.map(jnp.zeros_like, state), attends_to_itself=False)
    return jax.tree.map(lambda x, y: x + jnp.flip(y, 1), sums, later), after


def _causal(
    tokens: MatrixOperands, state: LinearAttentionState, *, attends_to_itself: bool = True
) -> tuple[tuple[Array, Array], LinearAttentionState]:
    """Return phi(q) S `[B, T, G, R, V]`, phi(q) . Z `[B, T, G, R, 1]`, and the state after all
    tokens."""
    sums, after = recur_with_normalizer(
        tokens, state.s, state.z, attends_to_itself=attends_to_itself
    )
    return sums, LinearAttentionState(*after)
