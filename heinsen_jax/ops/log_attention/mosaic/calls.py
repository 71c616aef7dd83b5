"""Calls of the GPU kernels: check of their sums, outputs and cotangents."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs, Outputs, pad_tokens
from heinsen_jax.ops.log_attention.mosaic import kernels
from heinsen_jax.ops.log_attention.mosaic.operands import CHUNK, Operands, pad_features
from heinsen_jax.ops.log_attention.mosaic.parts import in_parts, number_of_parts
from heinsen_jax.ops.log_attention.variants import AttentionPasses
from heinsen_jax.ops.numerics import reciprocal, safe_log, share
from heinsen_jax.typing import Array, Float, Int

Residuals = tuple[Inputs, Averages, kernels.Forward, Int[Array, ""]]


def causal(
    otherwise: AttentionPasses, inputs: Inputs, state: Averages, *, is_log: bool
) -> tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"], Averages]:
    """`Fused.causal`."""
    length, parts = inputs.length, number_of_parts(inputs)
    padded = pad_tokens(inputs, -(-length // (CHUNK * parts)) * CHUNK * parts)
    arrays = varying_like((padded, state), (padded, state))
    (y, log_z), after = _attend(otherwise, is_log, parts, *arrays)
    return y[:, :length], log_z[:, :length], after


def _primal(
    otherwise: AttentionPasses, is_log: bool, parts: int, inputs: Inputs, state: Averages
) -> tuple[Outputs, Averages]:
    """Return ((output, log Z), state after all tokens); their number is a multiple of the chunk
    size, times the number of parts."""
    return _forward(otherwise, is_log, parts, inputs, state)[0]


def _forward(
    otherwise: AttentionPasses, is_log: bool, parts: int, inputs: Inputs, state: Averages
) -> tuple[tuple[Outputs, Averages], Residuals]:
    linear = _to_linear(state) if is_log else state
    tokens, before = in_parts(inputs, linear, parts, is_log=is_log)
    forward = kernels.forward(Operands.of(tokens, before), is_log)
    after = _after(tokens, forward)
    way = _way(before, after, forward, is_log)

    def by_kernels() -> tuple[Outputs, Averages]:
        sizes = inputs.query.shape[:-1]
        y = forward.y[..., : inputs.value.shape[-1]].reshape(*sizes, -1)
        log_z = jnp.moveaxis(forward.log_z, 1, 2).reshape(sizes)
        end = _last_parts(after, parts)
        return (y, log_z), end._replace(mean=safe_log(end.mean)) if is_log else end

    def exactly() -> tuple[Outputs, Averages]:
        return _exactly(otherwise, is_log, inputs, state)

    return lax.switch(way, (by_kernels, exactly)), (inputs, state, forward, way)


def _backward(
    otherwise: AttentionPasses,
    is_log: bool,
    parts: int,
    residuals: Residuals,
    cotangents: tuple[Outputs, Averages],
) -> tuple[Inputs, Averages]:
    """Return the cotangents of the inputs (None for `starts`) and of the state before them."""
    inputs, state, forward, way = residuals

    def by_kernels() -> tuple[Inputs, Averages]:
        (d_y, d_log_z), d_after = cotangents
        linear, starts = _to_linear(state) if is_log else state, inputs.starts

        def split(inputs: Inputs, state: Averages) -> tuple[Inputs, Averages]:
            tokens, before = in_parts(replace(inputs, starts=starts), state, parts, is_log=is_log)
            return replace(tokens, starts=None), before

        (tokens, before), pullback = jax.vjp(split, replace(inputs, starts=None), linear)
        if starts is not None:
            tokens = replace(tokens, starts=starts.reshape(tokens.key.shape[:2]))
        if is_log:
            end = _last_parts(_after(tokens, forward), parts)
            d_after = d_after._replace(mean=d_after.mean * reciprocal(end.mean))
        d_after = jax.tree.map(partial(_of_last_part, parts), d_after)
        sizes = tokens.query.shape[:-1]
        d_outputs = d_y.reshape(*sizes, -1), d_log_z.reshape(sizes)
        d_inputs, d_state = pullback(
            _cotangents(tokens, before, forward, d_outputs, d_after, is_log)
        )
        return d_inputs, d_state._replace(mean=d_state.mean * linear.mean) if is_log else d_state

    def exactly() -> tuple[Inputs, Averages]:
        def attend(inputs: Inputs, state: Averages) -> tuple[Outputs, Averages]:
            return _exactly(otherwise, is_log, replace(inputs, starts=starts), state)

        starts = inputs.starts
        return jax.vjp(attend, replace(inputs, starts=None), state)[1](cotangents)

    return lax.switch(way, (by_kernels, exactly))


_attend = jax.custom_vjp(_primal, nondiff_argnums=(0, 1, 2))
_attend.defvjp(_forward, _backward)


def _way(
    state: Averages, after: Averages, forward: kernels.Forward, is_log: bool
) -> Int[Array, ""]:
    """Return 0 if the kernels' results are valid, else 1. Both states are in linear space."""
    smallest = jnp.min(forward.margin)
    if is_log:  # averages have finite logarithms, except for no tokens
        is_empty = (after.log_z == -jnp.inf)[..., None]
        smallest = jnp.minimum(smallest, jnp.min(jnp.where(is_empty, jnp.inf, after.mean)))
    largest = jnp.maximum(jnp.max(forward.largest), jnp.max(jnp.abs(state.mean), initial=1))
    limit = math.exp(-Chunked().budget(jnp.float32))
    return first_safe((limit * largest - smallest)[None])


