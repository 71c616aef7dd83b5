"""Memory-compressed attention: softmax attention over keys and values that a strided convolution
has made fewer.

References:
  Liu et al., 2018, Generating Wikipedia by Summarizing Long Sequences, arXiv:1801.10198.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from heinsen_jax.ops.arguments import (
    check_array,
    check_heads,
    check_same_length,
    check_tokens,
    without_padding,
)
from heinsen_jax.ops.masks import Mask
from heinsen_jax.ops.softmax import Implementation, dot_product_attention
from heinsen_jax.typing import Array, Float, Integer, Lengths, Mixed, Query, pytree_dataclass

Pad = Literal["left", "right"]
AXIS = -3  # of tokens


class Compression(NamedTuple):
    """What makes F keys (or values) one.

    Attributes:
      kernel: `[num_kv_heads, F, depth, new depth]`, for each head the weights of a group's tokens.
      bias: `[num_kv_heads, new depth]`.
      null: `[num_kv_heads, new depth]`, one more key (or value), which every query sees.
    """

    kernel: Float[Array, "G F K L"]
    bias: Float[Array, "G L"]
    null: Float[Array, "G L"]

    @property
    def factor(self) -> int:
        return self.kernel.shape[1]

    def with_null(self, groups: Array) -> Array:
        """`[*B, J, G, F]` -> `[*B, 1 + J, G, F]`"""
        null = jnp.broadcast_to(self.null, (*groups.shape[:AXIS], 1, *self.null.shape))
        return jnp.concatenate([null.astype(groups.dtype), groups], AXIS)


@pytree_dataclass
class CompressedCache:
    """What is kept of the tokens so far: complete groups, compressed, and the group begun.

    There is room for a number of tokens; with more, results are NaN (outside `jit`, an error).

    Attributes:
      key, value: `[*B, groups, num_kv_heads, depth]`, compressed.
      recent_key, recent_value: `[*B, F, num_kv_heads, depth]`, of the group begun, then zeros.
      length: how many tokens there have been, a scalar.
    """

    key: Float[Array, "*B J G K"]
    value: Float[Array, "*B J G V"]
    recent_key: Float[Array, "*B F G _"]
    recent_value: Float[Array, "*B F G _"]
    length: Integer[Array, ""]

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        key_compression: Compression,
        value_compression: Compression,
        *,
        capacity: int,
        dtype: Any = jnp.float32,
    ) -> CompressedCache:
        """Before the first of `capacity` tokens."""

        def zeros(compression: Compression, size: int, axis: int) -> Array:
            shape = compression.kernel.shape
            return jnp.zeros((*batch_shape, size, shape[0], shape[axis]), dtype)

        factor = key_compression.factor
        pair = key_compression, value_compression
        return cls(
            *(zeros(x, capacity // factor, 3) for x in pair),
            *(zeros(x, factor, 2) for x in pair),
            length=jnp.zeros((), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        factor = self.recent_key.shape[AXIS]
        return self.key.shape[AXIS] * factor + factor - 1

    def with_capacity(self, capacity: int) -> CompressedCache:
        """The same tokens, with room for so many at least."""
        groups = -(-capacity // self.recent_key.shape[AXIS])
        padding = [(0, 0)] * self.key.ndim
        padding[AXIS] = (0, max(groups - self.key.shape[AXIS], 0))
        key, value = (jnp.pad(x, padding) for x in (self.key, self.value))
        return replace(self, key=key, value=value)

    def append(
        self, key: Array, value: Array, of_keys: Compression, of_values: Compression
    ) -> CompressedCache:
        """The cache with further tokens `[*B, T, num_kv_heads, depth]`."""
        after = self.length + key.shape[AXIS]
        if not isinstance(after, Tracer) and int(after) > self.capacity:
            raise ValueError(
                f"initial_state has room for {self.capacity} tokens, and this is token "
                f"{int(after)}: begin with CompressedCache.empty(..., capacity=...) of more"
            )
        key, recent_key = self._append(self.key, self.recent_key, key, of_keys)
        value, recent_value = self._append(self.value, self.recent_value, value, of_values)
        return CompressedCache(key, value, recent_key, recent_value, after)

    def _append(self, groups: Array, recent: Array, new: Array, compression: Compression):
        factor, length = compression.factor, new.shape[AXIS]
        count = self.length % factor
        touched = -(-(length + factor - 1) // factor)  # groups, at most
        tokens = jnp.pad(recent, _along(recent, (0, touched * factor)))
        axis = tokens.ndim + AXIS
        tokens = lax.dynamic_update_slice_in_dim(tokens, new.astype(tokens.dtype), count, axis)
        whole = lax.slice_in_dim(tokens, 0, touched * factor, axis=axis)
        compressed = compress(whole, compression.kernel, compression.bias).astype(groups.dtype)
        places = self.length // factor + jnp.arange(touched)
        is_complete = places < (self.length + length) // factor
        places = jnp.where(is_complete, places, groups.shape[AXIS])  # the others are dropped
        groups = groups.at[..., places, :, :].set(compressed, mode="drop")
        begun = (count + length) // factor * factor
        return groups, lax.dynamic_slice_in_dim(tokens, begun, factor, axis)


@dataclass(frozen=True)
class Complete(Mask):
    """Groups of `size` positions whose last is not after the query: key 0 is the null one, key j
    the group of positions (j - 1) size ... j size - 1."""

    size: int

    def __call__(self, query: Any, key: Any) -> Any:
        return key * self.size - 1 <= query


def compress(
    x: Float[Array, "*B S G K"],
    kernel: Float[Array, "G F K L"],
    bias: Float[Array, "G L"],
    *,
    pad: Pad = "right",
) -> Float[Array, "*B J G L"]:
    """A convolution of width and stride F over the tokens of each head.

        y_j = sum_f x_{jF + f} W_f + b

    Args:
      x: `[*B, S, num_kv_heads, depth]`; zeros are added to a multiple of F tokens.
      kernel: W `[num_kv_heads, F, depth, new depth]`.
      bias: b `[num_kv_heads, new depth]`.
      pad: where the zeros are.

    Returns:
      y `[*B, ceil(S / F), num_kv_heads, new depth]`, in float32 at least.
    """
    _check_pad(pad)
    if kernel.ndim != 4 or 0 in kernel.shape[:2]:
        raise ValueError(
            f"kernel must be [num_kv_heads, width >= 1, depth, new depth], is {kernel.shape}"
        )
    if x.ndim < 3 or x.shape[-2:] != (kernel.shape[0], kernel.shape[2]):
        raise ValueError(
            f"x must be [..., tokens, heads, depth] as kernel: {x.shape}, {kernel.shape}"
        )
    check_array("bias", bias, ((kernel.shape[0], kernel.shape[3]),), jnp.floating)
    *batch, length, heads, depth = x.shape
    factor = kernel.shape[1]
    extra = -length % factor
    x = jnp.pad(x, _along(x, (extra, 0) if pad == "left" else (0, extra)))
    dtype = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
    x = x.astype(dtype).reshape(*batch, (length + extra) // factor, factor, heads, depth)
    y = jnp.einsum("...jfgk,gfkc->...jgc", x, kernel.astype(dtype))
    return y + jnp.broadcast_to(bias.astype(dtype), y.shape)


@overload
def memory_compressed_attention(
    query: Query,
    key: Float[Array, "*B S G _"],
    value: Float[Array, "*B S G _"],
    key_compression: Compression,
    value_compression: Compression,
    *,
    is_causal: bool = False,
    pad: Pad = "left",
    key_value_seq_lengths: Lengths | None = None,
    scale: float | Array | None = None,
    initial_state: CompressedCache | None = None,
    return_state: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Mixed: ...


@overload
def memory_compressed_attention(
    query: Query,
    key: Float[Array, "*B S G _"],
    value: Float[Array, "*B S G _"],
    key_compression: Compression,
    value_compression: Compression,
    *,
    is_causal: bool = False,
    pad: Pad = "left",
    key_value_seq_lengths: Lengths | None = None,
    scale: float | Array | None = None,
    initial_state: CompressedCache | None = None,
    return_state: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Mixed, CompressedCache]: ...


@overload
def memory_compressed_attention(
    query: Query,
    key: Float[Array, "*B S G _"],
    value: Float[Array, "*B S G _"],
    key_compression: Compression,
    value_compression: Compression,
    *,
    is_causal: bool = False,
    pad: Pad = "left",
    key_value_seq_lengths: Lengths | None = None,
    scale: float | Array | None = None,
    initial_state: CompressedCache | None = None,
    return_state: bool,
    implementation: Implementation | None = None,
) -> Mixed | tuple[Mixed, CompressedCache]: ...


def memory_compressed_attention(
    query: Query,
    key: Float[Array, "*B S G _"],
    value: Float[Array, "*B S G _"],
    key_compression: Compression,
    value_compression: Compression,
    *,
    is_causal: bool = False,
    pad: Pad = "left",
    key_value_seq_lengths: Lengths | None = None,
    scale: float | Array | None = None,
    initial_state: CompressedCache | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Mixed | tuple[Mixed, CompressedCache]:
    """Softmax attention over S / F compressed keys and values, and a learned null one.

        K' = [k_0, compress(K)],    V' = [v_0, compress(V)]
        Y_t = softmax_j(scale Q_t . K'_j) V'

    over all j; or, if causal, over the null key and the groups whose last token is not after t, so
    that nothing comes from the future. Where F > 1 most queries then do not see themselves.

    A text that is no multiple of F has an incomplete group: the first if pad = "left", which is the
    published form, so that groups depend on the text's length; or the last if pad = "right", seen
    by nobody if causal. Then what comes later changes nothing, and only so can a text be fed in
    pieces: start from `CompressedCache.empty`, give each piece of T >= 0 tokens with the state
    that the one before returned.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads). S = T if causal.
      value: `[*B, S, num_kv_heads, value_depth]`.
      key_compression: with a new depth of key_depth.
      value_compression: with the same F. The published form has one kernel and bias for both.
      is_causal: as above.
      pad: as above.
      key_value_seq_lengths: `[*B]`, how many tokens there are, the rest being padding; or
        `[*B, 2]`, the first one and the one past the last. Each text is compressed as if it stood
        alone; what lies at padding, NaN included, changes nothing.
      scale: of the scores; 1 / sqrt(key_depth) when None. (A published implementation has
        1 / sqrt(model_dim).)
      initial_state: of the tokens before these. Needs is_causal and pad="right".
      return_state: whether to return the state after these tokens too; with initial_state.
      implementation: as in `dot_product_attention`. With a state, scores are held all at once.

    Returns:
      Y `[*B, T, num_heads, new value depth]`, or the pair (Y, `CompressedCache`).

    Raises:
      ValueError: shapes or dtypes do not fit; the message says which.
      NotImplementedError: these arguments do not go together.

    Examples:
      >>> key = jnp.zeros((4, 1, 1))
      >>> value = jnp.array([1.0, 3.0, 6.0, 8.0]).reshape(4, 1, 1)
      >>> pairs = Compression(jnp.full((1, 2, 1, 1), 0.5), jnp.zeros((1, 1)), jnp.zeros((1, 1)))
      >>> y = memory_compressed_attention(key, key, value, pairs, pairs)  # averages 0, 2, 7
      >>> y.ravel().round().tolist()
      [3.0, 3.0, 3.0, 3.0]

    References:
      Liu et al., 2018, Generating Wikipedia by Summarizing Long Sequences, arXiv:1801.10198.
    """
    _check(query, key, value, key_compression, value_compression, pad)
    check_tokens(key.shape[:-2], segment_ids=None, key_value_seq_lengths=key_value_seq_lengths)
    if is_causal:
        check_same_length(query, key)
    rule = Complete(key_compression.factor) if is_causal else None
    options = {"mask": rule, "scale": scale, "implementation": implementation}
    both = key_compression, value_compression
    dtype = jnp.result_type(query, value)
    if initial_state is None and not return_state:
        texts = query, key, value, key_value_seq_lengths
        return _attend_texts(*texts, *both, pad, is_causal, options).astype(dtype)
    if not is_causal or pad != "right" or key_value_seq_lengths is not None:
        raise NotImplementedError(
            'states need is_causal=True and pad="right", and no key_value_seq_lengths'
        )
    if initial_state is None:
        raise ValueError("return_state needs an initial_state: see CompressedCache.empty")
    state = initial_state.append(key, value, *both)
    y = dot_product_attention(
        query,
        key_compression.with_null(state.key),
        value_compression.with_null(state.value),
        query_offset=initial_state.length,
        **options,
    )
    y = jnp.where(state.length > state.capacity, jnp.nan, y).astype(dtype)
    return (y, state) if return_state else y


def _attend_texts(
    query, key, value, lengths, of_keys, of_values, pad: Pad, is_causal: bool, options: dict
) -> Array:
    """Whole texts. Those of different lengths are moved, so that groups begin at multiples of F."""
    length, factor = key.shape[AXIS], of_keys.factor
    extra = -length % factor

    def attend(query: Array, key: Array, value: Array, **more: Any) -> Array:
        key = compress(key, of_keys.kernel, of_keys.bias, pad=pad)
        value = compress(value, of_values.kernel, of_values.bias, pad=pad)
        key, value = of_keys.with_null(key), of_values.with_null(value)
        return dot_product_attention(query, key, value, **options, **more)

    if lengths is None:
        return attend(query, key, value, query_offset=extra if pad == "left" else 0)
    query, key, value = without_padding(query, key, value, lengths)
    bounds = jnp.clip(lengths, 0, length)
    bounds = bounds[..., None] if bounds.ndim == key.ndim - 3 else bounds
    start = bounds[..., 0] if bounds.shape[-1] == 2 else jnp.zeros_like(bounds[..., 0])
    count = jnp.maximum(bounds[..., -1] - start, 0)
    groups = -(-count // factor)
    shift = start - (groups * factor - count) if pad == "left" else start
    key, value = _moved(key, shift, length + extra), _moved(value, shift, length + extra)
    query = _moved(query, shift, length + extra) if is_causal else query
    y = attend(query, key, value, key_value_seq_lengths=1 + groups)
    return _moved(y, -shift, length) if is_causal else y


def _moved(x: Array, shift: Array, length: int) -> Array:
    """`[*B, length, G, F]` with x_{i + shift} at i, 0 where there is none."""
    size = x.shape[AXIS]
    index = jnp.arange(length).reshape((1,) * shift.ndim + (length,)) + shift[..., None]
    index = jnp.where((index < 0) | (index >= size), size, index)[..., None, None]
    return jnp.take_along_axis(x, index, AXIS, mode="fill", fill_value=0)


def _along(x: Array, widths: tuple[int, int]) -> list[tuple[int, int]]:
    """To pad tokens with so many before and after."""
    return [(0, 0)] * (x.ndim + AXIS) + [widths, (0, 0), (0, 0)]


def _check_pad(pad: str) -> None:
    if pad not in ("left", "right"):
        raise ValueError(f'pad must be "left" or "right", is {pad!r}')


def _check(query, key, value, of_keys: Compression, of_values: Compression, pad: str) -> None:
    _check_pad(pad)
    for name, compression in {"key": of_keys, "value": of_values}.items():
        kernel, null = compression.kernel, compression.null
        if kernel.ndim != 4:
            raise ValueError(
                f"{name}_compression.kernel must be [num_kv_heads, width, depth, new depth], has "
                f"shape {kernel.shape}"
            )
        shape = kernel.shape[0], kernel.shape[3]
        check_array(f"{name}_compression.null", null, (shape,), jnp.floating)
    if of_keys.factor != of_values.factor:
        raise ValueError(
            "key_compression and value_compression must have kernels of one width, have "
            f"{of_keys.factor} and {of_values.factor}"
        )
    new_depth = of_keys.kernel.shape[3]
    if query.ndim and query.shape[-1] != new_depth:
        raise ValueError(
            f"key_compression makes keys of depth {new_depth}, queries have {query.shape[-1]}: "
            "the last axis of its kernel must be the queries' depth"
        )
    compressed = jax.ShapeDtypeStruct((*key.shape[:-1], new_depth), key.dtype)
    check_heads(query, compressed, value)
