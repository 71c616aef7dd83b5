"""Log-attention as Mosaic GPU kernels: streams of chunks through the tensor cores, for Hopper.

One program a head walks over its chunks of 64 tokens with the state in registers, while the next
chunk is fetched. As in `one_level`, exponentials are scaled by the maximum over a chunk and its
past:

    W = mask(Q^ K^T),    Y = (W V + Q^ S) / Z,    Z = W 1 + Q^ z,    S_after = keep S + K^T V

Three kernels: `forward`; `query_gradient`, in the same order; and `key_value_gradient`, from the
last chunk to the first, with the gradient dS of the state. With Q^ divided by Z,

    dQ = Q^ * (dW K + dY S^T + d z^T),    dW = mask(dY V^T + d 1^T),    d = d log Z - (dY * Y) 1
    dK = K * (dW^T Q^ + V dS^T + 1 dz^T),    dV = W^T dY + K dS,    dS_before = keep dS + Q^T dY

Sums are float32. A factor of a product is rounded to bfloat16 where inputs are; else it is split in
three such parts, whose six larger products give the precision of float32. The state is held
transposed, `[V, K]`, so that what scales it lies along its columns, as it does along those of keys.

Nothing is clamped: `forward` returns how small the sums were that results are divided by, and how
large the values; the caller throws away results that came too near to the ends of the range.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.ops.log_attention.gpu_matrices import (
    COLUMN,
    F32,
    MATRIX,
    along,
    left,
    product,
    put,
    top_rows,
    transposed,
)
from heinsen_jax.ops.log_attention.gpu_streams import (
    CHUNK,
    SCALES,
    Call,
    Operands,
    Program,
    Scales,
    find_scales,
    of_state_only,
    visible,
)
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """Attributes:
    y: `[B, T, H, V]`, averages of values, or their logarithms.
    log_z: `[B, H, T]`.
    scales: which both gradients take.
    margin: the smallest sums `[B, H, 64]`, each of several rows.
    largest: the largest values likewise.
    end: `[B, H, K]`, the scale of the state after, z_after: `[B, H, K]` and
    sum_after: `[B, H, V', K]`.
    """

    y: Array
    log_z: Array
    scales: Scales
    margin: Array
    largest: Array
    end: Array
    z_after: Array
    sum_after: Array


def forward(x: Operands, is_log: bool) -> Forward:
    call = Call(x)
    batch, heads, key_depth, value_depth, rows = call.sizes
    scale = call.shape(batch, heads, call.chunks, key_depth)
    scale_after = call.shape(batch, heads, key_depth)
    outputs = {
        "y": call.shape(batch, call.length, heads, value_depth, dtype=x.value.dtype),
        "log_z": call.shape(batch, heads, call.length),
        "top": scale,
        "read": scale,
        "top_after": scale,
        "keep": scale,
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
        s, refs = here.scratch, here.refs

        def step(chunk, tiles, carry):
            m, z, state, margin, largest = carry
            key = here.keys(tiles)
            scales, absorbed = find_scales(key, m, tiles)
            query = here.queries(tiles) + along(0, where_empty(scales.top, 0.0), key.shape)
            value = here.values(tiles, is_log)
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
            from_state = product(
                s["q"], transposed(top_rows(s["s"], value_depth)), CHUNK, value_depth
            )
            y = y + of_state_only(from_state, tiles)
            z_read = z * scales.read
            of_state = jnp.sum(call.rounded(query) * along(0, z_read, query.shape), 1)
            total = jnp.sum(weights, 1) + of_state_only(of_state, tiles)

            smallest = jnp.minimum(total, jnp.min(y, 1)) if is_log else total
            y = y / along(1, total, y.shape)
            here.write("y", jnp.log(y) if is_log else y, chunk)
            here.write_row("log_z", jnp.log(total) + biggest, chunk)
            for name in SCALES:
                refs[name][here.batch, here.head, chunk, :] = getattr(scales, name)

            if absorbed is not None:
                key = here.relative(absorbed, scales.top_after)
                put(s["k"], key)
                plgpu.commit_smem()
            added = product(transposed(s["v"]), s["k"], rows, key_depth)
            m = here.end(scales, tiles)
            margin = jnp.minimum(margin, smallest)
            largest = jnp.maximum(largest, jnp.max(jnp.abs(value), 1))
            state = state * along(0, scales.keep, state.shape) + added
            return m, z * scales.keep + jnp.sum(key, 0), state, margin, largest

        here.clear("v")
        carry = (
            here.first("log_z_before", COLUMN),
            jnp.ones((key_depth,), F32),
            here.first("mean_before", MATRIX),
            jnp.ones((CHUNK,), F32),
            jnp.zeros((CHUNK,), F32),
        )
        m, z, state, margin, largest = here.stream(step, carry)
        refs["margin"][here.batch, here.head, :] = margin
        refs["largest"][here.batch, here.head, :] = largest
        refs["end"][here.batch, here.head, :] = m
        refs["z_after"][here.batch, here.head, :] = z
        refs["sum_after"][here.batch, here.head, :, :] = state

    found = call.launch(program, {}, outputs, scratch)
    scales = Scales(*(found.pop(name) for name in SCALES))
    return Forward(scales=scales, **found)


def absorb(x: Operands, is_log: bool) -> dict[str, Array]:
    """The state of all tokens and of nothing before: its scale `end` `[B, G, K]`, `z` likewise and
    `total` `[B, G, V', K]`."""
    call = Call(x, by_group=True)
    batch, groups, key_depth, value_depth, rows = call.sizes
    outputs = {
        "end": call.shape(batch, groups, key_depth),
        "z": call.shape(batch, groups, key_depth),
        "total": call.shape(batch, groups, rows, key_depth),
    }
    scratch = {"k": call.factor(CHUNK, key_depth), "v": call.factor(CHUNK, rows)}

    def program(here: Program) -> None:
        s, refs = here.scratch, here.refs

        def step(chunk, tiles, carry):
            m, z, state = carry
            key = here.keys(tiles)
            scales, absorbed = find_scales(key, m, tiles)
            key = key if absorbed is None else absorbed
            key = here.relative(key, scales.top_after)
            value = here.values(tiles, is_log)
            put(s["k"], key)
            put(left(s["v"], value_depth), value)
            plgpu.commit_smem()
            added = product(transposed(s["v"]), s["k"], rows, key_depth)
            state = state * along(0, scales.keep, state.shape) + added
            return here.end(scales, tiles), z * scales.keep + jnp.sum(key, 0), state

        here.clear("v")
        nothing = jnp.full((key_depth,), -jnp.inf, F32), jnp.zeros((key_depth,), F32)
        m, z, state = here.stream(step, (*nothing, jnp.zeros((rows, key_depth), F32)))
        refs["end"][here.batch, here.head, :] = m
        refs["z"][here.batch, here.head, :] = z
        refs["total"][here.batch, here.head, :, :] = state

    return call.launch(program, {}, outputs, scratch)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Results:
    """What gradients take besides operands.

    Attributes:
      y: `[B, T, H, V]`, log_z: `[B, H, T]`, scales: of `forward`.
      d_y: `[B, T, H, V]`, d_log_z: `[B, H, T]`: their cotangents.
    """

    y: Array
    log_z: Array
    scales: Scales
    d_y: Array
    d_log_z: Array


def query_gradient(x: Operands, found: Results, is_log: bool) -> dict[str, Array]:
    """`d_query` `[B, T, H, K]`; for the other gradients, `d_total` `[B, H, T]`, which is d above,
    and, of log-values, the cotangent `d_average` `[B, T, H, V]` of averages in linear space."""
    call = Call(x)
    batch, heads, key_depth, value_depth, rows = call.sizes
    inputs = vars(found.scales) | {"d_log_z": found.d_log_z, "log_z": found.log_z}
    inputs |= {"d_y": found.d_y, "y": found.y}
    d_y = call.shape(batch, call.length, heads, value_depth, dtype=call.dtype)
    outputs = {
        "d_query": call.shape(batch, call.length, heads, key_depth, dtype=call.gradient_dtype),
        "d_total": call.shape(batch, heads, call.length),
    } | ({"d_average": d_y} if is_log else {})
    scratch = {
        "k": call.factor(CHUNK, key_depth),
        "v": call.factor(CHUNK, rows),
        "d_y": call.factor(CHUNK, value_depth),
        "w": call.factor(CHUNK, CHUNK),
        "s": call.factor(rows, key_depth),
    }

    def program(here: Program) -> None:
        s = here.scratch

        def step(chunk, tiles, carry):
            z, state = carry
            query, key, absorbed, scales = here.exponentials(tiles, chunk)
            value = here.values(tiles, is_log)
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

            d_weights = product(
                s["d_y"], transposed(left(s["v"], value_depth)), CHUNK, CHUNK
            ) + along(1, d_total, (CHUNK, CHUNK))
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

        here.clear("v")
        ones = jnp.ones((key_depth,), F32)
        here.stream(step, (ones, here.first("mean_before", MATRIX)))

    return call.launch(program, inputs, outputs, scratch)


def _backwards_inputs(
    found: Results, d_total: Array, d_after: tuple[Array, Array]
) -> dict[str, Array]:
    """Of what goes from the last chunk to the first."""
    inputs = vars(found.scales) | {"d_total": d_total, "log_z": found.log_z, "d_y": found.d_y}
    return inputs | {"d_z_after": d_after[0], "d_sum_after": d_after[1]}


def key_value_gradient(
    x: Operands, found: Results, d_total: Array, d_after: tuple[Array, Array], is_log: bool
) -> dict[str, Array]:
    """For each head: `d_key` `[B, T, H, K]` and `d_value` `[B, T, H, V]`, and `d_z` `[B, H, K]` and
    `d_sum` `[B, H, V', K]` of the state before, whose z is 1.

    Args:
      found: with the cotangent of averages in linear space.
      d_total: as `query_gradient` returns it.
      d_after: the same two of the state after, in the scale that it has there.
    """
    call = Call(x)
    batch, heads, key_depth, value_depth, rows = call.sizes
    inputs = _backwards_inputs(found, d_total, d_after)
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
        s = here.scratch

        def step(chunk, tiles, carry):
            d_z, d_sum = carry
            query, key, absorbed, scales = here.exponentials(tiles, chunk)
            value = here.values(tiles, is_log)
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
            here.write("d_value", d_value * value if is_log else d_value, chunk)

            return here.gradient_before((d_z, d_sum), of_state, tiles, scales)

        here.clear("d_y")
        here.finish_state_gradient(here.stream(step, here.gradient_after(), reverse=True))

    return call.launch(program, inputs, outputs, scratch)


def state_gradient(
    x: Operands, found: Results, d_total: Array, d_after: tuple[Array, Array]
) -> dict[str, Array]:
    """`d_z` `[B, H, K]` and `d_sum` `[B, H, V', K]` of the state before, as `key_value_gradient`
    returns them, alone."""
    call = Call(x)
    batch, heads, key_depth, value_depth, rows = call.sizes
    inputs = _backwards_inputs(found, d_total, d_after)
    outputs = {
        "d_z": call.shape(batch, heads, key_depth),
        "d_sum": call.shape(batch, heads, rows, key_depth),
    }
    scratch = {"q": call.factor(CHUNK, key_depth), "d_y": call.factor(CHUNK, rows)}

    def program(here: Program) -> None:
        s = here.scratch

        def step(chunk, tiles, carry):
            query, scales = here.query_exponentials(tiles, chunk)
            query = of_state_only(query, tiles)
            put(s["q"], query)
            put(left(s["d_y"], value_depth), tiles["d_y"])
            plgpu.commit_smem()
            return here.gradient_before(carry, query, tiles, scales)

        here.clear("d_y")
        here.finish_state_gradient(here.stream(step, here.gradient_after(), reverse=True))

    return call.launch(program, inputs, outputs, scratch, without=("key", "value"))
