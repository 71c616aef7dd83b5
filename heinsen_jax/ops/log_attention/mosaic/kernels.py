"""Log-attention as Mosaic GPU kernels: streams of chunks through the tensor cores, for Hopper.

Experimental: interpreted and lowered in tests; run on an H100 and an H200 only.

One program per head iterates over chunks of 64 tokens with the state in registers, while it fetches
the next chunk. As in `fast`, exponentials are scaled by the maximum over a chunk and its
past:

    W = mask(Q^ K^T),    Y = (W V + Q^ S) / Z,    Z = W 1 + Q^ z,    S_after = keep S + K^T V

Three kernels: `forward`; `query_gradient`, in the same order; and `key_value_gradient`, from the
last chunk to the first, with the cotangent dS of the state. With Q^ divided by Z,

    dQ = Q^ * (dW K + dY S^T + d z^T),    dW = mask(dY V^T + d 1^T),    d = d log Z - (dY * Y) 1
    dK = K * (dW^T Q^ + V dS^T + 1 dz^T),    dV = W^T dY + K dS,    dS_before = keep dS + Q^T dY

Sums are float32. Factors of products are rounded to bfloat16 if inputs are bfloat16; otherwise they
are split into three such parts, whose six largest products give the precision of float32. The state
is stored transposed, `[V, K]`, so that its scales lie along its columns, like the keys'.

Nothing is clamped: `forward` also returns the smallest normalizers and the largest values. The
caller discards results that are too close to the limits of the exponent range.
"""

from functools import partial
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.ops.log_attention.mosaic.matrices import (
    F32,
    Layout,
    along,
    left,
    product,
    put,
    top_rows,
    transposed,
)
from heinsen_jax.ops.log_attention.mosaic.operands import CHUNK, Operands
from heinsen_jax.ops.log_attention.mosaic.streams import (
    Index,
    KernelCall,
    Program,
    Scales,
    Tiles,
    find_scales,
    of_state_only,
    visible,
)
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array, Float

Sums: TypeAlias = tuple[Float[Array, " K"], Float[Array, "W K"]]  # z and S, or their cotangents


class Forward(NamedTuple):
    """Results of `forward`; for log-values, `y` is log Y."""

    y: Float[Array, "B T H V"]
    log_z: Float[Array, "B H T"]
    scales: Scales
    margin: Float[Array, "B H C"]  # the smallest sums, one per group of rows
    largest: Float[Array, "B H C"]  # the largest values, likewise
    end: Float[Array, "B H K"]  # the scale of the state after, z_after and sum_after
    z_after: Float[Array, "B H K"]
    sum_after: Float[Array, "B H W K"]


def forward(x: Operands, is_log: bool) -> Forward:
    call = KernelCall(x, is_log)
    batch, heads, key_depth, value_depth, rows = call.sizes
    scale = call.shape(batch, heads, call.chunks, key_depth)
    scale_after = call.shape(batch, heads, key_depth)
    outputs = {
        "y": call.shape(batch, call.length, heads, value_depth, dtype=x.value.dtype),
        "log_z": call.shape(batch, heads, call.length),
        **dict.fromkeys(Scales._fields, scale),
        "margin": call.shape(batch, heads, CHUNK),
        "largest": call.shape(batch, heads, CHUNK),
        "end": scale_after,
        "z_after": scale_after,
        "sum_after": call.shape(batch, heads, rows, key_depth),
    }
    scratch = {
        "q": call.factor(CHUNK, key_depth),
        "k": call.factor(CHUNK, key_depth),
        "v": call.factor(CHUNK, rows),
        "w": call.factor(CHUNK, CHUNK),
        "s": call.factor(rows, key_depth),
    }

    def program(here: Program) -> None:
        here.clear("v")
        first = _ForwardCarry(
            here.of_group("log_z_before", Layout.COLUMN),
            jnp.ones((key_depth,), F32),
            here.of_group("mean_before", Layout.MATRIX),
            jnp.ones((CHUNK,), F32),
            jnp.zeros((CHUNK,), F32),
        )
        m, z, state, margin, largest = here.stream(partial(_forward_step, here), first)
        here.write_of_head(margin=margin, largest=largest, end=m, z_after=z, sum_after=state)

    results = call.launch(program, {}, outputs, scratch)
    scales = Scales(*(results.pop(name) for name in Scales._fields))
    return Forward(scales=scales, **results)


