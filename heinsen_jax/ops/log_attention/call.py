"""Dispatch of log-attention: check the arguments, convert them to one layout, choose the code
path."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from heinsen_jax.ops.arguments import (
    check_array,
    check_decay,
    check_heads,
    check_same_length,
    check_tokens,
    segment_starts,
    valid_tokens,
)
from heinsen_jax.ops.layout import is_at_most, is_symbolic
from heinsen_jax.ops.log_attention import mosaic, reference, variants
from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.scan import Scan
from heinsen_jax.ops.log_attention.state import (
    HeinsenAttentionState,
    LogAttentionState,
    check_state,
    join_signs,
    read_all,
    split_signs,
)
from heinsen_jax.typing import Array, Bool, DTypeLike, Float, common_dtype, wide

Implementation = Literal["reference", "scan", "chunked", "gpu"] | Chunked
State = LogAttentionState | HeinsenAttentionState

IMPLEMENTATIONS = get_args(get_args(Implementation)[0])
ARRAYS = "query", "key", "value", "segment_ids", "key_value_seq_lengths", "log_decay", "state"
CHOICES = "is_log", "is_causal", "local_window_size", "implementation"


@partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=CHOICES)
@dataclass(frozen=True)
class Arguments:
    """Arguments of `log_attention` (`is_log`) or `heinsen_attention`, documented there."""

    query: Array
    key: Array
    value: Array
    is_log: bool
    is_causal: bool
    segment_ids: Array | None
    key_value_seq_lengths: Array | None
    local_window_size: int | None
    log_decay: Array | None
    state: State | None
    implementation: Implementation | None

    @property
    def batch(self) -> tuple[int, ...]:
        return self.query.shape[:-3]

    @property
    def value_name(self) -> str:
        return "log_value" if self.is_log else "value"

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of the output."""
        return common_dtype(self.query, self.key, self.value)

    @property
    def computed_dtype(self) -> DTypeLike:
        """Dtype of sums: at least float32."""
        states = () if self.state is None else (self.state.log_z,)
        return wide(self.dtype, *states)


@jax.jit  # so that equal calls and gradients outside another `jit` are compiled once
def attend(arguments: Arguments) -> tuple[Array, State]:
    """Return the output and the state after all tokens for arguments that passed `check`."""
    if arguments.is_log and jnp.iscomplexobj(arguments.value):
        return _signed(arguments)
    inputs, valid, segment_ids = _inputs(arguments)
    state = _state(arguments)
    before = state.to_averages()
    dtype = arguments.computed_dtype
    before = Averages(
        *(_one_batch(x.astype(dtype), n) for x, n in zip(before, (2, 3), strict=True))
    )
    is_one = arguments.is_causal and arguments.query.shape[-3] == 1
    implementation = resolve_implementation(
        arguments.implementation, arguments.dtype, is_one=is_one
    )
    window, is_log = arguments.local_window_size, arguments.is_log
    masked = _masked(inputs, valid, segment_ids, is_log=is_log)
    if 0 in inputs.key.shape[:2]:  # no tokens or no sequences: queries read only the state
        y, after = read_all(inputs, before, is_log=is_log)
    elif implementation is None:
        y, after = reference.attention(
            inputs.query,
            inputs.key,
            inputs.value,
            before,
            is_log=is_log,
            is_causal=arguments.is_causal,
            is_valid=valid,
            segment_ids=segment_ids,
            window=window,
            log_decay=inputs.log_decay,
        )
    elif arguments.is_causal and (window is None or is_at_most(inputs.length, window)):
        y, _, after = implementation.causal(masked, before, is_log=is_log)
    elif window is not None:
        y, after = variants.windowed(implementation, masked, before, window, is_log=is_log), before
    else:
        y, after = variants.bidirectional(implementation, masked, before, is_log=is_log)
    y = y.reshape(*arguments.query.shape[:-1], arguments.value.shape[-1])
    after = Averages(
        *(x.reshape(of.shape) for x, of in zip(after, state.to_averages(), strict=True))
    )
    after = type(state).from_averages(after)
    after = dataclasses.replace(after, log_decay=_total_decay(arguments, state, masked))
    return y.astype(arguments.dtype), jax.tree.map(lambda x: x.astype(state.log_z.dtype), after)


