"""Log-attention: the public functions."""

from typing import Literal, overload

from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.log_attention import call
from heinsen_jax.ops.log_attention.call import Implementation
from heinsen_jax.ops.log_attention.state import HeinsenAttentionState, LogAttentionState
from heinsen_jax.ops.masks import last_tokens
from heinsen_jax.typing import Array, Decay, Inexact, Keys, Lengths, Mixed, Query, Segments, Values


@overload
def log_attention(
    query: Query,
    key: Keys,
    log_value: Inexact[Array, "*B S G V"],
    *,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    log_decay: Decay | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Inexact[Array, "*B T N V"]: ...


@overload
def log_attention(
    query: Query,
    key: Keys,
    log_value: Inexact[Array, "*B S G V"],
    *,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    log_decay: Decay | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Inexact[Array, "*B T N V"], LogAttentionState]: ...


@over_devices
def log_attention(
    query: Query,
    key: Keys,
    log_value: Inexact[Array, "*B S G V"],
    *,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    log_decay: Decay | None = None,
    initial_state: LogAttentionState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Inexact[Array, "*B T N V"] | tuple[Inexact[Array, "*B T N V"], LogAttentionState]:
    r"""Linear attention with the feature map exp and a normalizer, in log space.

    The score of key s for query t is log sum_k exp(Q_tk) exp(K_sk) = LSE_k(Q_tk + K_sk), so that

        Y = Softmax(log(exp(Q) exp(K)^T)) V                             (1)
        log Y = LSE_k(Q + H_S) - LSE_k(Q + H_Z)                         (2), (5)
        H_S = LSE_s(K_s + log V_s),  H_Z = LSE_s(K_s)                   (3), (6)

    Q, K and V are the queries, keys and values of one head, Y its outputs; t is the token of a
    query, s the token of a key, and k one of the key_depth features. LSE is log-sum-exp: LSE_k
    over features, LSE_s over tokens. (H_S, H_Z) is the state: H_S has an entry for each key feature
    and value feature, H_Z one for each key feature. s runs over the tokens up to and including t if
    causal (4), otherwise over all tokens.

    The result is log Y, the input of later layers. No scale 1/sqrt(key_depth) is applied, and the
    op has no parameters. Finite for all finite inputs whose sums Q + K and K + log V are finite.
    Sums and states are float32 (or float64), also for half-precision inputs; "chunked" rounds
    factors of products to bfloat16 if all inputs are bfloat16.

    Args:
      query: `[*B, T, num_heads, key_depth]`.
      key: `[*B, S, num_kv_heads, key_depth]`; num_heads a multiple of num_kv_heads. Query head n
        reads key/value head n // (num_heads // num_kv_heads). A key of -inf masks a token.
      log_value: `[*B, S, num_kv_heads, value_depth]`, the natural logarithm of positive values, or
        complex, log|v| + i pi (v < 0), for values of either sign: then log Y is complex likewise.
        log 0 = -inf is supported. But if the total weight of the tokens with value 0 exceeds the
        other tokens' weight by more than about 80 nats in float32, "chunked" may return -inf.
      is_causal: whether tokens attend only to themselves and earlier tokens; then S must equal T.
      segment_ids: `[*B, S]`, integers: tokens attend only within their own segment, a run of equal
        ids. `initial_state` belongs to the first segment, the returned state to the last.
      key_value_seq_lengths: `[*B]`, the number of valid tokens, the rest being padding; or
        `[*B, 2]`, the first valid token and the one past the last. Values at padding, NaN included,
        have no effect.
      local_window_size: number of tokens that a query attends to, itself included; or a pair as in
        `jax.nn.dot_product_attention`, the numbers of tokens before and after it; unlimited when
        None. Costs two passes for any size. Causal only, and without states.
      log_decay: `[*B, S, num_kv_heads]` or `[*B, S, num_kv_heads, key_depth]`, at most 0: before
        token s is added, the state is multiplied by exp(log_decay_s),

            H_s = logaddexp(H_s-1 + log_decay_s, K_s + log V_s)

        If not causal, every query reads the last state.
      initial_state: state after the preceding tokens; the empty state when None.
      return_state: whether to also return the state after all S tokens. Its `log_decay` is the
        total decay (-inf after the start of a segment). With an initial state, it is None if that
        state has none; without one, if neither `log_decay` nor `segment_ids` is given. The state
        has the dtype of the initial state, or else of the sums: float64 if an input is float64,
        otherwise float32.
      implementation: "reference" (the definition, quadratic), "scan" (a state after every token),
        "chunked" (matrix products over chunks, by the cheapest tier that is exact for the inputs;
        or a `Chunked` with other sizes), "gpu" (experimental kernels for NVIDIA's Hopper generation
        and later), or None to choose: "scan" for one token, "chunked" for several; "gpu" where it
        was measured to be faster, on a single H100 or H200, for large batches in bfloat16 without
        optional arguments, unless the environment variable HEINSEN_JAX_GPU_KERNELS is 0. On a
        device, a named implementation never falls back to another, except that "gpu" computes a
        call again by "chunked" if a normalizer is close to the smallest normal number.
        "reference" and "scan" have derivatives of any order and mode; "chunked" and "gpu", which
        None may choose, first derivatives in reverse mode only. With those, JAX raises "can't apply
        forward-mode autodiff (jvp) to a custom_vjp function" or, for second derivatives,
        "Linearization failed to produce known values".

    Returns:
      log Y `[*B, T, num_heads, value_depth]`, or a pair of it and a `LogAttentionState`. Rows
      without visible tokens are -inf, with zero gradients.

    Raises:
      ValueError: shapes, dtypes or the state do not fit; the message says which.
      NotImplementedError: the combination of arguments, or the call by the named implementation, is
        unsupported; the message says which.

    Examples:
      Equal keys have equal weights: each output is the average of the values so far, in one call or
      chunk by chunk.

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
    arguments = call.Arguments(
        query=query,
        key=key,
        value=log_value,
        is_log=True,
        is_causal=is_causal,
        segment_ids=segment_ids,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=last_tokens(local_window_size, is_causal),
        log_decay=log_decay,
        state=initial_state,
        implementation=implementation,
    )
    call.check(arguments, return_state=return_state)
    y, state = call.attend(call.with_measured_kernel(arguments))
    return (y, state) if return_state else y


@overload
def heinsen_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    log_decay: Decay | None = None,
    initial_state: HeinsenAttentionState | None = None,
    return_state: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Mixed: ...


@overload
def heinsen_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    log_decay: Decay | None = None,
    initial_state: HeinsenAttentionState | None = None,
    return_state: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Mixed, HeinsenAttentionState]: ...


@over_devices
def heinsen_attention(
    query: Query,
    key: Keys,
    value: Values,
    *,
    is_causal: bool = True,
    segment_ids: Segments | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    log_decay: Decay | None = None,
    initial_state: HeinsenAttentionState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Mixed | tuple[Mixed, HeinsenAttentionState]:
    """`log_attention` for values of any sign, in linear space.

        Y = Softmax(log(exp(Q) exp(K)^T)) V                             (1)

    Every output is a convex combination of values and computed as such, so values of any size are
    supported.

    Args:
      query, key, is_causal, segment_ids, key_value_seq_lengths: as in `log_attention`.
      value: `[*B, S, num_kv_heads, value_depth]`, of any sign.
      local_window_size, log_decay, return_state, implementation: as in `log_attention`, except
        that None never chooses "gpu".
      initial_state: as returned by this function.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, 0 in rows without visible tokens; with `return_state`,
      a pair of it and a `HeinsenAttentionState`: averages of values, and log Z.

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
    arguments = call.Arguments(
        query=query,
        key=key,
        value=value,
        is_log=False,
        is_causal=is_causal,
        segment_ids=segment_ids,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=last_tokens(local_window_size, is_causal),
        log_decay=log_decay,
        state=initial_state,
        implementation=implementation,
    )
    call.check(arguments, return_state=return_state)
    y, state = call.attend(arguments)
    return (y, state) if return_state else y