class _ForwardCarry(NamedTuple):
    m: Float[Array, " K"]  # the scale of z and of the state
    z: Float[Array, " K"]
    state: Float[Array, "W K"]
    margin: Float[Array, " C"]
    largest: Float[Array, " C"]


def _forward_step(here: Program, chunk: Index, tiles: Tiles, carry: _ForwardCarry) -> _ForwardCarry:
    m, z, state, margin, largest = carry
    s, call = here.scratch, here.call
    _, _, key_depth, value_depth, rows = call.sizes
    key = here.keys(tiles)
    scales, absorbed = find_scales(key, m, tiles)
    query = here.queries(tiles) + along(0, where_empty(scales.top, 0.0), key.shape)
    value = here.values(tiles)
    biggest = where_empty(jnp.max(query, 1), 0.0)
    query = jnp.exp(query - along(1, biggest, query.shape))
    key = here.relative(key, scales.top)
    read = call.rounded(state * along(0, scales.read, state.shape))
    put(s["q"], query)
    put(s["k"], key)
    put(left(s["v"], value_depth), value)
    put(s["s"], read)
    plgpu.commit_smem()

    weights = product(s["q"], transposed(s["k"]), CHUNK, CHUNK)
    weights = call.rounded(visible(weights, tiles))
    put(s["w"], weights)
    plgpu.commit_smem()
    y = product(s["w"], left(s["v"], value_depth), CHUNK, value_depth)
    from_state = product(s["q"], transposed(top_rows(s["s"], value_depth)), CHUNK, value_depth)
    y = y + of_state_only(from_state, tiles)
    z_read = z * scales.read
    of_state = jnp.sum(call.rounded(query) * along(0, z_read, query.shape), 1)
    total = jnp.sum(weights, 1) + of_state_only(of_state, tiles)

    smallest = jnp.minimum(total, jnp.min(y, 1)) if call.is_log else total
    y = y / along(1, total, y.shape)
    here.write("y", jnp.log(y) if call.is_log else y, chunk)
    here.write_row("log_z", jnp.log(total) + biggest, chunk)
    here.write_scales(scales, chunk)

    if absorbed is not None:
        key = here.relative(absorbed, scales.top_after)
        put(s["k"], key)
        plgpu.commit_smem()
    added = product(transposed(s["v"]), s["k"], rows, key_depth)
    return _ForwardCarry(
        here.end(scales, tiles),
        z * scales.keep + jnp.sum(key, 0),
        state * along(0, scales.keep, state.shape) + added,
        jnp.minimum(margin, smallest),
        jnp.maximum(largest, jnp.max(jnp.abs(value), 1)),
    )


class Results(NamedTuple):
    """Results of `forward` and their cotangents, inputs of both gradient kernels besides
    operands."""

    y: Float[Array, "B T H V"]
    log_z: Float[Array, "B H T"]
    scales: Scales
    d_y: Float[Array, "B T H V"]
    d_log_z: Float[Array, "B H T"]


class QueryGradient(NamedTuple):
    """Cotangents of queries and, for `key_value_gradient`, of Z and of averages."""

    d_query: Float[Array, "B T H K"]
    d_total: Float[Array, "B H T"]  # d of the formulas above
    d_average: Float[Array, "B T H V"] | None = None  # in linear space; None if equal to `d_y`


