"""Log-attention: the public functions."""

from typing import Any, Literal

from heinsen_jax.ops.log_attention import call
from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.gpu import Fused
from heinsen_jax.ops.log_attention.state import LogAttentionState
from heinsen_jax.typing import Array

Implementation = Literal["reference", "scan", "chunked", "gpu"] | Chunked | Fused


def log_attention(
    query: Array,
    key: Array,
    log_value: Array,
    *,
    is_causal: bool = True,
    segment_ids: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | None = None,
    log_decay: Array | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    r"""Softmax attention with constant cost per token, in log space.

    With scores LSE_k(Q_tk + K_sk), the log of exponentiated query-key products,

        Y = Softmax(log(exp(Q) exp(K)^T)) V                             (1)
        log Y = LSE_K(Q + H_S) - LSE_K(Q + H_Z)                         (2), (5)
        H_S = LSE_s(K_s + log V_s),  H_Z = LSE_s(K_s)                   (3), (6)

    where s runs over the tokens up to and including t if causal (4), over all if not. The result
    is log Y, which is what later layers take in. There is no scale 1/sqrt(K) and no parameter.
    Finite for every finite input; float32 (or float64) inside, also for half-precision inputs.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; num_heads a multiple of num_kv_heads. Query head n
        reads key/value head n // (num_heads // num_kv_heads). A key of -inf is a token unseen.
      log_value: `[*B, S, num_kv_heads, value_depth]`, the natural logarithm of positive values, or
        complex, log|v| + i pi (v < 0), for values of either sign: then log Y is complex likewise.
      is_causal: whether a token sees only itself and earlier ones; then S must equal T.
      segment_ids: `[*B, S]`, whole numbers: tokens see only those of their own segment, a run of
        equal numbers. The state given belongs to the first segment, the one returned to the last.
      key_value_seq_lengths: `[*B]`, how many tokens there are, the rest being padding; or
        `[*B, 2]`, the first one and the one past the last, for padding on the left. What lies at
        padding, NaN included, changes nothing.
      local_window_size: how many tokens a query sees, itself included; all when None. Costs two
        passes, whatever the size. Causal only, and without states.
      log_decay: `[*B, S, num_kv_heads]` or `[*B, S, num_kv_heads, key_depth]`, at most 0: before
        token s is added the state is multiplied by exp(log_decay_s),

            H_s = logaddexp(H_s-1 + log_decay_s, K_s + log V_s)

        If not causal, every query reads the last state.
      initial_state: what was seen before these tokens; nothing when None.
      return_state: whether to return also the state after all S tokens. It has the total of decay
        and segments in `log_decay`, unless an initial state without it was given.
      implementation: "reference" (the definition, quadratic), "scan" (a state after every token),
        "chunked" (matrix products over chunks where these are exact, by halves elsewhere; or a
        `Chunked` with other sizes), "gpu" (fused kernels for NVIDIA's Hopper generation and later;
        calls whose sums come near the ends of the exponent range are computed again by "chunked";
        products of bfloat16 inputs are bfloat16's), or None to choose by shape. A named one never
        falls back to another where it cannot serve. "chunked" and "gpu" have reverse-mode
        derivatives only.

    Returns:
      log Y `[*B, T, num_heads, value_depth]`, or a pair of it and a `LogAttentionState`. A query
      that sees nothing has log Y = -inf, and gradients of 0.

    Raises:
      ValueError: shapes, dtypes or the state do not fit; the message says which.
      NotImplementedError: these arguments do not go together, or the named implementation cannot
        serve the call.

    Examples:
      Keys that are alike weigh alike: each token gets the average of those so far, at once or in
      pieces.

      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> log_value = jnp.log(jnp.array([2.0, 4.0, 12.0])).reshape(3, 1, 1)
      >>> jnp.exp(log_attention(key, key, log_value)).ravel().round().tolist()
      [2.0, 3.0, 6.0]
      >>> _, state = log_attention(key[:2], key[:2], log_value[:2], return_state=True)
      >>> log_y = log_attention(key[2:], key[2:], log_value[2:], initial_state=state)
      >>> jnp.exp(log_y).ravel().round().tolist()
      [6.0]

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """
    return call.run(
        call.Arguments(
            query=query,
            key=key,
            value=log_value,
            value_name="log_value",
            is_causal=is_causal,
            segment_ids=segment_ids,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            log_decay=log_decay,
            state=initial_state,
            return_state=return_state,
            implementation=implementation,
        )
    )


def heinsen_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = True,
    segment_ids: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | None = None,
    log_decay: Array | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """`log_attention` for values of any sign, in linear space.

        Y = Softmax(log(exp(Q) exp(K)^T)) V                             (1)

    Every output is a convex average of values, computed as one, so no value is too large or small.

    Args:
      query, key: as in `log_attention`, like all other arguments.
      value: `[*B, S, num_kv_heads, value_depth]`, of any sign.
      initial_state: as returned by this function or by `log_attention`.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, 0 where a query sees nothing; with `return_state`, a pair
      of it and a `LogAttentionState` whose `log_s` is complex: log|S| + i pi (S < 0).

    Raises:
      ValueError, NotImplementedError: as `log_attention`.

    Examples:
      >>> key = jnp.zeros((3, 1, 2))  # three tokens, one head
      >>> value = jnp.array([2.0, -4.0, 8.0]).reshape(3, 1, 1)
      >>> heinsen_attention(key, key, value).ravel().round().tolist()
      [2.0, -1.0, 2.0]

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """
    return call.run(
        call.Arguments(
            query=query,
            key=key,
            value=value,
            value_name="value",
            is_causal=is_causal,
            segment_ids=segment_ids,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            log_decay=log_decay,
            state=initial_state,
            return_state=return_state,
            implementation=implementation,
        )
    )