def _exactly(
    otherwise: AttentionPasses, is_log: bool, inputs: Inputs, state: Averages
) -> tuple[Outputs, Averages]:
    query, key, value = (x.astype(jnp.float32) for x in (inputs.query, inputs.key, inputs.value))
    exact = replace(inputs, query=query, key=key, value=value)
    y, log_z, after = otherwise.causal(exact, state, is_log=is_log)
    return (y.astype(inputs.value.dtype), log_z), after


def _last_parts(states: Averages, parts: int) -> Averages:
    """The states after the last part of each sequence, given the states after all parts."""
    return jax.tree.map(lambda x: x[parts - 1 :: parts], states)


def _of_last_part(parts: int, x: Float[Array, "B *N"]) -> Float[Array, "B*P *N"]:
    """x for the last part of each sequence, and zeros for the others."""
    x = jnp.pad(x[:, None], [(0, 0), (parts - 1, 0), *[(0, 0)] * (x.ndim - 1)])
    return x.reshape(-1, *x.shape[2:])


def _to_linear(state: Averages) -> Averages:
    return state._replace(mean=jnp.exp(state.mean))


def _after(inputs: Inputs, forward: kernels.Forward) -> Averages:
    """Return the state after all tokens, in linear space, from the first head of each group."""
    heads = inputs.query.shape[3]
    key_depth, value_depth = inputs.key.shape[-1], inputs.value.shape[-1]
    end, z = (x[:, ::heads, :key_depth] for x in (forward.end, forward.z_after))
    total = jnp.swapaxes(forward.sum_after[:, ::heads, :value_depth, :key_depth], -1, -2)
    return Averages(safe_log(z) + end, total * reciprocal(z)[..., None])


