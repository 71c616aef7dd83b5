"""Linear attention without a normalizer, with decay (gates) and erasure (the delta rule)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import (
    check_array,
    check_decay,
    check_paired_heads,
    check_tokens,
    int32_lengths,
    valid_tokens,
    without_padding,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.matrix_state import MatrixOperands, recur, segment_decay
from heinsen_jax.ops.numerics import matmul
from heinsen_jax.typing import (
    Array,
    DTypeLike,
    Float,
    Lengths,
    Segments,
    common_dtype,
    pytree_dataclass,
    wide,
)


@pytree_dataclass
class MatrixState:
    """Mergeable state of `gated_delta_rule`. A chunk of tokens maps the preceding state S to
    A S + B; `gated_delta_rule` takes and returns only the matrix.

    Attributes:
      matrix: B `[*B, N, K, V]`.
      transition: A `[*B, N, K, K]`; or without erasure its diagonal, `[*B, N, 1 or K]`; None in a
        state that is never merged into an earlier one.
    """

    matrix: Float[Array, "*B N K V"]
    transition: Float[Array, "*B N _"] | Float[Array, "*B N K K"] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_heads: int,
        key_depth: int,
        value_depth: int,
        dtype: DTypeLike = jnp.float32,
    ) -> MatrixState:
        """Return the state of no tokens: 0."""
        return cls(jnp.zeros((*batch_shape, num_heads, key_depth, value_depth), dtype))

    def merge(self, other: MatrixState) -> MatrixState:
        """Return the state of these tokens followed by the tokens of `other`."""
        if other.transition is None:
            raise ValueError(
                "other.transition is None: the later state lacks its transition; compute it with "
                "`heinsen_jax.ops.gated_delta_rule.matrix_summary`"
            )
        matrix = _transit(other.transition, self.matrix) + other.matrix
        if self.transition is None:
            return MatrixState(matrix)
        if self.transition.ndim == self.matrix.ndim:
            return MatrixState(matrix, _transit(other.transition, self.transition))
        return MatrixState(matrix, other.transition * self.transition)


def _transit(transition: Array, matrix: Array) -> Array:
    """A S, for the matrix A or its diagonal."""
    if transition.ndim == matrix.ndim:
        return matmul(transition, matrix)
    return transition[..., None] * matrix


def matrix_summary(
    query: Float[Array, "*B T G K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S N V"],
    *,
    log_decay: Float[Array, "*B T N"] | Float[Array, "*B T N K"] | None = None,
    erase: Float[Array, "*B S N"] | Float[Array, "*B S N K"] | None = None,
    write: Float[Array, "*B S N"] | Float[Array, "*B S N V"] | None = None,
    erase_key: Float[Array, "*B S G K"] | None = None,
    num_steps: int = 1,
    key_value_seq_lengths: Lengths | None = None,
) -> MatrixState:
    """Return the state of these tokens alone, with its transition. Args: as `gated_delta_rule`.

    With erasure, the transition is computed as K more columns of the state, which start as the
    identity.
    """
    if num_steps != 1:
        arrays = query, key, value, log_decay, erase, write, erase_key, None
        tokens = _in_steps(num_steps, *arrays, key_value_seq_lengths)
        del tokens["segment_ids"]
        return matrix_summary(**tokens)
    *batch, length, _, depth = key.shape
    heads, columns = value.shape[-2:]
    dtype = wide(query, key, value)
    if write is not None:
        value = (write[..., None] if write.ndim < value.ndim else write) * value
    options: dict[str, Any] = {"key_value_seq_lengths": key_value_seq_lengths, "return_state": True}
    if erase is not None:
        zeros = jnp.zeros((*value.shape[:-1], depth), value.dtype)
        value = jnp.concatenate([value, varying_like(zeros, value)], -1)
        identity = jnp.broadcast_to(jnp.eye(depth, dtype=dtype), (*batch, heads, depth, depth))
        start = jnp.concatenate([jnp.zeros((*batch, heads, depth, columns), dtype), identity], -1)
        options |= {"erase": erase, "erase_key": erase_key}
        options |= {"initial_state": varying_like(start, key)}
    _, state = gated_delta_rule(query, key, value, log_decay=log_decay, **options)
    if erase is not None:
        return MatrixState(state[..., :columns], state[..., columns:])
    decay = jnp.zeros_like(state[..., 0, :1])
    if log_decay is not None:
        if key_value_seq_lengths is not None:
            valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)
            axes = tuple(range(valid.ndim, log_decay.ndim))
            log_decay = jnp.where(jnp.expand_dims(valid, axes), log_decay, 0)
        decay = jnp.sum(log_decay.astype(dtype), len(batch))
        decay = decay[..., None] if decay.ndim == len(batch) + 1 else decay
    return MatrixState(state, jnp.exp(decay))


@overload
def gated_delta_rule(
    query: Float[Array, "*B T G K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S N V"],
    *,
    log_decay: Float[Array, "*B T N"] | Float[Array, "*B T N K"] | None = None,
    erase: Float[Array, "*B S N"] | Float[Array, "*B S N K"] | None = None,
    write: Float[Array, "*B S N"] | Float[Array, "*B S N V"] | None = None,
    erase_key: Float[Array, "*B S G K"] | None = None,
    num_steps: int = 1,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: Float[Array, "*B N K V"] | None = None,
    return_state: Literal[False] = False,
) -> Float[Array, "*B T N V"]: ...


@overload
def gated_delta_rule(
    query: Float[Array, "*B T G K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S N V"],
    *,
    log_decay: Float[Array, "*B T N"] | Float[Array, "*B T N K"] | None = None,
    erase: Float[Array, "*B S N"] | Float[Array, "*B S N K"] | None = None,
    write: Float[Array, "*B S N"] | Float[Array, "*B S N V"] | None = None,
    erase_key: Float[Array, "*B S G K"] | None = None,
    num_steps: int = 1,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: Float[Array, "*B N K V"] | None = None,
    return_state: Literal[True],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B N K V"]]: ...


@over_devices
def gated_delta_rule(
    query: Float[Array, "*B T G K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S N V"],
    *,
    log_decay: Float[Array, "*B T N"] | Float[Array, "*B T N K"] | None = None,
    erase: Float[Array, "*B S N"] | Float[Array, "*B S N K"] | None = None,
    write: Float[Array, "*B S N"] | Float[Array, "*B S N V"] | None = None,
    erase_key: Float[Array, "*B S G K"] | None = None,
    num_steps: int = 1,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: Float[Array, "*B N K V"] | None = None,
    return_state: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B N K V"]]:
    r"""Causal attention whose state is a matrix per head, with decay and erasure.

        S_t = (I - k_t (b_t * k_t)^T) Diag(exp g_t) S_(t-1) + k_t (w_t * v_t)^T
        o_t = scale S_t^T q_t

    The state S `[K, V]` decays by g (`log_decay`); b (`erase`) is the fraction of the value stored
    under the key k that is erased, and w (`write`) the factor of the new value. With e
    (`erase_key`), the direction of erasure is not the written key:

        S_t = (I - (b_t * e_t) e_t^T) Diag(exp g_t) S_(t-1) + k_t (w_t * v_t)^T

    With M = `num_steps`, a token makes M such steps, of which the first one decays the state; o_t
    follows the last one. Published mechanisms, with beta in [0, 1]:

        b            w           g                 mechanism
        beta         beta        0                 DeltaNet
        beta         beta        by head           Gated DeltaNet
        beta         beta        by key feature    Kimi Delta Attention
        by feature   by feature  by key feature    Gated DeltaNet-2
        beta         beta        by head           Gated DeltaProduct, in M steps
        by feature   1           by key feature    RWKV-7, which erases along e
        0            1           0                 linear attention without a normalizer
        0            1           constant by head  RetNet, Lightning Attention
        0            step        by head           Mamba-2 (SSD)
        0            1           by key feature    GLA, HGRN2

    Accurate for any decay, -inf included: no exponential exceeds the range of floating point. Sums
    are computed in float32 (or float64). With b by head and b |k|^2 <= 2, the transition does not
    enlarge the state.

    Args:
      query: q `[*B, T, G, K]`, with G heads.
      key: k `[*B, S, G, K]`, with S = M T: the M steps of a token after each other.
      value: v `[*B, S, N, V]`, with N heads, a multiple of G; head n has the queries and keys of
        head n // (N // G), which are repeated for a few tokens at a time only.
      log_decay: g <= 0 `[*B, T, N]`, or by key feature `[*B, T, N, K]`; 0 when None.
      erase: b `[*B, S, N]` or `[*B, S, N, K]`; 0 when None, and no linear system is solved.
      write: w `[*B, S, N]` or `[*B, S, N, V]`; 1 when None.
      erase_key: e `[*B, S, G, K]`; needs `erase`. When None, the first formula: erased along
        k, with b on the right factor.
      num_steps: M.
      scale: factor of the output; 1 / sqrt(K) when None.
      segment_ids: `[*B, T]`, integers: each run of equal ids is independent of the others.
        `initial_state` belongs to the first segment, the returned state to the last.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last. Values at padding, NaN included,
        have no effect.
      initial_state: S after the preceding tokens `[*B, N, K, V]`; 0 when None.
      return_state: whether to also return S after all tokens.

    Returns:
      o `[*B, T, N, V]`, or the pair of it and S.

    Raises:
      ValueError: shapes or dtypes do not fit, or, outside of transformations such as `jit`, a log
        decay is above 0; the message says which.

    Examples:
      >>> key = jnp.ones((3, 1, 1))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> gated_delta_rule(key, key, value).ravel().tolist()  # the state adds values up
      [2.0, 6.0, 18.0]
      >>> gated_delta_rule(key, key, value, erase=key[..., 0]).ravel().tolist()  # or replaces them
      [2.0, 4.0, 12.0]

    References:
      Yang et al., 2024, Gated Delta Networks, arXiv:2412.06464; Kimi Team, 2025, Kimi Linear,
      arXiv:2510.26692; Dao and Gu, 2024, Transformers are SSMs, arXiv:2405.21060; Yang et al.,
      2023, Gated Linear Attention, arXiv:2312.06635; Peng et al., 2025, RWKV-7, arXiv:2503.14456;
      Siems et al., 2025, DeltaProduct, arXiv:2502.10297.
    """
    if num_steps != 1:
        arrays = query, key, value, log_decay, erase, write, erase_key
        tokens = _in_steps(num_steps, *arrays, segment_ids, key_value_seq_lengths)
        states = {"initial_state": initial_state, "return_state": return_state, "scale": scale}
        result = cast(Any, gated_delta_rule).__wrapped__(**tokens, **states)
        y, *state = result if return_state else (result,)
        y = y[..., num_steps - 1 :: num_steps, :, :]
        return (y, *state) if return_state else y
    _check_heads(query, key, value)
    check_tokens(
        key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths
    )
    *batch, length, _, key_depth = key.shape
    heads, value_depth = value.shape[-2:]
    by_head, by_feature_of_key = value.shape[:-1], (*value.shape[:-1], key_depth)
    check_array("log_decay", log_decay, (by_head, by_feature_of_key), jnp.floating)
    check_decay("log_decay", log_decay)
    check_array("erase", erase, (by_head, by_feature_of_key), jnp.floating)
    check_array("write", write, (by_head, value.shape), jnp.floating)
    check_array("erase_key", erase_key, (key.shape,), jnp.floating)
    if erase_key is not None and erase is None:
        raise ValueError("erase_key needs erase, the share that is erased; give both, or neither")
    state_shape = (*batch, heads, key_depth, value_depth)
    check_array("initial_state", initial_state, (state_shape,), jnp.floating)

    output_dtype = common_dtype(query, key, value)
    states = () if initial_state is None else (initial_state,)
    dtype = wide(output_dtype, *states)
    size, valid = math.prod(batch), None
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)
    query, key, value = without_padding(query, key, value, key_value_seq_lengths)

    def per_token(x: Array) -> Array:
        """`[*B, T, N]` or `[*B, T, N, F]` -> `[B, T, N, 1 or F]`, 0 at padding."""
        sizes = x.shape[len(batch) + 1 :] if x.ndim == len(batch) + 3 else (x.shape[-1], 1)
        x = x.astype(dtype).reshape(size, length, *sizes)
        return x if valid is None else jnp.where(valid.reshape(size, length, 1, 1), x, 0)

    query, key, value = (per_token(x) for x in (query, key, value))
    by_feature = log_decay is not None and log_decay.ndim == len(batch) + 3
    log_decay, erase, write = (
        None if x is None else per_token(x) for x in (log_decay, erase, write)
    )
    head_decay, feature_decay = (None, log_decay) if by_feature else (log_decay, None)
    separation = segment_decay(segment_ids, valid, heads, dtype)
    if separation is not None:
        head_decay = separation if head_decay is None else separation + head_decay
    if initial_state is None:
        initial_state = jnp.zeros(state_shape, dtype)
    tokens = MatrixOperands(
        (1 / math.sqrt(max(key_depth, 1)) if scale is None else scale) * query[..., None, :],
        key,
        value if write is None else write * value,
        head_decay,
        feature_decay,
        erase,
        None if erase_key is None else per_token(erase_key),
    )
    state = initial_state.astype(dtype).reshape(size * heads, key_depth, value_depth)
    y, state = recur(tokens, state)
    y = y.reshape(*batch, length, heads, value_depth).astype(output_dtype)
    if not return_state:
        return y
    return y, state.reshape(state_shape).astype(initial_state.dtype)


def _in_steps(
    steps: int,
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    erase: Array | None,
    write: Array | None,
    erase_key: Array | None,
    segment_ids: Array | None,
    lengths: Array | None,
) -> dict[str, Any]:
    """Arguments of `gated_delta_rule` with one step for each token.

    Raises:
      ValueError: the number of steps does not fit the tokens.
    """
    *batch, length, _, _ = query.shape
    if lengths is not None and jnp.issubdtype(lengths.dtype, jnp.integer):  # others are refused
        lengths = steps * jnp.clip(int32_lengths(lengths), 0, length)
    if steps < 1 or key.shape[:-2] != (*batch, steps * length):
        raise ValueError(
            f"key {key.shape} must have num_steps={steps} steps for each token of query "
            f"{query.shape}"
        )
    by_head = *batch, length, value.shape[-2]
    check_array("log_decay", log_decay, (by_head, (*by_head, key.shape[-1])), jnp.floating)
    check_tokens((*batch, length), segment_ids=segment_ids, key_value_seq_lengths=None)

    def alone(x: Array | None, place: int) -> Array | None:
        """x at one of the steps of its token, and 0 at the others."""
        if x is None:
            return None
        axis = len(batch) + 1
        widths = [(0, 0)] * (x.ndim + 1)
        widths[axis] = place, steps - 1 - place
        x = jnp.pad(jnp.expand_dims(x, axis), widths)
        return lax.collapse(x, axis - 1, axis + 1)

    return {
        **{"query": alone(query, steps - 1), "key": key, "value": value},
        **{"log_decay": alone(log_decay, 0), "erase": erase, "write": write},
        "erase_key": erase_key,
        "segment_ids": None if segment_ids is None else jnp.repeat(segment_ids, steps, -1),
        "key_value_seq_lengths": lengths,
    }


def _check_heads(query: Array, key: Array, value: Array) -> None:
    """Raise ValueError unless all have the same tokens, and the heads of queries and keys divide
    the heads of values."""
    check_paired_heads("gated_delta_rule", query, key, key)
    shapes = f"key {key.shape}, value {value.shape}"
    if value.ndim != key.ndim or value.shape[:-2] != key.shape[:-2]:
        raise ValueError(f"key and value must have the same tokens: {shapes}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"value must be floating point, got {value.dtype}")
    if value.shape[-2] % key.shape[-2]:
        raise ValueError(f"the heads of key must divide the heads of value: {shapes}")