def query_gradient(x: Operands, results: Results, is_log: bool) -> QueryGradient:
    call = KernelCall(x, is_log)
    batch, heads, key_depth, value_depth, rows = call.sizes
    inputs = {
        **results.scales._asdict(),
        "d_log_z": results.d_log_z,
        "log_z": results.log_z,
        "d_y": results.d_y,
        "y": results.y,
    }
    outputs = {
        "d_query": call.shape(batch, call.length, heads, key_depth, dtype=call.gradient_dtype),
        "d_total": call.shape(batch, heads, call.length),
    }
    if is_log:
        sizes = batch, call.length, heads, value_depth
        outputs["d_average"] = call.shape(*sizes, dtype=call.dtype)
    scratch = {
        "k": call.factor(CHUNK, key_depth),
        "v": call.factor(CHUNK, rows),
        "d_y": call.factor(CHUNK, value_depth),
        "w": call.factor(CHUNK, CHUNK),
        "s": call.factor(rows, key_depth),
    }

    def program(here: Program) -> None:
        here.clear("v")
        first = jnp.ones((key_depth,), F32), here.of_group("mean_before", Layout.MATRIX)
        here.stream(partial(_query_gradient_step, here), first)

    return QueryGradient(**call.launch(program, inputs, outputs, scratch))


def _query_gradient_step(here: Program, chunk: Index, tiles: Tiles, carry: Sums) -> Sums:
    z, state = carry
    s, is_log = here.scratch, here.call.is_log
    _, _, key_depth, value_depth, rows = here.call.sizes
    query, key, absorbed, scales = here.exponentials(tiles, chunk)
    value = here.values(tiles)
    d_y = tiles["d_y"]
    if is_log:
        d_total = tiles["d_log_z"] - jnp.sum(d_y, 1)
        d_y = d_y * jnp.exp(-tiles["y"])
        here.write("d_average", d_y, chunk)
    else:
        d_total = tiles["d_log_z"] - jnp.sum(d_y * tiles["y"], 1)
    here.write_row("d_total", d_total, chunk)
    put(s["k"], key)
    put(left(s["v"], value_depth), value)
    put(s["d_y"], d_y)
    put(s["s"], state * along(0, scales.read, state.shape))
    plgpu.commit_smem()

    d_weights = product(s["d_y"], transposed(left(s["v"], value_depth)), CHUNK, CHUNK)
    d_weights = d_weights + along(1, d_total, d_weights.shape)
    put(s["w"], visible(d_weights, tiles))
    plgpu.commit_smem()
    d_query = product(s["w"], s["k"], CHUNK, key_depth)
    reading = product(s["d_y"], top_rows(s["s"], value_depth), CHUNK, key_depth)
    d_z = along(1, d_total, reading.shape) * along(0, z * scales.read, reading.shape)
    d_query = d_query + of_state_only(reading + d_z, tiles)
    here.write("d_query", query * d_query, chunk)
    if absorbed is not key:
        put(s["k"], absorbed)
        plgpu.commit_smem()
    added = product(transposed(s["v"]), s["k"], rows, key_depth)
    state = state * along(0, scales.keep, state.shape) + added
    return z * scales.keep + jnp.sum(absorbed, 0), state


class KeyValueGradient(NamedTuple):
    """Cotangents of keys and values, for each head; of z = 1 and S = mean of the state before."""

    d_key: Float[Array, "B T H K"]
    d_value: Float[Array, "B T H V"]
    d_z: Float[Array, "B H K"]
    d_sum: Float[Array, "B H W K"]


