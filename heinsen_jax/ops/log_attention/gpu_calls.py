"""Calls of the GPU kernels: inputs as they want them, tests of their sums, and gradients."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention import gpu_kernels as kernels
from heinsen_jax.ops.log_attention import gpu_streams as streams
from heinsen_jax.ops.log_attention.chunked import padded
from heinsen_jax.ops.log_attention.gpu import DEPTHS, Fused
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.ops.numerics import reciprocal, safe_log
from heinsen_jax.typing import Array


def causal(fused: Fused, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
    """`Fused.causal`."""
    length = tokens.length
    tokens = padded(tokens, -(-length // streams.CHUNK) * streams.CHUNK)
    inputs = tokens.query, tokens.key, tokens.value, tokens.log_decay
    result: Any = _attend(fused, inputs, tokens.starts, state)
    (y, log_z), after = result
    return y[:, :length], log_z[:, :length], after


def _exactly(fused: Fused, inputs: Any, starts: Array | None, state: Any) -> Any:
    """((output, log Z), state after all tokens) by what computes unsafe calls."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    y, log_z, after = fused.otherwise.causal(Tokens(*exact, starts=starts), state)
    return (y.astype(inputs[0].dtype), log_z), after


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(fused: Fused, inputs: Any, starts: Array | None, state: Any) -> Any:
    return _attend_forward(fused, inputs, starts, state)[0]


def _attend_forward(fused: Fused, inputs: Any, starts: Array | None, state: Any):
    is_log = isinstance(state, LogAttentionState)
    operands = _operands(inputs, starts, _means(state))
    found = kernels.forward(operands, is_log)
    is_safe = fused.is_safe(found.margin, found.largest)
    outputs = lax.cond(
        is_safe,
        lambda: _outputs(inputs, found, is_log),
        lambda: _exactly(fused, inputs, starts, state),
    )
    return outputs, (inputs, starts, state, found, is_safe)


def _attend_backward(fused: Fused, saved: Any, cotangents: Any):
    inputs, starts, state, found, is_safe = saved

    def by_kernels():
        means, pull = jax.vjp(_means, state)
        d_inputs, d_means = _gradients(inputs, starts, means, found, cotangents)
        return d_inputs, pull(d_means)[0]

    def exactly():
        def attend(inputs, state):
            return _exactly(fused, inputs, starts, state)

        return jax.vjp(attend, inputs, state)[1](cotangents)

    d_inputs, d_state = lax.cond(is_safe, by_kernels, exactly)
    return d_inputs, None, d_state


_attend.defvjp(_attend_forward, _attend_backward)


def _means(state: Any) -> MeanState:
    return state if isinstance(state, MeanState) else state.to_means()


def _operands(inputs: Any, starts: Array | None, means: MeanState) -> streams.Operands:
    query, key, value, log_decay = inputs
    batch, length, groups, heads, _ = query.shape
    chunks = length // streams.CHUNK
    key_depth, value_depth = _served(key), _served(value)
    mean = _widened(jnp.swapaxes(means.mean, -1, -2), key_depth, 0)
    missing = max(value_depth, streams.ROWS) - mean.shape[2]
    operands = streams.Operands(
        # Features of -inf are no part of any sum.
        _widened(query, key_depth, -jnp.inf).reshape(batch, length, groups * heads, key_depth),
        _widened(key, key_depth, -jnp.inf),
        _widened(value, value_depth, 0),
        _widened(means.log_z, key_depth, -jnp.inf),
        jnp.pad(mean, ((0, 0), (0, 0), (0, missing), (0, 0))),
    )
    if log_decay is not None:
        so_far = jnp.cumsum(_in_chunks(log_decay.astype(jnp.float32)), 2)
        at_end = jnp.swapaxes(so_far[:, :, -1], 1, 2)
        so_far = so_far.reshape(log_decay.shape)
        by_head = so_far.shape[-1] == 1
        operands = replace(
            operands,
            so_far=jnp.swapaxes(so_far[..., 0], 1, 2)
            if by_head
            else _widened(so_far, key_depth, 0),
            at_end=jnp.broadcast_to(at_end, (batch, groups, chunks, key_depth))
            if by_head
            else _widened(at_end, key_depth, 0),
        )
    if starts is not None:
        documents = jnp.cumsum(_in_chunks(starts.astype(jnp.int32)), 2)
        last = documents[:, :, -1:]
        carried = jnp.where(last == 0, 0.0, -jnp.inf)
        operands = replace(
            operands,
            documents=documents.reshape(batch, length),
            is_last=(documents == last).astype(jnp.int32).reshape(batch, length),
            carried=jnp.broadcast_to(carried, (batch, chunks, key_depth)),
        )
    return operands


def _served(x: Array) -> int:
    """The depth for which there are kernels."""
    return next(depth for depth in DEPTHS if depth >= x.shape[-1])


def _widened(x: Array, depth: int, fill: float) -> Array:
    missing = depth - x.shape[-1]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)], constant_values=fill)


