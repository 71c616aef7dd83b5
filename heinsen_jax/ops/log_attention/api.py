"""Log-attention: public functions, their checks, and the choice of implementation."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from heinsen_jax.ops.log_attention import chunked, reference, scan
from heinsen_jax.ops.log_attention.state import LogAttentionState
from heinsen_jax.typing import Array

Implementation = Literal["reference", "scan", "chunked", "gpu"]
_MODULES = {"reference": reference, "scan": scan, "chunked": chunked}


def log_attention(
    query: Array,
    key: Array,
    log_value: Array,
    *,
    is_causal: bool = True,
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
      log_value: `[*B, S, num_kv_heads, value_depth]`, the natural logarithm of positive values.
      is_causal: whether a token sees only itself and earlier ones; then S must equal T.
      initial_state: what was seen before these tokens; nothing when None.
      return_state: whether to return also the state after all S tokens.
      implementation: "reference" (the definition, quadratic), "scan" (a state after every token),
        "chunked" (matrix products over chunks, with exact log-space blocks where those would
        underflow), or None to choose by shape. A named one never falls back to another.

    Returns:
      log Y `[*B, T, num_heads, value_depth]`, or a pair of it and a `LogAttentionState`. A query
      that sees nothing has log Y = -inf, and gradients of 0.

    Raises:
      ValueError: shapes, dtypes or the state do not fit; the message says which.
      NotImplementedError: the named implementation cannot serve the call.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """
    if jnp.iscomplexobj(log_value):
        raise NotImplementedError(
            "log_value is complex: for values of either sign call "
            "heinsen_attention(query, key, value)"
        )
    if initial_state is not None and jnp.iscomplexobj(initial_state.log_s):
        raise ValueError(
            "initial_state.log_s is complex, as heinsen_attention returns it; log_attention takes "
            "real ones"
        )

    def run(attention, query, key, log_value, state, is_causal):
        return attention.log_attention(query, key, log_value, state, is_causal=is_causal)

    log_y, state = _dispatch(
        run, query, key, log_value, initial_state, is_causal, implementation, "log_value"
    )
    return (log_y, state) if return_state else log_y


def heinsen_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = True,
    initial_state: LogAttentionState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """`log_attention` for values of any sign, in linear space.

        Y = Softmax(log(exp(Q) exp(K)^T)) V                             (1)

    Every output is a convex average of values, computed as one, so no value is too large or small.

    Args:
      query, key, is_causal, return_state, implementation: as in `log_attention`.
      value: `[*B, S, num_kv_heads, value_depth]`, of any sign.
      initial_state: as returned by this function or by `log_attention`.

    Returns:
      Y `[*B, T, num_heads, value_depth]`, 0 where a query sees nothing; with `return_state`, a pair
      of it and a `LogAttentionState` whose `log_s` is complex: log|S| + i pi (S < 0).

    Raises:
      ValueError, NotImplementedError: as `log_attention`.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """

    def run(attention, query, key, value, state, is_causal):
        y, means = attention.mean_attention(
            query, key, value, state.to_means(), is_causal=is_causal
        )
        return y, means.to_logs()

    y, state = _dispatch(run, query, key, value, initial_state, is_causal, implementation, "value")
    return (y, state) if return_state else y


def _dispatch(
    run: Callable,
    query: Array,
    key: Array,
    value: Array,
    state: LogAttentionState | None,
    is_causal: bool,
    implementation: str | None,
    value_name: str,
) -> tuple[Array, LogAttentionState]:
    """Checks, folds batch and heads into one axis `X`, runs one implementation, and unfolds."""
    _check(query, key, value, is_causal, value_name)
    *batch, length, num_heads, key_depth = query.shape
    sources, groups, value_depth = value.shape[-3:]
    dtype = jnp.result_type(query, key, value)
    query, key, value = (
        x.astype(jnp.promote_types(dtype, jnp.float32)) for x in (query, key, value)
    )
    if state is None:
        state = LogAttentionState.empty(batch, groups, key_depth, value_depth, query.dtype)
    state._check(query=query, key=key, log_value=value)
    attention = _choose(implementation, length, is_causal)
    if sources == 0:  # nothing to add: what is left is to read the state
        attention, is_causal = scan, False

    folds = math.prod(batch) * groups
    rows = query.reshape(*batch, length, groups, num_heads // groups, key_depth)
    rows = jnp.moveaxis(rows, -4, -2).reshape(folds, num_heads // groups, length, key_depth)
    folded = LogAttentionState(
        state.log_s.reshape(folds, key_depth, value_depth), state.log_z.reshape(folds, key_depth)
    )
    key, value = (
        jnp.moveaxis(x, -2, -3).reshape(folds, sources, x.shape[-1]) for x in (key, value)
    )
    y, folded = run(attention, rows, key, value, folded, is_causal)
    y = y.reshape(*batch, groups, num_heads // groups, length, value_depth)
    y = jnp.moveaxis(y, -2, -4).reshape(*batch, length, num_heads, value_depth)
    state = LogAttentionState(
        folded.log_s.reshape(state.log_s.shape), folded.log_z.reshape(state.log_z.shape)
    )
    return y.astype(dtype), state


def _choose(implementation: str | None, length: int, is_causal: bool):
    if implementation is None:
        implementation = "scan" if is_causal and length == 1 else "chunked"
    if implementation == "gpu":
        raise NotImplementedError(
            'implementation="gpu": there is no fused kernel yet; use "chunked", which runs on GPUs'
        )
    if implementation not in _MODULES:
        raise ValueError(
            f"implementation must be None or one of {[*_MODULES, 'gpu']}, not {implementation!r}"
        )
    return _MODULES[implementation]


def _check(query: Array, key: Array, value: Array, is_causal: bool, value_name: str) -> None:
    shapes = f"query {query.shape}, key {key.shape}, {value_name} {value.shape}"
    arrays = {"query": query, "key": key, value_name: value}
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(f"{name} must be [..., tokens, heads, depth], has shape {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, is {x.dtype}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"batch axes (all but the last three) must be equal: {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and {value_name} must have the same tokens and heads: {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same depth: {shapes}")
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"num_heads {query.shape[-2]} must be a multiple of num_kv_heads {key.shape[-2]}: "
            f"{shapes}"
        )
    if is_causal and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            "causal attention needs as many queries as keys; for others pass is_causal=False: "
            f"{shapes}"
        )