def _signed(arguments: Arguments) -> tuple[Array, State]:
    """Split values into positive and negative parts, twice as many features, to take logarithms."""
    state = arguments.state
    if state is not None:
        assert isinstance(state, LogAttentionState)
        state = dataclasses.replace(state, log_s=split_signs(state.log_s))
    value = split_signs(arguments.value)
    log_y, after = attend(dataclasses.replace(arguments, value=value, state=state))
    assert isinstance(after, LogAttentionState)
    return join_signs(log_y), dataclasses.replace(after, log_s=join_signs(after.log_s))


def _state(arguments: Arguments) -> State:
    if arguments.state is not None:
        return arguments.state
    groups, key_depth = arguments.key.shape[-2:]
    kind = LogAttentionState if arguments.is_log else HeinsenAttentionState
    sizes = groups, key_depth, arguments.value.shape[-1]
    return kind.empty(arguments.batch, *sizes, arguments.computed_dtype)


def _one_batch(x: Array, axes: int) -> Array:
    """Merge all axes but the last `axes` into one."""
    return x.reshape(math.prod(x.shape[:-axes]), *x.shape[x.ndim - axes :])


def _inputs(arguments: Arguments) -> tuple[Inputs, Array | None, Array | None]:
    """Return the tokens in one layout, the mask of valid ones `[B, S]`, and their segments."""
    *_, length, num_heads, key_depth = arguments.query.shape
    sources, groups, value_depth = arguments.value.shape[-3:]
    batch, dtype = math.prod(arguments.batch), arguments.computed_dtype
    if arguments.implementation == "gpu" and arguments.dtype == jnp.bfloat16:
        dtype = jnp.bfloat16  # so that kernels read half as many bytes
    log_decay = arguments.log_decay
    if log_decay is not None:
        features = 1 if log_decay.ndim < arguments.key.ndim else key_depth
        exact = wide(dtype)
        log_decay = jnp.asarray(log_decay, exact).reshape(batch, sources, groups, features)
    query = jnp.asarray(arguments.query, dtype)
    query = query.reshape(batch, length, groups, num_heads // groups, key_depth)
    key = jnp.asarray(arguments.key, dtype).reshape(batch, sources, groups, key_depth)
    value = jnp.asarray(arguments.value, dtype).reshape(batch, sources, groups, value_depth)
    valid = segment_ids = None
    if arguments.segment_ids is not None:
        segment_ids = jnp.asarray(arguments.segment_ids).reshape(batch, sources)
    if arguments.key_value_seq_lengths is not None:
        valid = valid_tokens(arguments.key_value_seq_lengths, arguments.batch, sources)
        valid = valid.reshape(batch, sources)
        if length == sources:  # NaN times a cotangent of 0 would be NaN
            usable = valid[..., None, None, None] | jnp.isfinite(query)
            query = jnp.where(usable, query, 0)
    return Inputs(query, key, value, log_decay), valid, segment_ids


def _masked(
    inputs: Inputs, valid: Bool[Array, "B S"] | None, segment_ids: Array | None, *, is_log: bool
) -> Inputs:
    """Mask padding, and mark the tokens where segments start."""
    if valid is not None:
        each, log_decay = valid[..., None, None], inputs.log_decay
        inputs = dataclasses.replace(
            inputs,
            key=jnp.where(each, inputs.key, -jnp.inf),
            value=jnp.where(each, inputs.value, -jnp.inf if is_log else 0),
            log_decay=None if log_decay is None else jnp.where(each, log_decay, 0),
        )
    if segment_ids is not None:
        inputs = dataclasses.replace(inputs, starts=segment_starts(segment_ids, valid))
    return inputs


def _total_decay(
    arguments: Arguments, state: State, inputs: Inputs
) -> Float[Array, "*B G K"] | None:
    """Return the total decay of these tokens and the state's tokens."""
    if arguments.state is not None and arguments.state.log_decay is None:
        return None
    if arguments.state is None and inputs.log_decay is None and inputs.starts is None:
        return None
    total = jnp.zeros_like(state.log_z) if state.log_decay is None else state.log_decay
    if inputs.log_decay is not None:
        summed = jnp.sum(inputs.log_decay, 1)
        total = total + summed.reshape(*arguments.batch, *summed.shape[1:])
    if inputs.starts is not None:
        cut = jnp.any(inputs.starts, 1).reshape(*arguments.batch, 1, 1)
        total = jnp.where(cut, -jnp.inf, total)
    return total


def resolve_implementation(
    chosen: Implementation | None, dtype: DTypeLike, *, is_one: bool
) -> variants.AttentionPasses | None:
    """Return the chosen implementation; by default `scan` if `is_one` token, else `chunked`.

    None for `reference`.
    """
    if chosen is None:
        chosen = "scan" if is_one else "chunked"
    if isinstance(chosen, Chunked) or chosen == "chunked":
        chunked = chosen if isinstance(chosen, Chunked) else Chunked()
        half = dtype == jnp.bfloat16
        matmul_dtype = chunked.matmul_dtype or ("bfloat16" if half else "float32")
        return dataclasses.replace(chunked, matmul_dtype=matmul_dtype)
    if chosen == "gpu":
        return mosaic.Fused()
    return Scan() if chosen == "scan" else None


def with_measured_kernel(arguments: Arguments) -> Arguments:
    """The arguments of `log_attention`, with `implementation="gpu"` if none is chosen and that was
    measured to be faster."""
    others = "segment_ids", "key_value_seq_lengths", "log_decay", "state", "local_window_size"
    is_plain = arguments.is_causal and all(getattr(arguments, name) is None for name in others)
    shape, shapes = arguments.query.shape, {x.shape for x in (arguments.key, arguments.value)}
    if arguments.implementation is not None or not is_plain or shapes != {shape}:
        return arguments
    *batch, length, num_heads, depth = shape
    if any(map(is_symbolic, shape)) or not mosaic.is_measured(
        depth=depth,
        dtype=arguments.dtype,
        length=length,
        num_heads=math.prod(batch) * num_heads,
    ):
        return arguments
    return dataclasses.replace(arguments, implementation="gpu")


def check(arguments: Arguments, *, return_state: bool) -> None:
    """Raise ValueError or NotImplementedError for invalid arguments."""
    _check_arrays(arguments)
    _check_combination(arguments)
    has_state = return_state or arguments.state is not None
    if arguments.local_window_size is not None and has_state:
        raise NotImplementedError(
            "local_window_size: unsupported with initial_state and return_state; a state holds no "
            "single tokens that could leave it, so pass the last local_window_size - 1 tokens again"
        )
    if arguments.state is not None:
        _check_state(arguments, arguments.state)
    chosen = arguments.implementation
    if not (chosen is None or isinstance(chosen, Chunked) or chosen in IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be a Chunked, None or one of {[*IMPLEMENTATIONS]}, not {chosen!r}"
        )
    if chosen == "gpu":
        mosaic.check(
            depths=(arguments.key.shape[-1], arguments.value.shape[-1]),
            dtype=arguments.dtype,
            is_causal=arguments.is_causal,
        )


def _check_arrays(arguments: Arguments) -> None:
    query, key = arguments.query, arguments.key
    value = jnp.real(arguments.value) if arguments.is_log else arguments.value
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
    check_decay("log_decay", arguments.log_decay)


def _check_state(arguments: Arguments, state: State) -> None:
    kind = LogAttentionState if arguments.is_log else HeinsenAttentionState
    if not isinstance(state, kind):
        raise ValueError(
            f"initial_state must be a {kind.__name__}, got a {type(state).__name__}: "
            "log_attention and heinsen_attention have different states"
        )
    check_state(
        state, query=arguments.query, key=arguments.key, **{arguments.value_name: arguments.value}
    )
    is_complex = isinstance(state, LogAttentionState) and jnp.iscomplexobj(state.log_s)
    if is_complex and not jnp.iscomplexobj(arguments.value):
        raise ValueError(
            "initial_state.log_s is complex but log_value is real; pass "
            "log_value.astype(complex), or the state of a call with real log_value"
        )


def _check_combination(arguments: Arguments) -> None:
    is_causal = arguments.is_causal
    if arguments.implementation == "scan" and is_symbolic(arguments.query.shape[-3]):
        raise NotImplementedError(
            'implementation="scan": unsupported with a symbolic number of tokens; use "chunked"'
        )
    if not is_causal and arguments.segment_ids is not None:
        if arguments.query.shape[-3] != arguments.key.shape[-3]:
            raise NotImplementedError(
                "segment_ids: unsupported with is_causal=False and different numbers of queries "
                "and keys, since ids of queries are not given"
            )
        if arguments.log_decay is not None:
            raise NotImplementedError(
                "segment_ids: unsupported with log_decay and is_causal=False; call once per segment"
            )
