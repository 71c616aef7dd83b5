"""Memory-compressed attention: softmax attention over keys and values compressed by convolution.

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
    int32_lengths,
    without_padding,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.masks import Mask
from heinsen_jax.ops.softmax import Implementation, dot_product_attention
from heinsen_jax.typing import (
    Array,
    Float,
    Integer,
    Lengths,
    Mixed,
    Query,
    common_dtype,
    pytree_dataclass,
    wide,
)

Pad = Literal["left", "right"]
AXIS = -3  # the axis of tokens


class Compression(NamedTuple):
    """Convolution that compresses F keys (or values) to one.

    Attributes:
      kernel: `[num_kv_heads, F, depth, new depth]`, weights of the F tokens of a group, by head.
      bias: `[num_kv_heads, new depth]`.
      null: `[num_kv_heads, new depth]`, an additional key (or value), visible to every query.
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
    """Streaming state: compressed complete groups, and the tokens of the incomplete group.

    The capacity is fixed. Beyond it, ValueError is raised; under `jit`, results are NaN instead.

    Attributes:
      key, value: `[*B, groups, num_kv_heads, depth]`, compressed.
      recent_key, recent_value: `[*B, F, num_kv_heads, depth]`, tokens of the incomplete group, then
        zeros.
      length: number of tokens so far, a scalar.
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
        """Return the empty state, with capacity for this number of tokens."""

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
        """Return the same tokens, with at least this capacity."""
        groups = capacity // self.recent_key.shape[AXIS]  # the incomplete one is apart
        padding = [(0, 0)] * self.key.ndim
        padding[AXIS] = (0, max(groups - self.key.shape[AXIS], 0))
        key, value = (jnp.pad(x, padding) for x in (self.key, self.value))
        return replace(self, key=key, value=value)

    def append(
        self, key: Array, value: Array, of_keys: Compression, of_values: Compression
    ) -> CompressedCache:
        """Append tokens `[*B, T, num_kv_heads, depth]`."""
        after = self.length + key.shape[AXIS]
        if not isinstance(after, Tracer) and int(after) > self.capacity:
            raise ValueError(
                f"initial_state has capacity for {self.capacity} tokens, and this is token "
                f"{int(after)}: begin with a larger capacity, CompressedCache.empty(..., "
                "capacity=...)"
            )
        key, recent_key = self._append(self.key, self.recent_key, key, of_keys)
        value, recent_value = self._append(self.value, self.recent_value, value, of_values)
        return CompressedCache(key, value, recent_key, recent_value, after)

    def _append(self, groups: Array, recent: Array, new: Array, compression: Compression):
        factor, length = compression.factor, new.shape[AXIS]
        count = self.length % factor
        touched = -(-(length + factor - 1) // factor)  # maximum number of groups
        tokens = jnp.pad(recent, _along(recent, (0, touched * factor)))
        axis = tokens.ndim + AXIS
        tokens = lax.dynamic_update_slice_in_dim(tokens, new.astype(tokens.dtype), count, axis)
        whole = lax.slice_in_dim(tokens, 0, touched * factor, axis=axis)
        compressed = compress(whole, compression.kernel, compression.bias).astype(groups.dtype)
        places = self.length // factor + jnp.arange(touched, dtype=jnp.int32)
        is_complete = places < (self.length + length) // factor
        places = jnp.where(is_complete, places, groups.shape[AXIS])  # other groups are dropped
        groups = jnp.asarray(groups).at[..., places, :, :].set(compressed, mode="drop")
        begun = (count + length) // factor * factor
        return groups, lax.dynamic_slice_in_dim(tokens, begun, factor, axis)


@dataclass(frozen=True)
class Complete(Mask):
    """Groups of `size` positions that end at or before the query are visible: key 0 is the null
    key, key j the group of positions (j - 1) size ... j size - 1."""

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
    """Convolve the tokens of each head with width and stride F.

        y_j = sum_f x_{jF + f} W_f + b

    Args:
      x: `[*B, S, num_kv_heads, depth]`; padded with zeros to a multiple of F tokens.
      kernel: W `[num_kv_heads, F, depth, new depth]`.
      bias: b `[num_kv_heads, new depth]`.
      pad: side of the zeros.

    Returns:
      y `[*B, ceil(S / F), num_kv_heads, new depth]`, in at least float32.
    """
    _check_pad(pad)
    if kernel.ndim != 4 or 0 in kernel.shape[:2]:
        raise ValueError(
            f"kernel must be [num_kv_heads, width >= 1, depth, new depth], got {kernel.shape}"
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
    dtype = wide(x, kernel)
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


@over_devices
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
    """Softmax attention over S / F compressed keys and values, and a trained null key and value.

        K' = [k_0, compress(K)],    V' = [v_0, compress(V)]
        Y_t = softmax_j(scale Q_t . K'_j) V'

    over all j; or, if causal, over the null key and the groups that end at or before t. With F > 1
    most queries then do not attend to themselves.

    If S is not a multiple of F, one group is incomplete: the first one with pad="left", the
    published form, in which groups depend on the sequence length; or the last one with pad="right",
    which is masked if causal. Streaming needs pad="right", where outputs do not depend on later
    tokens: start from `CompressedCache.empty` and pass each chunk of T >= 0 tokens with the state
    returned for the preceding one.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, depth]`; query head n reads key/value head
        n // (num_heads // num_kv_heads). S = T if causal.
      value: `[*B, S, num_kv_heads, value_depth]`.
      key_compression: compresses keys; its new depth is key_depth.
      value_compression: compresses values, with the same F. The published form has one kernel and
        bias for both.
      is_causal: whether only groups that end at or before t are visible.
      pad: side on which an incomplete group is padded.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last. Each sequence is compressed as
        if it were alone; values at padding, NaN included, have no effect.
      scale: factor of the scores; 1 / sqrt(key_depth) when None. (A published implementation uses 1
        / sqrt(model_dim).)
      initial_state: state after the preceding tokens. Requires is_causal and pad="right".
      return_state: whether to also return the state after these tokens. Requires initial_state.
      implementation: as in `dot_product_attention`. With a state, all scores are stored.

    Returns:
      Y `[*B, T, num_heads, new value depth]`, or the pair (Y, `CompressedCache`).

    Raises:
      ValueError: shapes or dtypes do not fit; the message says which.
      NotImplementedError: the combination of arguments is unsupported; the message says which.

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
    dtype = common_dtype(query, value)
    if initial_state is None and not return_state:
        arrays = query, key, value, key_value_seq_lengths
        return _attend_whole(*arrays, *both, pad, is_causal, options).astype(dtype)
    if not is_causal or pad != "right" or key_value_seq_lengths is not None:
        raise NotImplementedError(
            "initial_state: unsupported without is_causal=True and pad='right', or with "
            "key_value_seq_lengths"
        )
    if initial_state is None:
        raise ValueError("return_state: needs an initial_state; begin with CompressedCache.empty")
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


def _attend_whole(
    query,
    key,
    value,
    lengths,
    key_compression,
    value_compression,
    pad: Pad,
    is_causal: bool,
    options: dict,
) -> Array:
    """Attend over whole sequences, shifted by their padding so that groups begin at multiples of
    F."""
    length, factor = key.shape[AXIS], key_compression.factor
    extra = -length % factor

    def attend(query: Array, key: Array, value: Array, **more: Any) -> Array:
        key = compress(key, key_compression.kernel, key_compression.bias, pad=pad)
        value = compress(value, value_compression.kernel, value_compression.bias, pad=pad)
        key, value = key_compression.with_null(key), value_compression.with_null(value)
        return dot_product_attention(query, key, value, **options, **more)

    if lengths is None:
        return attend(query, key, value, query_offset=extra if pad == "left" else 0)
    query, key, value = without_padding(query, key, value, lengths)
    bounds = jnp.clip(int32_lengths(lengths), 0, length)
    bounds = bounds[..., None] if bounds.ndim == key.ndim - 3 else bounds
    start = bounds[..., 0] if bounds.shape[-1] == 2 else jnp.zeros_like(bounds[..., 0])
    count = jnp.maximum(bounds[..., -1] - start, 0)
    groups = -(-count // factor)
    shift = start - (groups * factor - count) if pad == "left" else start
    key, value = _shift(key, shift, length + extra), _shift(value, shift, length + extra)
    query = _shift(query, shift, length + extra) if is_causal else query
    y = attend(query, key, value, key_value_seq_lengths=1 + groups)
    return _shift(y, -shift, length) if is_causal else y


def _shift(x: Array, shift: Array, length: int) -> Array:
    """Return `[*B, length, G, F]` with x_{i + shift} at i, 0 out of range."""
    size = x.shape[AXIS]
    index = jnp.arange(length).reshape((1,) * shift.ndim + (length,)) + shift[..., None]
    index = jnp.where((index < 0) | (index >= size), size, index)[..., None, None]
    return jnp.take_along_axis(x, index, AXIS, mode="fill", fill_value=0)


def _along(x: Array, widths: tuple[int, int]) -> list[tuple[int, int]]:
    """Return padding widths for tokens."""
    return [(0, 0)] * (x.ndim + AXIS) + [widths, (0, 0), (0, 0)]


def _check_pad(pad: str) -> None:
    if pad not in ("left", "right"):
        raise ValueError(f'pad must be "left" or "right", got {pad!r}')


def _check(
    query, key, value, key_compression: Compression, value_compression: Compression, pad: str
) -> None:
    _check_pad(pad)
    for name, compression in {"key": key_compression, "value": value_compression}.items():
        kernel, null = compression.kernel, compression.null
        if kernel.ndim != 4:
            raise ValueError(
                f"{name}_compression.kernel must be [num_kv_heads, width, depth, new depth], has "
                f"shape {kernel.shape}"
            )
        shape = kernel.shape[0], kernel.shape[3]
        check_array(f"{name}_compression.null", null, (shape,), jnp.floating)
    if key_compression.factor != value_compression.factor:
        raise ValueError(
            "key_compression and value_compression must have kernels of one width, have "
            f"{key_compression.factor} and {value_compression.factor}"
        )
    new_depth = key_compression.kernel.shape[3]
    if query.ndim and query.shape[-1] != new_depth:
        raise ValueError(
            f"key_compression.kernel: compresses keys to depth {new_depth}, but queries have "
            f"{query.shape[-1]}; its last axis must be the depth of queries"
        )
    compressed = jax.ShapeDtypeStruct((*key.shape[:-1], new_depth), key.dtype)
    check_heads(query, compressed, value)
