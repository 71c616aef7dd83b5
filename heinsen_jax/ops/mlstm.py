"""Matrix memory with exponential gates (mLSTM)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, overload

import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import (
    check_array,
    check_decay,
    check_paired_heads,
    check_tokens,
    valid_tokens,
    without_padding,
)
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import astype_like, varying_like
from heinsen_jax.ops.linear_recurrence import log_linear_recurrence
from heinsen_jax.ops.matrix_state import MatrixOperands, recur_with_normalizer, segment_decay
from heinsen_jax.ops.numerics import divide_or_zero, log_add_exp, share, where_empty
from heinsen_jax.typing import Array, Float, Lengths, Segments, common_dtype, pytree_dataclass, wide


@pytree_dataclass
class MLSTMState:
    """State of mLSTM attention: C exp(-m), n exp(-m) and the stabilizer m, the log of the sum of
    the input gates, a sum that decays like C and n.

    Attributes:
      c: matrix memory C exp(-m) `[*B, N, K, V]`.
      n: normalizer n exp(-m) `[*B, N, K]`.
      m: stabilizer `[*B, N]`; -inf without tokens.
      log_forget: sum of the log forget gates of the tokens `[*B, N]`, by which earlier states
        decay; None in a state that is never merged into an earlier one.
    """

    c: Float[Array, "*B N K V"]
    n: Float[Array, "*B N K"]
    m: Float[Array, "*B N"]
    log_forget: Float[Array, "*B N"] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        num_heads: int,
        key_depth: int,
        value_depth: int,
        dtype=jnp.float32,
    ) -> MLSTMState:
        """Return the state of no tokens: sums of 0."""
        shape = (*batch_shape, num_heads)
        c = jnp.zeros((*shape, key_depth, value_depth), dtype)
        m = jnp.full(shape, -jnp.inf, dtype)
        return cls(c, jnp.zeros((*shape, key_depth), dtype), m)

    def merge(self, other: MLSTMState) -> MLSTMState:
        """Return the state of these tokens followed by the tokens of `other`."""
        if other.log_forget is None:
            raise ValueError(
                "other.log_forget is None: the later state lacks the sum of its log forget gates; "
                "compute it with `heinsen_jax.ops.mlstm.mlstm_summary`"
            )
        # Sums do not depend on stabilizers, which have no gradient.
        first, second = lax.stop_gradient((self.m, other.m))
        decayed = first + other.log_forget
        m = lax.stop_gradient(log_add_exp(decayed, second))
        before, after = share(decayed, m)[..., None], share(second, m)[..., None]
        c = before[..., None] * self.c + after[..., None] * other.c
        total = None if self.log_forget is None else self.log_forget + other.log_forget
        return MLSTMState(c, before * self.n + after * other.n, m, total)


@overload
def mlstm_attention(
    query: Float[Array, "*B T N K"],
    key: Float[Array, "*B T N K"],
    value: Float[Array, "*B T N V"],
    *,
    log_input_gate: Float[Array, "*B T N"],
    log_forget_gate: Float[Array, "*B T N"],
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: MLSTMState | None = None,
    return_state: Literal[False] = False,
) -> Float[Array, "*B T N V"]: ...


@overload
def mlstm_attention(
    query: Float[Array, "*B T N K"],
    key: Float[Array, "*B T N K"],
    value: Float[Array, "*B T N V"],
    *,
    log_input_gate: Float[Array, "*B T N"],
    log_forget_gate: Float[Array, "*B T N"],
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: MLSTMState | None = None,
    return_state: Literal[True],
) -> tuple[Float[Array, "*B T N V"], MLSTMState]: ...


@over_devices
def mlstm_attention(
    query: Float[Array, "*B T N K"],
    key: Float[Array, "*B T N K"],
    value: Float[Array, "*B T N V"],
    *,
    log_input_gate: Float[Array, "*B T N"],
    log_forget_gate: Float[Array, "*B T N"],
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    initial_state: MLSTMState | None = None,
    return_state: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], MLSTMState]:
    r"""Causal attention with a matrix memory, an exponential input gate and a forget gate.

        C_t = f_t C_(t-1) + i_t k_t v_t^T,    n_t = f_t n_(t-1) + i_t k_t           (19), (20)
        o_t = C_t^T q_t / max(|n_t . q_t|, 1)                                       (21), (22)

    with keys k scaled by 1 / sqrt(K), i = exp(log_input_gate) and f = exp(log_forget_gate). C and n
    are represented by C exp(-m) and n exp(-m), with max(|n . q|, exp(-m)) as denominator; o does
    not depend on m. With m_t = log(f_t exp(m_(t-1)) + i_t) all factors are at most 1, for any input
    gate. Sums are computed in chunks of tokens, in float32 (or float64).

    Args:
      query: q `[*B, T, N, K]`, with N heads.
      key: k `[*B, T, N, K]`.
      value: v `[*B, T, N, V]`.
      log_input_gate: log i `[*B, T, N]`, of any size.
      log_forget_gate: log f <= 0 `[*B, T, N]`.
      segment_ids: `[*B, T]`, integers: each run of equal ids is independent of the others.
        `initial_state` belongs to the first segment, the returned state to the last.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last. Values at padding, NaN included,
        have no effect.
      initial_state: state after the preceding tokens; the empty state when None.
      return_state: whether to also return the state after all tokens.

    Returns:
      o `[*B, T, N, V]`, or the pair of it and an `MLSTMState`.

    Raises:
      ValueError: shapes or dtypes do not fit, or, outside of transformations such as `jit`, a log
        decay is above 0; the message says which.

    Examples:
      >>> key = jnp.ones((3, 1, 1))  # three tokens, one head
      >>> value = jnp.array([2.0, 4.0, 12.0]).reshape(3, 1, 1)
      >>> gate = jnp.zeros((3, 1))
      >>> y = mlstm_attention(key, key, value, log_input_gate=gate, log_forget_gate=gate)
      >>> y.ravel().round().tolist()
      [2.0, 3.0, 6.0]

    References:
      Beck et al., 2024, xLSTM: Extended Long Short-Term Memory, arXiv:2405.04517.
    """
    check_paired_heads("mlstm_attention", query, key, value)
    check_tokens(
        key.shape[:-2], segment_ids=segment_ids, key_value_seq_lengths=key_value_seq_lengths
    )
    *batch, length, heads, key_depth = key.shape
    gates = {"log_input_gate": log_input_gate, "log_forget_gate": log_forget_gate}
    for name, gate in gates.items():
        check_array(name, gate, (key.shape[:-1],), jnp.floating)
    check_decay("log_forget_gate", log_forget_gate)
    output_dtype = common_dtype(query, key, value)
    states = () if initial_state is None else (initial_state.c,)
    dtype = wide(output_dtype, *states)
    value_depth = value.shape[-1]
    if initial_state is None:
        initial_state = MLSTMState.empty(batch, heads, key_depth, value_depth, dtype)
    expected = MLSTMState.empty(batch, heads, key_depth, value_depth)
    for name in ("c", "n", "m"):
        x, shape = getattr(initial_state, name), getattr(expected, name).shape
        check_array(f"initial_state.{name}", x, (shape,), jnp.floating)

    query, key, value = without_padding(query, key, value, key_value_seq_lengths)
    log_input, log_forget = log_input_gate.astype(dtype), log_forget_gate.astype(dtype)
    valid = None
    if key_value_seq_lengths is not None:
        valid = valid_tokens(key_value_seq_lengths, tuple(batch), length)
        log_input = jnp.where(valid[..., None], log_input, -jnp.inf)
        log_forget = jnp.where(valid[..., None], log_forget, 0)
    separation = segment_decay(segment_ids, valid, heads, dtype)
    if separation is not None:
        log_forget = log_forget + separation.reshape(log_forget.shape)

    m, decay, weight = _relative_gates(log_input, log_forget, initial_state.m.astype(dtype))
    written = weight[..., None] * key.astype(dtype) / math.sqrt(max(key_depth, 1))
    size = math.prod(batch)
    tokens = MatrixOperands(
        query.astype(dtype).reshape(size, length, heads, 1, key_depth),
        written.reshape(size, length, heads, key_depth),
        value.astype(dtype).reshape(size, length, heads, value_depth),
        decay.reshape(size, length, heads, 1),
    )
    c = initial_state.c.astype(dtype).reshape(size * heads, key_depth, value_depth)
    n = initial_state.n.astype(dtype).reshape(size * heads, key_depth)
    (numerator, total), (c, n) = recur_with_normalizer(tokens, c, n)
    total = total.reshape(*batch, length, heads, 1)
    total = jnp.maximum(jnp.abs(total), jnp.exp(-m[..., 1:, :])[..., None])
    y = divide_or_zero(numerator.reshape(*batch, length, heads, value_depth), total)
    y = y.astype(output_dtype)
    if not return_state:
        return y
    after = MLSTMState(c.reshape(expected.c.shape), n.reshape(expected.n.shape), m[..., -1, :])
    if initial_state.log_forget is not None:
        after = replace(after, log_forget=initial_state.log_forget + jnp.sum(log_forget, -2))
    return y, astype_like(after, initial_state)


def _relative_gates(
    log_input: Array, log_forget: Array, first: Array
) -> tuple[Array, Array, Array]:
    """Return the stabilizers before the first token, which is given, and after each `[*B, T + 1,
    N]`; and relative to them the log forget gates and the input gates `[*B, T, N]`.

    Outputs do not depend on stabilizers, which have no gradient.
    """
    inputs, gates, first = lax.stop_gradient((log_input, log_forget, first))
    m = log_linear_recurrence(gates, inputs, initial=first)
    each = jnp.concatenate([first[..., None, :], m], -2)
    finite = where_empty(each, 0)
    # The difference of near stabilizers is exact: rounding errors do not accumulate over tokens.
    relative = log_forget - (finite[..., 1:, :] - finite[..., :-1, :])
    decay = jnp.where(each[..., :-1, :] == -jnp.inf, 0, relative)
    return each, decay, share(log_input, m)


def mlstm_summary(
    query: Float[Array, "*B T N K"],
    key: Float[Array, "*B T N K"],
    value: Float[Array, "*B T N V"],
    *,
    log_input_gate: Float[Array, "*B T N"],
    log_forget_gate: Float[Array, "*B T N"],
    key_value_seq_lengths: Lengths | None = None,
) -> MLSTMState:
    """Return the state of these tokens alone, with the sum of their log forget gates. Args: as
    `mlstm_attention`."""
    *batch, _, heads, key_depth = key.shape
    dtype = wide(query, key, value)
    empty = MLSTMState.empty(batch, heads, key_depth, value.shape[-1], dtype)
    empty = varying_like(replace(empty, log_forget=jnp.zeros_like(empty.m)), key)
    _, state = mlstm_attention(
        query,
        key,
        value,
        log_input_gate=log_input_gate,
        log_forget_gate=log_forget_gate,
        key_value_seq_lengths=key_value_seq_lengths,
        initial_state=empty,
        return_state=True,
    )
    return state
