"""Linformer: softmax attention over a fixed number of projected positions."""

import jax.numpy as jnp

from heinsen_jax.ops.arguments import check_array, check_heads, check_tokens, without_padding
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import Array, Float, Keys, Lengths, Mixed, Query, Values, common_dtype, wide


@over_devices
def linformer_attention(
    query: Query,
    key: Keys,
    value: Values,
    key_projection: Float[Array, "L P"] | Float[Array, "G L P"],
    value_projection: Float[Array, "L P"] | Float[Array, "G L P"],
    *,
    key_value_seq_lengths: Lengths | None = None,
) -> Mixed:
    r"""Softmax attention over P projections of the keys and values of all positions.

        K' = E^T K,    V' = F^T V,    Y = softmax(Q K'^T / sqrt(key_depth)) V'     (7)

    Every query attends to every position: no causal form exists. Time and memory are linear in the
    sequence length.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads).
      value: `[*B, S, num_kv_heads, value_depth]`.
      key_projection: E `[L, P]`, or `[num_kv_heads, L, P]` for separate projections by head. L is
        the maximum length: shorter sequences use the first S rows.
      value_projection: F, likewise; it may be E itself.
      key_value_seq_lengths: `[*B]`, the number of valid keys, the rest being padding; or `[*B, 2]`,
        the first valid key and the one past the last. Padding is set to 0 before the projection:
        its values, NaN included, have no effect.

    Returns:
      Y `[*B, T, num_heads, value_depth]`.

    Raises:
      ValueError: shapes or dtypes do not fit, or S exceeds L; the message says which.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> average = jnp.full((3, 1), 1 / 3)  # averages all tokens, in one row
      >>> linformer_attention(key, key, value, average, average).ravel().round().tolist()
      [6.0, 6.0, 6.0]

    References:
      Wang et al., 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768.
    """
    check_heads(query, key, value)
    check_tokens(key.shape[:-2], segment_ids=None, key_value_seq_lengths=key_value_seq_lengths)
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    dtype = common_dtype(query, key, value)
    key = _projected("key_projection", key_projection, key)
    value = _projected("value_projection", value_projection, value)
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(
            "key_projection and value_projection must project to the same number of rows: "
            f"{key_projection.shape}, {value_projection.shape}"
        )
    return dot_product_attention(query, key, value).astype(dtype)


def _projected(name: str, projection: Array, x: Array) -> Array:
    """`[*B, S, G, F]` -> `[*B, P, G, F]`, in at least float32."""
    sources, groups, _ = x.shape[-3:]
    if projection.ndim not in (2, 3) or projection.shape[-1] < 1:
        raise ValueError(
            f"{name} must be [length, rows >= 1] or [num_kv_heads, length, rows >= 1], has shape "
            f"{projection.shape}"
        )
    length, rows = projection.shape[-2:]
    check_array(name, projection, ((length, rows), (groups, length, rows)), jnp.floating)
    if sources > length:
        raise ValueError(
            f"{name} supports at most {length} positions, got {sources}: shorten the input or "
            "make a longer projection"
        )
    dtype = wide(x)
    projection = projection[..., :sources, :].astype(dtype)
    projection = jnp.broadcast_to(projection, (groups, sources, rows))
    return jnp.einsum("...sgf,gsp->...pgf", x.astype(dtype), projection)