def _in_chunks(x: Array) -> Array:
    """`[B, T, ...]` -> `[B, J, 64, ...]`"""
    return x.reshape(x.shape[0], -1, streams.CHUNK, *x.shape[2:])


def _outputs(inputs: Any, found: kernels.Forward, is_log: bool) -> Any:
    """((output, log Z), state after all tokens), as `Chunked` has them."""
    query, _, value, _ = inputs
    y = found.y[..., : value.shape[-1]].reshape(*query.shape[:-1], -1)
    log_z = jnp.moveaxis(found.log_z, 1, 2).reshape(query.shape[:-1])
    after, _ = _after(inputs, found)
    return (y, log_z), after.to_logs(jnp.zeros(())) if is_log else after


def _after(inputs: Any, found: kernels.Forward) -> tuple[MeanState, Array]:
    """The state after all tokens, and 1 / z."""
    query, key, value, _ = inputs
    heads = query.shape[3]
    top, z, total = (
        x[:, ::heads, ..., : key.shape[-1]] for x in (found.end, found.z_after, found.sum_after)
    )
    inverse = reciprocal(z)
    mean = jnp.swapaxes(total, -1, -2)[..., : value.shape[-1]] * inverse[..., None]
    return MeanState(safe_log(z) + top, mean), inverse


def _gradients(
    inputs: Any, starts: Array | None, means: MeanState, found: kernels.Forward, cotangents: Any
) -> tuple[Any, MeanState]:
    query, key, value, log_decay = inputs
    (d_y, d_log_z), d_after = cotangents
    is_log = isinstance(d_after, LogAttentionState)
    after, inverse = _after(inputs, found)
    if is_log:
        _, pull = jax.vjp(lambda means: means.to_logs(jnp.zeros(())), after)
        (d_after,) = pull(d_after)

    operands = _operands(inputs, starts, means)
    key_depth, value_depth = key.shape[-1], value.shape[-1]
    results = kernels.Results(
        y=found.y,
        log_z=found.log_z,
        scales=found.scales,
        d_y=_widened(d_y.reshape(*found.y.shape[:3], -1), found.y.shape[-1], 0),
        d_log_z=jnp.moveaxis(d_log_z.reshape(*d_log_z.shape[:2], -1), 1, 2),
    )
    of_query = kernels.query_gradient(operands, results, is_log)
    if is_log:
        results = replace(results, d_y=of_query["d_average"])
    d_z = inverse * (d_after.log_z - jnp.sum(d_after.mean * after.mean, -1))
    d_sum = jnp.swapaxes(d_after.mean * inverse[..., None], -1, -2)
    rows, columns = operands.mean_before.shape[2:]
    d_sum = jnp.pad(d_sum, [(0, 0)] * 2 + [(0, rows - value_depth), (0, columns - key_depth)])
    of_others = kernels.key_value_gradient(
        operands,
        results,
        of_query["d_total"],
        (_of_first_head(_widened(d_z, columns, 0), query), _of_first_head(d_sum, query)),
        is_log,
    )

    d_query = of_query["d_query"][..., :key_depth].reshape(query.shape)
    d_key, d_value = (_over_groups(of_others[name], 2, query) for name in ("d_key", "d_value"))
    d_z, d_sum = (_over_groups(of_others[name], 1, query) for name in ("d_z", "d_sum"))
    d_key, d_value = d_key[..., :key_depth], d_value[..., :value_depth]
    d_decay = None
    if log_decay is not None:
        # Decays summed from the start, b: queries are Q + b, keys K - b, and log Z at the end + b.
        d_so_far = (jnp.sum(d_query, 3) - d_key).at[:, -1].add(d_after.log_z)
        if log_decay.shape[-1] == 1:
            d_so_far = jnp.sum(d_so_far, -1, keepdims=True)
        d_decay = lax.cumsum(d_so_far, 1, reverse=True).astype(log_decay.dtype)
    d_mean = jnp.swapaxes(d_sum[..., :value_depth, :key_depth], -1, -2)
    d_log_z = d_z[..., :key_depth] + jnp.sum(d_mean * means.mean, -1)
    d_inputs = (d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype))
    return (*d_inputs, d_decay), MeanState(d_log_z, d_mean)


def _over_groups(x: Array, axis: int, query: Array) -> Array:
    """Sums over the heads of each group, of H on an axis."""
    groups, heads = query.shape[2:4]
    return jnp.sum(x.reshape(*x.shape[:axis], groups, heads, *x.shape[axis + 1 :]), axis + 1)


def _of_first_head(x: Array, query: Array) -> Array:
    """`[B, G, ...]` -> `[B, H, ...]`, for the first head of each group, 0 for the others."""
    batch, _, groups, heads, _ = query.shape
    x = jnp.pad(x[:, :, None], [(0, 0)] * 2 + [(0, heads - 1)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(batch, groups * heads, *x.shape[3:])
