"""Softmax attention with its exponential replaced by a truncated Taylor series."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import lru_cache
from typing import Any, Literal, overload

import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.linear import LinearAttentionState, linear_attention
from heinsen_jax.typing import Array, Float, Keys, Lengths, Mixed, Query, Segments, Values


@overload
def taylor_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    num_terms: int = 3,
    scale: float | None = None,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    allow_negative_weights: bool = False,
    initial_state: LinearAttentionState | None = None,
    return_state: Literal[False] = False,
) -> Mixed: ...


@overload
def taylor_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    num_terms: int = 3,
    scale: float | None = None,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    allow_negative_weights: bool = False,
    initial_state: LinearAttentionState | None = None,
    return_state: Literal[True],
) -> tuple[Mixed, LinearAttentionState]: ...


@over_devices
def taylor_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    num_terms: int = 3,
    scale: float | None = None,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    allow_negative_weights: bool = False,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
) -> Mixed | tuple[Mixed, LinearAttentionState]:
    r"""Softmax attention with a truncated exponential, at constant cost per token.

        Y_t = sum_s W_ts V_s / sum_s W_ts,    W_ts = sum_{p < P} (scale Q_t . K_s)^p / p!

    where s runs over the tokens up to and including t if causal, otherwise over all tokens. Each
    power is a dot product of symmetric monomials, so that this is linear attention with the
    C(K + P - 1, P - 1) features of `taylor_features`: exact, and meant for small head dimensions,
    K = 4 to 16. P = 3 is the feature map of Based (Arora et al., 2024).

    Args:
      query: Q `[*B, T, num_heads, key_depth]`.
      key: K `[*B, S, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: V `[*B, S, num_kv_heads, value_depth]`.
      num_terms: P. With odd P all weights are positive; with even P the weights of large negative
        scores are negative, and the normalizer may approach 0.
      scale: factor of the dot products, positive; 1 / sqrt(key_depth) when None.
      is_causal: whether tokens attend only to themselves and earlier tokens; then S must equal T.
      segment_ids: as in `linear_attention`.
      key_value_seq_lengths: as in `linear_attention`.
      allow_negative_weights: whether an even number of terms is accepted.
      initial_state: state after the preceding tokens; the empty state when None.
      return_state: whether to also return the state after all S tokens.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, or a pair of it and a `LinearAttentionState`.

    Raises:
      ValueError: num_terms is below 1, or even without `allow_negative_weights`; scale is not
        positive; or shapes, dtypes or the state do not fit.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> taylor_attention(key, key, value).ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Heinsen and Kozachkov, 2026, Self-Attention at Constant Cost per Token via Symmetry-Aware
      Taylor Approximation, arXiv:2602.00294; Arora et al., 2024, arXiv:2402.18668.
    """
    check_num_terms(num_terms, allow_negative_weights)
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "segment_ids": segment_ids,
        "key_value_seq_lengths": key_value_seq_lengths,
        "initial_state": initial_state,
        "return_state": return_state,
    }

    def features(x: Array) -> Array:
        return taylor_features(x, num_terms, scale)

    return linear_attention(query, key, value, feature_map=features, epsilon=0, **options)


def taylor_features(
    x: Float[Array, "*B K"], num_terms: int = 3, scale: float = 1.0
) -> Float[Array, "*B F"]:
    """Return features phi with phi(q) . phi(k) = sum_{p < P} (scale q . k)^p / p!.

    One feature per multiset of indices i_1 <= ... <= i_p, for every p < P: the product of x_i over
    it, times sqrt(m scale^p / p!), where m is the number of its permutations.

    Args:
      x: `[*B, K]`.
      num_terms: P.
      scale: factor of the dot product; positive.

    Returns:
      `[*B, F]`, F = C(K + P - 1, P - 1).

    Raises:
      ValueError: scale is not positive.

    Examples:
      >>> q, k = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0])
      >>> round(float(taylor_features(q) @ taylor_features(k)), 3)  # 1 - 1.5 + 1.5^2 / 2
      0.625
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}; negate the queries instead")
    parts = [jnp.ones_like(x[..., :1])]
    for power in range(1, num_terms):
        indices, coefficients = _monomials(x.shape[-1], power)
        product = jnp.prod(x[..., indices], -1)
        coefficients = jnp.asarray(coefficients * scale ** (power / 2), x.dtype)
        parts.append(product * jnp.broadcast_to(coefficients, product.shape))
    return jnp.concatenate(parts, -1)


def check_num_terms(num_terms: int, allow_negative_weights: bool) -> None:
    """Raise ValueError unless the number of terms is positive, and odd or allowed to be even."""
    if num_terms < 1:
        raise ValueError(f"num_terms must be at least 1, got {num_terms}")
    if num_terms % 2 == 0 and not allow_negative_weights:
        raise ValueError(
            f"num_terms={num_terms} is even, so weights of large negative scores are negative; use "
            "an odd number, or allow_negative_weights=True"
        )


@lru_cache(maxsize=64)
def _monomials(depth: int, power: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the multisets of indices `[F, power]`, and sqrt(permutations / power!) `[F]`."""
    multisets = list(itertools.combinations_with_replacement(range(depth), power))
    # The number of permutations is power! divided by the factorials of the multiplicities.
    divisors = [math.prod(map(math.factorial, Counter(x).values())) for x in multisets]
    return np.array(multisets, np.int32).reshape(-1, power), np.array(divisors) ** -0.5
