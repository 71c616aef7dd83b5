"""Multi-head latent attention (MLA): keys and values of all heads from one latent per token.

References:
  DeepSeek-AI, 2024, DeepSeek-V2, arXiv:2405.04434.
"""

import math
from typing import Literal

import jax.numpy as jnp

from heinsen_jax.ops.arguments import check_array
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.softmax import Implementation, dot_product_attention
from heinsen_jax.typing import Array, Float, Integer, Lengths, Mixed, Query, Segments, common_dtype

Form = Literal["expanded", "absorbed"]


@over_devices
def mla_attention(
    query: Query,
    query_pe: Float[Array, "*B T N P"],
    latent: Float[Array, "*B S R"],
    key_pe: Float[Array, "*B S P"],
    key_up: Float[Array, "N R K"],
    value_up: Float[Array, "N R V"],
    *,
    form: Form = "expanded",
    is_causal: bool = False,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    query_offset: int | Integer[Array, ""] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Mixed:
    r"""Softmax attention with keys and values projected from latents c, and one shared rotary key.

        P_ts = softmax_s(scale (Q_t . (c_s W^K) + Q^pe_t . K^pe_s)),    Y_t = sum_s P_ts (c_s W^V)

    for each head. The cache holds only c and K^pe per token. Two forms compute the same result:

        expanded    computes keys c W^K and values c W^V of every head; fewest operations for many
                    queries
        absorbed    queries Q (W^K)^T attend to c itself, and W^V projects the result; reads only c
                    and K^pe of each token, which is best for few queries, as in decoding

    Args:
      query: Q `[*B, T, num_heads, K]`, the part that is not rotated.
      query_pe: Q^pe `[*B, T, num_heads, P]`, rotated.
      latent: c `[*B, S, R]`, normalized.
      key_pe: K^pe `[*B, S, P]`, rotated.
      key_up: W^K `[num_heads, R, K]`.
      value_up: W^V `[num_heads, R, V]`.
      form: "expanded" or "absorbed".
      is_causal: whether tokens attend only to themselves and earlier tokens.
      segment_ids: `[*B, S]`: tokens attend only to tokens of equal id. T must equal S.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last.
      query_offset: position of the first query among the keys.
      scale: factor of the scores; 1 / sqrt(K + P) when None.
      implementation: as in `dot_product_attention`.

    Returns:
      Y `[*B, T, num_heads, V]`.

    Raises:
      ValueError, NotImplementedError: as `dot_product_attention`.

    Examples:
      >>> query, query_pe = jnp.ones((3, 2, 4)), jnp.ones((3, 2, 6))  # three tokens, two heads
      >>> latent, key_pe = jnp.ones((3, 5)), jnp.ones((3, 6))
      >>> key_up, value_up = jnp.ones((2, 5, 4)), jnp.ones((2, 5, 7))
      >>> mla_attention(query, query_pe, latent, key_pe, key_up, value_up).shape
      (3, 2, 7)
    """
    _check(query, query_pe, latent, key_pe)
    heads, depth = query.shape[-2:]
    rank = latent.shape[-1]
    check_array("key_up", key_up, ((heads, rank, depth),), jnp.floating)
    check_array("value_up", value_up, ((heads, rank, *value_up.shape[2:3]),), jnp.floating)
    scale = 1 / math.sqrt(max(depth + query_pe.shape[-1], 1)) if scale is None else scale
    options = {
        "is_causal": is_causal,
        "segment_ids": segment_ids,
        "key_value_seq_lengths": key_value_seq_lengths,
        "query_offset": query_offset,
        "scale": scale,
        "implementation": implementation,
    }
    dtype = common_dtype(query, query_pe, latent, key_pe)
    if form == "absorbed":
        folded = _product("...tnk,nrk->...tnr", query, key_up)
        y = latent_attention(folded, query_pe, latent, key_pe, **options)
        return _product("...tnr,nrv->...tnv", y, value_up).astype(dtype)
    if form != "expanded":
        raise ValueError(f'form must be "expanded" or "absorbed", got {form!r}')
    key = _product("...sr,nrk->...snk", latent, key_up)
    value = _product("...sr,nrv->...snv", latent, value_up)
    shared = jnp.broadcast_to(key_pe[..., None, :], (*key.shape[:-1], key_pe.shape[-1]))
    query, key = _joined(query, query_pe), _joined(key, shared)
    return dot_product_attention(query, key, value, **options).astype(dtype)


def _joined(x: Array, y: Array) -> Array:
    """Features of x, then of y."""
    dtype = common_dtype(x, y)
    return jnp.concatenate([x.astype(dtype), y.astype(dtype)], -1)


@over_devices
def latent_attention(
    query: Float[Array, "*B T N R"],
    query_pe: Float[Array, "*B T N P"],
    latent: Float[Array, "*B S R"],
    key_pe: Float[Array, "*B S P"],
    *,
    scale: float,
    is_causal: bool = False,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    query_offset: int | Integer[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> Float[Array, "*B T N R"]:
    """Absorbed form of `mla_attention`: latents are the keys and values of all heads.

        P_ts = softmax_s(scale (Q'_t . c_s + Q^pe_t . K^pe_s)),    O_t = sum_s P_ts c_s

    Args:
      query: Q' = Q (W^K)^T `[*B, T, num_heads, R]`.
      query_pe, latent, key_pe: as in `mla_attention`.
      scale: factor of the scores; 1 / sqrt(K + P) in `mla_attention`.
      is_causal, segment_ids, key_value_seq_lengths, query_offset: as in `mla_attention`.
      implementation: as in `dot_product_attention`.

    Returns:
      O `[*B, T, num_heads, R]`, to be projected by W^V.

    Raises:
      ValueError, NotImplementedError: as `dot_product_attention`.

    Examples:
      >>> query, query_pe = jnp.ones((3, 2, 5)), jnp.ones((3, 2, 6))  # three tokens, two heads
      >>> latent, key_pe = jnp.ones((3, 5)), jnp.ones((3, 6))
      >>> latent_attention(query, query_pe, latent, key_pe, scale=0.3).shape
      (3, 2, 5)
    """
    _check(query, query_pe, latent, key_pe)
    query = jnp.concatenate([query, query_pe], -1)
    key = jnp.concatenate([latent, key_pe], -1)
    return dot_product_attention(
        query,
        key[..., None, :],
        latent[..., None, :],
        is_causal=is_causal,
        segment_ids=segment_ids,
        key_value_seq_lengths=key_value_seq_lengths,
        query_offset=query_offset,
        scale=scale,
        implementation=implementation,
    )


def _product(indices: str, x: Array, weights: Array) -> Array:
    """Cast heads to the dtype of x, as other projections do."""
    return jnp.einsum(indices, x, weights.astype(x.dtype))


def _check(query: Array, query_pe: Array, latent: Array, key_pe: Array) -> None:
    for name, x in {"query": query, "query_pe": query_pe}.items():
        if x.ndim < 3:
            raise ValueError(f"{name} must be [..., T, num_heads, depth], got shape {x.shape}")
    for name, x in {"latent": latent, "key_pe": key_pe}.items():
        if x.ndim < 2:
            raise ValueError(f"{name} must be [..., S, depth], got shape {x.shape}")
    pe_depth = query_pe.shape[-1]
    check_array("query", query, (query.shape,), jnp.floating)
    check_array("query_pe", query_pe, ((*query.shape[:-1], pe_depth),), jnp.floating)
    check_array("latent", latent, ((*query.shape[:-3], *latent.shape[-2:]),), jnp.floating)
    check_array("key_pe", key_pe, ((*latent.shape[:-1], pe_depth),), jnp.floating)