def _cotangents(
    inputs: Inputs,
    state: Averages,
    forward: kernels.Forward,
    d_outputs: Outputs,
    d_after: Averages,
    is_log: bool,
) -> tuple[Inputs, Averages]:
    """Return the cotangents of the inputs and of the state before them, in linear space for
    states."""
    d_y, d_log_z = d_outputs
    sizes = forward.y.shape[:3]
    results = kernels.Results(
        y=forward.y,
        log_z=forward.log_z,
        scales=forward.scales,
        d_y=pad_features(d_y.reshape(*sizes, -1), forward.y.shape[-1], 0),
        d_log_z=jnp.moveaxis(d_log_z.reshape(sizes), 1, 2),
    )
    operands = Operands.of(inputs, state)
    of_query = kernels.query_gradient(operands, results, is_log)
    if of_query.d_average is not None:
        results = results._replace(d_y=of_query.d_average)
    d_sums = _cotangents_of_sums(inputs, forward, d_after)
    of_others = kernels.key_value_gradient(operands, results, of_query.d_total, d_sums, is_log)

    key_depth, value_depth = inputs.key.shape[-1], inputs.value.shape[-1]
    d_query = of_query.d_query[..., :key_depth].reshape(inputs.query.shape)
    d_key = _over_heads(inputs, of_others.d_key, 2)[..., :key_depth]
    d_value = _over_heads(inputs, of_others.d_value, 2)[..., :value_depth]
    d_decay = None
    if inputs.log_decay is not None:
        # Decays summed from the start, b: queries are Q + b, keys K - b, and log Z at the end + b.
        d_so_far = jnp.sum(d_query, 3) - d_key
        d_so_far = d_so_far.at[:, -1].add(d_after.log_z)
        if inputs.log_decay.shape[-1] == 1:
            d_so_far = jnp.sum(d_so_far, -1, keepdims=True)
        d_decay = lax.cumsum(d_so_far, 1, reverse=True)
    d_query, d_key, d_value = (x.astype(inputs.query.dtype) for x in (d_query, d_key, d_value))
    d_inputs = Inputs(d_query, d_key, d_value, d_decay)
    return d_inputs, _cotangent_before(inputs, state, of_others)


def _cotangents_of_sums(
    inputs: Inputs, forward: kernels.Forward, d_after: Averages
) -> tuple[Float[Array, "B H K"], Float[Array, "B H W K"]]:
    """Convert the cotangents of the state after all tokens to cotangents of its z and S, in the
    scale of `forward`, for the first head of each group; 0 for the others."""
    heads, after = inputs.query.shape[3], _after(inputs, forward)
    inverse = share(forward.end[:, ::heads, : inputs.key.shape[-1]], after.log_z)
    d_z = inverse * (d_after.log_z - jnp.sum(d_after.mean * after.mean, -1))
    d_sum = jnp.swapaxes(d_after.mean * inverse[..., None], -1, -2)
    rows, columns = forward.sum_after.shape[2:]
    d_sum = jnp.pad(d_sum, [(0, 0)] * 2 + [(0, rows - d_sum.shape[2]), (0, 0)])

    def of_first_head(x: Array) -> Array:
        x = jnp.pad(x[:, :, None], [(0, 0)] * 2 + [(0, heads - 1)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    d_z, d_sum = (of_first_head(pad_features(x, columns, 0)) for x in (d_z, d_sum))
    return d_z, d_sum


def _cotangent_before(
    inputs: Inputs, state: Averages, gradient: kernels.KeyValueGradient
) -> Averages:
    """Convert the cotangents of z = 1 and S = mean to the cotangent of the state before."""
    key_depth, value_depth = inputs.key.shape[-1], inputs.value.shape[-1]
    d_z, d_sum = (_over_heads(inputs, x, 1) for x in (gradient.d_z, gradient.d_sum))
    d_mean = jnp.swapaxes(d_sum[..., :value_depth, :key_depth], -1, -2)
    return Averages(d_z[..., :key_depth] + jnp.sum(d_mean * state.mean, -1), d_mean)


def _over_heads(inputs: Inputs, x: Array, axis: int) -> Array:
    """Sum over the heads of each group; `axis` is the axis of all heads."""
    groups, heads = inputs.query.shape[2:4]
    return jnp.sum(x.reshape(*x.shape[:axis], groups, heads, *x.shape[axis + 1 :]), axis + 1)
