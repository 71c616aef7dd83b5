"""Performer attention: the softmax kernel estimated from random features (FAVOR+)."""

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import check_array, check_heads, check_tokens, without_padding
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.linear import LinearAttentionState, linear_attention
from heinsen_jax.ops.log_attention import HeinsenAttentionState, heinsen_attention
from heinsen_jax.ops.numerics import log_add_exp
from heinsen_jax.typing import (
    Array,
    DTypeLike,
    Float,
    Keys,
    Lengths,
    Mixed,
    Query,
    Segments,
    Values,
    common_dtype,
    wide,
)

# Added by the published code to each feature and, if causal, to each sum of key features.
FEATURE_EPSILON = {"softmax": 1e-4, "relu": 1e-3}
SUM_EPSILON = 1e-6


@overload
def performer_attention(
    query: Query,
    key: Keys,
    value: Values,
    projection: Float[Array, "M K"],
    *,
    kernel: Literal["softmax", "relu"] = "softmax",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    epsilon: float | None = None,
    initial_state: HeinsenAttentionState | LinearAttentionState | None = None,
    return_state: Literal[False] = False,
    implementation: Literal["log_space", "published"] | None = None,
) -> Mixed: ...


@overload
def performer_attention(
    query: Query,
    key: Keys,
    value: Values,
    projection: Float[Array, "M K"],
    *,
    kernel: Literal["softmax", "relu"] = "softmax",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    epsilon: float | None = None,
    initial_state: HeinsenAttentionState | LinearAttentionState | None = None,
    return_state: Literal[True],
    implementation: Literal["log_space", "published"] | None = None,
) -> tuple[Mixed, HeinsenAttentionState | LinearAttentionState]: ...


@over_devices
def performer_attention(
    query: Query,
    key: Keys,
    value: Values,
    projection: Float[Array, "M K"],
    *,
    kernel: Literal["softmax", "relu"] = "softmax",
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    epsilon: float | None = None,
    initial_state: HeinsenAttentionState | LinearAttentionState | None = None,
    return_state: bool = False,
    implementation: Literal["log_space", "published"] | None = None,
) -> Mixed | tuple[Mixed, HeinsenAttentionState | LinearAttentionState]:
    r"""Linear attention whose weights estimate softmax attention's from random features.

        phi(x) = M^-1/2 (exp(W x' - |x'|^2 / 2) + epsilon),    x' = x K^-1/4
        E[phi(q) . phi(k)] = exp(q . k / sqrt(K))    for epsilon = 0             (Lemma 1)
        Y_t = phi(q_t) sum_s phi(k_s) v_s^T / (phi(q_t) . sum_s phi(k_s))

    where s runs over the tokens up to and including t if causal, otherwise over all tokens. Weights
    are unbiased; Y, a ratio, converges to softmax attention as M grows. Features stay in log space:
    this is `heinsen_attention` of log phi, finite for every finite input, with the same state.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; num_heads a multiple of num_kv_heads.
      value: `[*B, S, num_kv_heads, value_depth]`.
      projection: W `[M, key_depth]`, for example from `orthogonal_features`, with M about K log K.
      kernel: "softmax", or "relu": phi(x) = max(W x', 0) + epsilon, which estimates no softmax and
        is evaluated by `linear_attention`.
      is_causal, segment_ids, key_value_seq_lengths: as in `heinsen_attention`.
      epsilon: added to each feature, whatever the size of the others; 0 when None, or 1e-3 with
        kernel="relu". It biases weights by about epsilon.
      initial_state, return_state: a `HeinsenAttentionState` with M key features, as in
        `heinsen_attention`, or a `LinearAttentionState` with kernel="relu".
      implementation: "log_space", with first derivatives in reverse mode only, as the "chunked" one
        of `log_attention`; "published": features relative to the largest one, for keys over
        all positions, later ones included, plus epsilon (1e-4 when None) and, if causal, another
        1e-6 per feature in the normalizer; None selects the first. kernel="relu" has a single form.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, 0 for queries without visible keys; with `return_state`,
      the pair of it and the state after all S tokens.

    Raises:
      ValueError: shapes, dtypes or the state do not fit; the message says which.
      NotImplementedError: "published" with states, segments or padding; kernel="relu" in log space.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> projection = orthogonal_features(jax.random.key(0), 4, 2)
      >>> performer_attention(key, key, value, projection).ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Choromanski et al., 2021, Rethinking Attention with Performers, arXiv:2009.14794.
    """
    check_heads(query, key, value)
    check_tokens(
        key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths
    )
    _check(query, projection, kernel, epsilon, implementation)
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    dtype = common_dtype(query, key, value)
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "segment_ids": segment_ids,
        "key_value_seq_lengths": key_value_seq_lengths,
        "initial_state": initial_state,
        "return_state": return_state,
    }
    if kernel == "relu":
        epsilon = FEATURE_EPSILON["relu"] if epsilon is None else epsilon

        def features(x: Array) -> Array:
            return jax.nn.relu(_projected(x, projection)[0]) + epsilon

        return linear_attention(query, key, value, feature_map=features, epsilon=0, **options)
    if implementation == "published":
        _refuse(segment_ids, key_value_seq_lengths, initial_state, return_state)
        epsilon = FEATURE_EPSILON["softmax"] if epsilon is None else epsilon
        return _published(query, key, value, projection, is_causal, epsilon).astype(dtype)

    epsilon = 0 if epsilon is None else epsilon
    log_query, query_norm = _projected(query, projection)
    log_key, key_norm = _projected(key, projection)
    log_key = _plus(log_key - key_norm, epsilon)
    if epsilon:  # if 0, a common factor of all features of a query cancels
        log_query = _plus(log_query - query_norm, epsilon)
    y = heinsen_attention(log_query, log_key, value, **options)
    return (y[0].astype(dtype), y[1]) if return_state else y.astype(dtype)


