"""One call of log-attention: its arguments checked, brought into one layout, and dispatched."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.arguments import (
    check_array,
    check_heads,
    check_same_length,
    check_tokens,
    document_starts,
    is_there,
)
from heinsen_jax.ops.log_attention import gpu, passes, reference
from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.gpu import Fused
from heinsen_jax.ops.log_attention.scan import Scan
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens, varying_like
from heinsen_jax.ops.numerics import signed_log_difference
from heinsen_jax.typing import Array

NAMES = ("reference", "scan", "chunked", "gpu")


ARRAYS = "query", "key", "value", "segment_ids", "key_value_seq_lengths", "log_decay", "state"
CHOICES = "value_name", "is_causal", "local_window_size", "return_state", "implementation"


@partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=CHOICES)
@dataclass(frozen=True)
class Arguments:
    """As given to `log_attention` or `heinsen_attention`, which document them."""

    query: Array
    key: Array
    value: Array
    value_name: str
    is_causal: bool
    segment_ids: Array | None
    key_value_seq_lengths: Array | None
    local_window_size: int | None
    log_decay: Array | None
    state: LogAttentionState | None
    return_state: bool
    implementation: Any

    @property
    def batch(self) -> tuple[int, ...]:
        return self.query.shape[:-3]

    @property
    def is_linear(self) -> bool:
        """Whether values are given themselves, not their logarithms."""
        return self.value_name == "value"


def run(arguments: Arguments) -> Any:
    """The output, or a pair of it and the state after all tokens."""
    _check_arrays(arguments)
    _check_combination(arguments)
    _choose(arguments)  # which refuses what it does not know
    output, state = _compiled(arguments)
    return (output, state) if arguments.return_state else output


@partial(jax.jit, inline=True)  # outside another `jit`, so that calls alike are compiled once
def _compiled(arguments: Arguments) -> tuple[Array, LogAttentionState]:
    is_signed = jnp.iscomplexobj(arguments.value) and not arguments.is_linear
    return _signed(arguments) if is_signed else _attend(arguments)


def _signed(arguments: Arguments) -> tuple[Array, LogAttentionState]:
    """Positive and negative values as twice as many features: each has a logarithm."""

    def split(x: Array) -> Array:
        negative = jnp.abs(x.imag) > jnp.pi / 2
        parts = [jnp.where(negative, -jnp.inf, x.real), jnp.where(negative, x.real, -jnp.inf)]
        return jnp.concatenate(parts, -1)

    def join(x: Array) -> Array:
        size, is_negative = signed_log_difference(*jnp.split(x, 2, -1))
        return lax.complex(size, jnp.where(is_negative, jnp.pi, 0).astype(size.dtype))

    state = arguments.state
    if state is not None:
        log_s = state.log_s.astype(jnp.promote_types(state.log_s.dtype, jnp.complex64))
        state = dataclasses.replace(state, log_s=split(log_s))
    value = split(arguments.value)
    log_y, state = _attend(dataclasses.replace(arguments, value=value, state=state))
    return join(log_y), dataclasses.replace(state, log_s=join(state.log_s))


def _attend(arguments: Arguments) -> tuple[Array, LogAttentionState]:
    implementation = _choose(arguments)
    state = _state(arguments)
    dtype = jnp.promote_types(_dtype(arguments), jnp.float32)
    if isinstance(implementation, Fused):
        dtype = _kernel_dtype(arguments)
    if isinstance(implementation, Chunked) and implementation.half is None:
        half = _dtype(arguments) == jnp.bfloat16
        implementation = dataclasses.replace(implementation, half=half)
    tokens, there, segment_ids = _tokens(arguments, dtype)
    masked = _masked(tokens, there, segment_ids)

    inside = LogAttentionState(_one_batch(state.log_s, 3), _one_batch(state.log_z, 2))
    inside = varying_like(inside, tokens)
    inside = inside.to_means() if arguments.is_linear else inside
    if tokens.length == 0:  # nothing to add: what is left is to read the state
        y, after = passes.read_all(tokens, inside)
    elif implementation is reference:
        y, after = reference.attention(
            tokens.query,
            tokens.key,
            tokens.value,
            inside,
            is_causal=arguments.is_causal,
            is_there=there,
            segment_ids=segment_ids,
            window=arguments.local_window_size,
            log_decay=tokens.log_decay,
        )
    else:
        y, after = passes.attend(
            implementation,
            masked,
            inside,
            is_causal=arguments.is_causal,
            window=arguments.local_window_size,
        )
    after = after.to_logs() if isinstance(after, MeanState) else after
    after = LogAttentionState(
        after.log_s.reshape(state.log_s.shape),
        after.log_z.reshape(state.log_z.shape),
        _total_decay(arguments, state, masked),
    )
    y = y.reshape(*arguments.query.shape[:-1], arguments.value.shape[-1])
    return y.astype(_dtype(arguments)), after


def _kernel_dtype(arguments: Arguments) -> Any:
    """Of what kernels read: half the bytes of bfloat16."""
    dtype = _dtype(arguments)
    return dtype if dtype == jnp.bfloat16 else jnp.promote_types(dtype, jnp.float32)


def _dtype(arguments: Arguments) -> Any:
    return jnp.result_type(arguments.query, arguments.key, arguments.value)


def _state(arguments: Arguments) -> LogAttentionState:
    groups, key_depth = arguments.key.shape[-2:]
    value_depth = arguments.value.shape[-1]
    if arguments.state is None:
        dtype = jnp.promote_types(_dtype(arguments), jnp.float32)
        return LogAttentionState.empty(arguments.batch, groups, key_depth, value_depth, dtype)
    arrays = {"query": arguments.query, "key": arguments.key}
    arguments.state.check(**arrays, **{arguments.value_name: arguments.value})
    if jnp.iscomplexobj(arguments.state.log_s) and not arguments.is_linear:
        raise ValueError(
            "initial_state.log_s is complex, for values of either sign, but log_value is real: "
            "pass log_value.astype(complex) or the state of a call with real log_value"
        )
    return arguments.state


def _one_batch(x: Array, axes: int) -> Array:
    """With leading axes made one, all but the last `axes`."""
    return x.reshape(math.prod(x.shape[:-axes]), *x.shape[x.ndim - axes :])


def _tokens(arguments: Arguments, dtype: Any) -> tuple[Tokens, Array | None, Array | None]:
    """The tokens in one layout; which are there `[B, S]`; their segments."""
    *_, length, num_heads, key_depth = arguments.query.shape
    sources, groups, value_depth = arguments.value.shape[-3:]
    batch = math.prod(arguments.batch)
    heads = num_heads // groups
    log_decay = arguments.log_decay
    if log_decay is not None:
        features = 1 if log_decay.ndim < arguments.key.ndim else key_depth
        exact = jnp.promote_types(dtype, jnp.float32)
        log_decay = jnp.asarray(log_decay, exact).reshape(batch, sources, groups, features)
    tokens = Tokens(
        jnp.asarray(arguments.query, dtype).reshape(batch, length, groups, heads, key_depth),
        jnp.asarray(arguments.key, dtype).reshape(batch, sources, groups, key_depth),
        jnp.asarray(arguments.value, dtype).reshape(batch, sources, groups, value_depth),
        log_decay,
    )
    there = segment_ids = None
    if arguments.segment_ids is not None:
        segment_ids = jnp.asarray(arguments.segment_ids).reshape(batch, sources)
    if arguments.key_value_seq_lengths is not None:
        there = is_there(arguments.key_value_seq_lengths, arguments.batch, sources)
        there = there.reshape(batch, sources)
    if there is not None and arguments.is_causal:  # NaN times a cotangent of 0 would be NaN
        usable = there[..., None, None, None] | jnp.isfinite(tokens.query)
        tokens = dataclasses.replace(tokens, query=jnp.where(usable, tokens.query, 0))
    return tokens, there, segment_ids


def _masked(tokens: Tokens, there: Array | None, segment_ids: Array | None) -> Tokens:
    """Padding unseen, and segments as the places where they start."""
    if there is not None:
        each = there[..., None, None]
        log_decay = tokens.log_decay
        tokens = dataclasses.replace(
            tokens,
            key=jnp.where(each, tokens.key, -jnp.inf),
            value=jnp.where(each, tokens.value, 0),
            log_decay=None if log_decay is None else jnp.where(each, log_decay, 0),
        )
    if segment_ids is not None:
        starts = document_starts(segment_ids, there)
        tokens = dataclasses.replace(tokens, starts=starts)
    return tokens


def _total_decay(arguments: Arguments, state: LogAttentionState, tokens: Tokens) -> Array | None:
    """What these tokens, and those of the state, multiply all earlier ones by."""
    if arguments.state is not None and arguments.state.log_decay is None:
        return None
    if arguments.state is None and tokens.log_decay is None and tokens.starts is None:
        return None
    total = jnp.zeros_like(state.log_z) if state.log_decay is None else state.log_decay
    if tokens.log_decay is not None:
        summed = jnp.sum(tokens.log_decay, 1)
        total = total + summed.reshape(*arguments.batch, *summed.shape[1:])
    if tokens.starts is not None:
        cut = jnp.any(tokens.starts, 1).reshape(*arguments.batch, 1, 1)
        total = jnp.where(cut, -jnp.inf, total)
    return total


def _choose(arguments: Arguments) -> Any:
    name = arguments.implementation
    if isinstance(name, Chunked):
        return name
    if isinstance(name, Fused):
        _check_gpu(arguments)
        return name
    if name is None:
        name = "scan" if arguments.is_causal and arguments.query.shape[-3] == 1 else "chunked"
    if name == "gpu":
        _check_gpu(arguments)
    if name not in NAMES:
        raise ValueError(
            f"implementation must be a Chunked, None or one of {[*NAMES]}, not {name!r}"
        )
    known = {"reference": reference, "scan": Scan(), "chunked": Chunked(), "gpu": Fused()}
    return known[name]


def _check_gpu(arguments: Arguments) -> None:
    depths = arguments.key.shape[-1], arguments.value.shape[-1]
    is_deep = max(depths) > gpu.DEEPEST_OF_FLOAT32
    if max(depths) > max(gpu.DEPTHS):
        reason = f"depths {depths} of keys and values are more than {max(gpu.DEPTHS)}"
    elif is_deep and _kernel_dtype(arguments) == jnp.float32 and arguments.key.shape[-3] > 1:
        reason = f"depths {depths} of float32 need more shared memory than there is: use bfloat16"
    elif _dtype(arguments) == jnp.float64:
        reason = "there are no kernels of float64"
    elif jnp.iscomplexobj(arguments.value):
        reason = "there are no kernels of complex log_value: use heinsen_attention"
    elif not arguments.is_causal:
        reason = "is_causal=False leaves nothing to fuse"
    elif not gpu.is_available():
        reason = "it needs an NVIDIA GPU of the Hopper generation or later"
    else:
        return
    raise NotImplementedError(f'implementation="gpu": {reason}; or use "chunked"')


def _check_combination(arguments: Arguments) -> None:
    window, is_causal = arguments.local_window_size, arguments.is_causal
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"local_window_size must be a whole number >= 1, is {window!r}")
        if not is_causal:
            raise NotImplementedError(
                "local_window_size with is_causal=False: a window reaches back from a token"
            )
        if arguments.state is not None or arguments.return_state:
            raise NotImplementedError(
                "local_window_size with initial_state or return_state: a state holds no single "
                "tokens, so it cannot forget them one by one; pass the last local_window_size - 1 "
                "tokens again"
            )
    if not is_causal and arguments.segment_ids is not None:
        if arguments.query.shape[-3] != arguments.key.shape[-3]:
            raise NotImplementedError(
                "segment_ids with is_causal=False and fewer or more queries than keys: the "
                "segments of the queries are not given"
            )
        if arguments.log_decay is not None:
            raise NotImplementedError(
                "segment_ids and log_decay with is_causal=False: call it for each segment"
            )


def _check_arrays(arguments: Arguments) -> None:
    query, key = arguments.query, arguments.key
    value = arguments.value if arguments.is_linear else jnp.real(arguments.value)
    check_heads(query, key, value, arguments.value_name)
    if arguments.is_causal:
        check_same_length(query, key)
    check_tokens(
        key.shape[:-2],
        segment_ids=arguments.segment_ids,
        key_value_seq_lengths=arguments.key_value_seq_lengths,
    )
    decays = key.shape[:-1], key.shape
    check_array("log_decay", arguments.log_decay, decays, jnp.floating)
