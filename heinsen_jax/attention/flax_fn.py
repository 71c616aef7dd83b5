"""Log-attention as the `attention_fn` of Flax's attention layers."""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax
from jax.core import Tracer

from heinsen_jax.ops.arguments import check_heads, check_same_length, check_scores
from heinsen_jax.ops.log_attention import heinsen_attention
from heinsen_jax.ops.log_attention.api import Implementation
from heinsen_jax.ops.log_attention.masked import masked_attention
from heinsen_jax.typing import Array, DTypeLike, Mixed, wide

AnyArray: TypeAlias = Array | np.ndarray


def log_attention_fn(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    *,
    mask: AnyArray | None = None,
    bias: AnyArray | None = None,
    is_causal: bool = False,
    implementation: Implementation | None = None,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: nnx.Module | linen.Module | None = None,
    input_positions: AnyArray | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
) -> Mixed:
    r"""Log-attention for `attention_fn=` of Flax's NNX and Linen attention layers.

        Y_t = sum_s P_ts V_s,    P_ts = softmax_s(LSE_k(Q_t + K_s))           (1)

    over all s visible to t, without a scale 1/sqrt(K). This is `heinsen_attention`, since values
    have any sign. Every mask is applied exactly; the cost depends on the mask. It is linear in the
    number of tokens

    - without a mask, causal or not;
    - with a mask over keys `[..., 1, S]`, such as padding or a decoding cache, causal or not;
    - with a concrete causal mask, mask over keys, or both: outside `jit`, or as a NumPy array.

    With any other mask it is quadratic. So under `jit` prefer `is_causal=True` to a causal mask: in
    Linen by `functools.partial(log_attention_fn, is_causal=True)`; in NNX, which always passes
    `is_causal` and overrides a partial, by `layer(x, is_causal=True)`.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; num_heads a multiple of num_kv_heads.
      value: `[*B, S, num_kv_heads, value_depth]`.
      mask: True, or nonzero, where a query attends to a key; broadcasts to `[*B, num_heads, T, S]`.
        No mask when None.
      is_causal: whether tokens attend only to themselves and earlier tokens, in addition to the
        mask. T must equal S; but a single query with a mask, as in decoding, is the last token.
      implementation: as in `heinsen_attention`, if the cost is linear; chosen automatically when
        None. A named implementation refuses unsupported calls.
      dtype: dtype to which query, key and value are cast; unchanged when None.
      precision: has no effect. Products are at least float32, unless query, key and value are all
        bfloat16 and the cost is linear: then factors of products are bfloat16.
      dropout_rate: must be 0 unless `deterministic` is True.
      deterministic: whether the layer applies no dropout.
      broadcast_dropout, dropout_rng: have no effect without dropout.
      bias, module, input_positions, qk_attn_weights_einsum, attn_weights_value_einsum: must be
        None.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, in the dtype of the query. The output of a query without
      visible keys is 0, with gradient 0.

    Raises:
      ValueError: shapes or dtypes are incompatible; the message names them.
      NotImplementedError: for dropout, a bias, sown weights, positions, custom einsums, or a named
        implementation with a mask of quadratic cost.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> log_attention_fn(key, key, value, is_causal=True).ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """
    del dropout_rng, broadcast_dropout, precision
    _refuse(
        {
            "bias": (bias is not None, "scores have none; leave it out"),
            "dropout_rate": (
                dropout_rate > 0 and not deterministic,
                "weights are not dropped; set it to 0, or deterministic=True",
            ),
            "sow_weights": (module is not None, "weights are not kept; leave it False"),
            "input_positions": (
                input_positions is not None,
                "scores know no positions; add them to the tokens",
            ),
            "qk_attn_weights_einsum": (qk_attn_weights_einsum is not None, "leave it None"),
            "attn_weights_value_einsum": (attn_weights_value_einsum is not None, "leave it None"),
        }
    )
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    check_heads(query, key, value)
    if mask is not None:
        mask, is_causal = _simplest(_checked(mask, query, key), is_causal, query, key)
    if mask is None or (mask.shape[-2] == 1 and mask.shape[-3] in (1, key.shape[-2])):
        visible = (key, value) if mask is None else _mask_keys(key, value, mask)
        y = heinsen_attention(query, *visible, is_causal=is_causal, implementation=implementation)
    elif implementation is None:
        y = _under_mask(query, key, value, mask, is_causal)
    else:
        raise NotImplementedError(
            f"log_attention_fn: implementation={implementation!r} with a mask of queries and keys, "
            "not known to be causal; pass is_causal=True, and a mask of keys [..., 1, S] if any; "
            "or implementation=None, for quadratic cost"
        )
    return y.astype(query.dtype)


def _refuse(fields: dict[str, tuple[bool, str]]) -> None:
    for name, (is_given, fix) in fields.items():
        if is_given:
            raise NotImplementedError(f"log_attention_fn: {name}: {fix}")


def _checked(mask: AnyArray, query: Array, key: Array) -> AnyArray:
    """The mask as bool, with the axes `[*B, num_heads, T, S]`; a NumPy array if concrete."""
    full = *query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3]
    check_scores("mask", mask, full)
    shape = (1,) * (len(full) - np.ndim(mask)) + np.shape(mask)
    if not isinstance(mask, Tracer) and getattr(mask, "is_fully_addressable", True):
        mask = np.asarray(mask)  # no part of it is on devices of other processes
    return mask.reshape(shape).astype(bool)


def _simplest(
    mask: AnyArray, is_causal: bool, query: Array, key: Array
) -> tuple[AnyArray | None, bool]:
    """Reduce a mask to a mask over keys, or None, if possible; also return whether it is causal."""
    length, sources = query.shape[-3], key.shape[-3]
    if is_causal and length == 1:
        is_causal = False  # a single query is the last token: no key is later
    if is_causal:
        check_same_length(query, key, "is_causal=True", "for others pass a mask alone")
    if not isinstance(mask, np.ndarray) or mask.size == 0:
        return mask, is_causal
    key_mask = mask[..., -1:, :]  # in a causal mask of keys, the last query attends to all of them
    if (mask == key_mask).all():
        mask = key_mask
    elif length == sources and (mask == (key_mask & np.tri(length, dtype=bool))).all():
        mask, is_causal = key_mask, True
    return None if mask.all() else mask, is_causal


def _mask_keys(key: Array, value: Array, mask: AnyArray) -> tuple[Array, Array]:
    """Set keys to -inf and values to 0 where a mask `[*B, num_kv_heads, 1, S]` is False."""
    visible = jnp.moveaxis(jnp.asarray(mask), -1, -3)  # [*B, S, num_kv_heads, 1]
    return jnp.where(visible, key, -jnp.inf), jnp.where(visible, value, 0)


def _under_mask(query: Array, key: Array, value: Array, mask: AnyArray, is_causal: bool) -> Array:
    *batch, length, _, _ = query.shape
    sources = key.shape[-3]
    mask = jnp.broadcast_to(mask, (*batch, mask.shape[-3], length, sources))
    if is_causal:
        mask = mask & jnp.broadcast_to(jnp.tri(length, dtype=bool), mask.shape)
    dtype = wide(query, key, value)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    return masked_attention(query, key, value, mask)