def orthogonal_features(
    key: Array,
    num_features: int,
    depth: int,
    *,
    scaling: Literal[0, 1] = 0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "{num_features} {depth}"]:
    """Return random projections for `performer_attention`, orthogonal in blocks of `depth` rows.

    Args:
      key: a key of `jax.random`.
      num_features: M, number of rows.
      depth: K, length of a row. Blocks of K rows are independent of each other.
      scaling: norms of the rows. 0: as for independent normal vectors, so that each row is normally
        distributed and weights are unbiased. 1: sqrt(depth).
      dtype: dtype of W.

    Returns:
      W `[num_features, depth]`.

    Raises:
      ValueError: a size is below 1, or scaling is neither 0 nor 1.

    Examples:
      >>> rows = orthogonal_features(jax.random.key(0), 2, 4, scaling=1)
      >>> jnp.abs(rows @ rows.T).round().tolist()
      [[4.0, 0.0], [0.0, 4.0]]

    References:
      Choromanski et al., 2021, Rethinking Attention with Performers, arXiv:2009.14794.
    """
    if num_features < 1 or depth < 1:
        raise ValueError(f"num_features and depth must be >= 1, got {num_features} and {depth}")
    if scaling not in (0, 1):
        raise ValueError(f"scaling must be 0 or 1, got {scaling!r}")
    direction_key, norm_key = jax.random.split(key)
    shape = (-(-num_features // depth),)
    blocks = jax.random.orthogonal(direction_key, depth, shape, dtype=wide(dtype)).astype(dtype)
    directions = blocks.reshape(-1, depth)[:num_features]
    if scaling == 1:
        return math.sqrt(depth) * directions
    normal = jax.random.normal(norm_key, (num_features, depth), dtype)
    return jnp.linalg.norm(normal, axis=-1, keepdims=True) * directions


def _check(query, projection, kernel, epsilon, implementation) -> None:
    if projection.ndim != 2 or projection.shape[0] < 1:
        raise ValueError(
            f"projection must be [features >= 1, key_depth], got shape {projection.shape}"
        )
    expected = projection.shape[0], query.shape[-1]
    check_array("projection", projection, (expected,), jnp.floating)
    if epsilon is not None and epsilon < 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}")
    if kernel not in FEATURE_EPSILON:
        raise ValueError(f"kernel must be one of {[*FEATURE_EPSILON]}, got {kernel!r}")
    if implementation not in (None, "log_space", "published"):
        raise ValueError(
            f"implementation must be None, 'log_space' or 'published', got {implementation!r}"
        )
    if kernel == "relu" and implementation == "log_space":
        raise NotImplementedError('kernel="relu" is not in log space; pass implementation=None')


def _refuse(*given: Any) -> None:
    names = "segment_ids", "key_value_seq_lengths", "initial_state", "return_state"
    used = [name for name, x in zip(names, given, strict=True) if x is not None and x is not False]
    if used:
        raise NotImplementedError(
            f'implementation="published" has no {", ".join(used)}: its features depend on all '
            'positions; "log_space" has'
        )


def _projected(x: Array, projection: Array) -> tuple[Array, Array]:
    """Return W x' `[..., M]` and |x'|^2 / 2 `[..., 1]`, in at least float32."""
    dtype = wide(x)
    x, scale = x.astype(dtype), x.shape[-1] ** -0.25
    projected = jnp.einsum("...k,mk->...m", x, scale * projection.astype(dtype))
    return projected, jnp.sum(x * x, -1, keepdims=True) * (scale**2 / 2)


def _plus(log_features: Array, epsilon: float) -> Array:
    if not epsilon:
        return log_features
    return log_add_exp(log_features, jnp.full_like(log_features, math.log(epsilon)))


def _published(query, key, value, projection, is_causal: bool, epsilon: float) -> Array:
    def features(x: Array, axes: tuple[int, ...]) -> Array:
        projected, norm = _projected(x, projection)
        largest = jnp.max(projected, axes, keepdims=True, initial=-jnp.inf)
        projected = jnp.exp(projected - norm - lax.stop_gradient(largest))
        return projection.shape[0] ** -0.5 * (projected + epsilon)

    query, key = features(query, (-1,)), features(key, (-3, -1))
    state = None
    if is_causal:
        *batch, _, groups, depth = key.shape
        state = LinearAttentionState.empty(batch, groups, depth, value.shape[-1], key.dtype)
        state = LinearAttentionState(state.s, state.z + SUM_EPSILON)
    return linear_attention(
        query,
        key,
        value,
        feature_map="identity",
        is_causal=is_causal,
        epsilon=0,
        initial_state=state,
    )