def key_value_gradient(
    x: Operands,
    results: Results,
    d_total: Float[Array, "B H T"],
    d_after: tuple[Float[Array, "B H K"], Float[Array, "B H W K"]],
    is_log: bool,
) -> KeyValueGradient:
    """Compute the cotangents of all other operands.

    Args:
      results: `d_y` being the cotangent of averages in linear space.
      d_total: as `query_gradient` returns it.
      d_after: cotangents of z and S of the state after, in the scale of that state.
    """
    call = KernelCall(x, is_log)
    batch, heads, key_depth, value_depth, rows = call.sizes
    inputs = {
        **results.scales._asdict(),
        "d_total": d_total,
        "log_z": results.log_z,
        "d_y": results.d_y,
        "d_z_after": d_after[0],
        "d_sum_after": d_after[1],
    }
    dtype = call.gradient_dtype
    outputs = {
        "d_key": call.shape(batch, call.length, heads, key_depth, dtype=dtype),
        "d_value": call.shape(batch, call.length, heads, value_depth, dtype=dtype),
        "d_z": call.shape(batch, heads, key_depth),
        "d_sum": call.shape(batch, heads, rows, key_depth),
    }
    scratch = {
        "q": call.factor(CHUNK, key_depth),
        "k": call.factor(CHUNK, key_depth),
        "v": call.factor(CHUNK, value_depth),
        "d_y": call.factor(CHUNK, rows),
        "w": call.factor(CHUNK, CHUNK),
        "d_s": call.factor(rows, key_depth),
    }

    def program(here: Program) -> None:
        here.clear("d_y")
        last = (
            here.of_head("d_z_after", Layout.COLUMN),
            here.of_head("d_sum_after", Layout.MATRIX),
        )
        d_z, d_sum = here.stream(partial(_key_value_gradient_step, here), last, reverse=True)
        here.write_of_head(d_z=d_z, d_sum=d_sum)

    return KeyValueGradient(**call.launch(program, inputs, outputs, scratch))


def _key_value_gradient_step(here: Program, chunk: Index, tiles: Tiles, carry: Sums) -> Sums:
    d_z, d_sum = carry
    s = here.scratch
    _, _, key_depth, value_depth, _ = here.call.sizes
    query, key, absorbed, scales = here.exponentials(tiles, chunk)
    value = here.values(tiles)
    d_total = tiles["d_total"]
    put(s["q"], query)
    put(s["k"], key)
    put(s["v"], value)
    put(left(s["d_y"], value_depth), tiles["d_y"])
    put(s["d_s"], d_sum)
    plgpu.commit_smem()

    d_y = left(s["d_y"], value_depth)
    weights = product(s["q"], transposed(s["k"]), CHUNK, CHUNK)
    put(s["w"], visible(weights, tiles))
    plgpu.commit_smem()
    d_value = product(transposed(s["w"]), d_y, CHUNK, value_depth)
    d_weights = product(d_y, transposed(s["v"]), CHUNK, CHUNK)
    d_weights = d_weights + along(1, d_total, d_weights.shape)
    put(s["w"], visible(d_weights, tiles))
    plgpu.commit_smem()
    d_key = key * product(transposed(s["w"]), s["q"], CHUNK, key_depth)

    of_state = query
    if absorbed is not key:
        of_state = of_state_only(query, tiles)
        put(s["k"], absorbed)
        put(s["q"], of_state)
        plgpu.commit_smem()
    d_sums = top_rows(s["d_s"], value_depth)
    d_value = d_value + product(s["k"], transposed(d_sums), CHUNK, value_depth)
    d_absorbed = product(s["v"], d_sums, CHUNK, key_depth)
    d_absorbed = d_absorbed + along(0, d_z, d_absorbed.shape)
    here.write("d_key", d_key + absorbed * d_absorbed, chunk)
    here.write("d_value", d_value * value if here.call.is_log else d_value, chunk)

    read = product(transposed(s["d_y"]), s["q"], *d_sum.shape)
    d_sum = d_sum * along(0, scales.keep, d_sum.shape)
    d_sum = d_sum + read * along(0, scales.read, read.shape)
    read = jnp.sum(of_state * along(1, d_total, of_state.shape), 0)
    return d_z * scales.keep + read * scales.read, d_sum
