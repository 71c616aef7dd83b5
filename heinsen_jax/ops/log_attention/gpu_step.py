"""One token of log-attention as a Mosaic GPU kernel: a state is read once, and written once.

A program takes 64 rows of states `[K, V]` or more, two heads where K is 32, and at most 64 of their
columns. In log space, exactly as the definition has it,

    S' = logaddexp(S + decay, K + log V),    log Y = LSE_K(Q + S') - LSE_K(Q + Z')

or, of values of either sign, with averages M in place of log S,

    M' = exp(Z + decay - Z') M + exp(K - Z') V,    Y = softmax_K(Q + Z') M'
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.ops.log_attention.gpu import DEPTHS
from heinsen_jax.ops.log_attention.gpu_matrices import (
    COLUMN,
    F32,
    MATRIX,
    ROW,
    ROWS,
    WIDEST_TILE,
    along,
    load,
)
from heinsen_jax.ops.log_attention.scan import Scan
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.ops.numerics import log_sum_exp, share, where_empty
from heinsen_jax.typing import Array


def attend(tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
    """`Fused.causal` of one token; by `Scan` if states of its depths cannot be cut for programs."""
    if {tokens.key.shape[-1], tokens.value.shape[-1]} <= {*DEPTHS}:
        result: Any = _step(tokens, state)
        return result
    exact = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(F32), tokens)
    return Scan().causal(exact, state)


@jax.custom_vjp
def _step(tokens: Tokens, state: Any) -> Any:
    batch, _, groups, heads, key_depth = tokens.query.shape
    value_depth = tokens.value.shape[-1]
    tokens = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(F32), tokens)
    is_log = isinstance(state, LogAttentionState)
    decay = tokens.decay_and_starts
    if decay is not None:
        decay = jnp.broadcast_to(decay, tokens.key.shape).reshape(-1)
    y, log_z, content = _kernel(
        jnp.moveaxis(tokens.query, 3, 0).reshape(heads, -1),
        tokens.key.reshape(-1),
        tokens.value.reshape(-1, value_depth),
        decay,
        state.log_z.reshape(-1),
        (state.log_s if is_log else state.mean).reshape(-1, value_depth),
        is_log,
    )
    y = jnp.moveaxis(y.reshape(heads, batch, 1, groups, value_depth), 0, 3)
    log_z = log_z.reshape(batch, groups, key_depth)
    content = content.reshape(batch, groups, key_depth, value_depth)
    after = LogAttentionState(content, log_z) if is_log else MeanState(log_z, content)
    return y, log_sum_exp(tokens.query + log_z[:, None, :, None], -1), after


def _forward(tokens: Tokens, state: Any) -> Any:
    return _step(tokens, state), (tokens, state)


def _backward(saved: Any, cotangents: Any) -> Any:
    tokens, state = saved
    starts = tokens.starts

    def by_scan(arrays: Any, state: Any) -> Any:
        arrays = jax.tree.map(lambda x: x.astype(F32), arrays)
        return Scan().causal(Tokens(*arrays, starts=starts), state)

    arrays = tokens.query, tokens.key, tokens.value, tokens.log_decay
    d_arrays, d_state = jax.vjp(by_scan, arrays, state)[1](cotangents)
    return Tokens(*d_arrays, starts=None), d_state


_step.defvjp(_forward, _backward)


def _kernel(
    query: Array,
    key: Array,
    value: Array,
    decay: Array | None,
    log_z: Array,
    content: Array,
    is_log: bool,
) -> tuple[Array, Array, Array]:
    """Y `[R, X, V]`, Z' `[X K]` and S' or M' `[X K, V]` of query `[R, X K]`, key and decay `[X K]`,
    value `[X, V]`, Z and S or M; X heads."""
    heads, (number, value_depth) = len(query), value.shape
    key_depth = len(key) // number
    if number * key_depth % ROWS:  # one more head, of nothing
        more = [(0, 0), (0, key_depth)]
        y, log_z, content = _kernel(
            jnp.pad(query, more),
            jnp.pad(key, more[1:]),
            jnp.pad(value, [(0, 1), (0, 0)]),
            None if decay is None else jnp.pad(decay, more[1:]),
            jnp.pad(log_z, more[1:]),
            jnp.pad(content, more[::-1]),
            is_log,
        )
        return y[:, :number], log_z[: len(key)], content[: len(key)]
    rows, width = max(key_depth, ROWS), min(value_depth, WIDEST_TILE)
    shape = rows, width
    arrays = {"query": query, "key": key, "value": value, "log_z": log_z, "content": content}
    arrays |= {} if decay is None else {"decay": decay}
    outputs = {
        "y": jax.ShapeDtypeStruct((heads, *value.shape), F32),
        "log_z_after": jax.ShapeDtypeStruct(log_z.shape, F32),
        "content_after": jax.ShapeDtypeStruct(content.shape, F32),
    }

    def body(*memory: Any) -> None:
        refs = dict(zip([*arrays, *outputs], memory, strict=True))
        i, j = jax.lax.axis_index("rows"), jax.lax.axis_index("columns")
        here, columns = pl.ds(i * rows, rows), pl.ds(j * width, width)
        of_tile = rows // key_depth
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
        belongs = [(row >= h * key_depth) & (row < (h + 1) * key_depth) for h in range(of_tile)]

        key, log_z = load(refs["key"].at[here], ROW), load(refs["log_z"].at[here], ROW)
        if decay is not None:
            log_z = log_z + load(refs["decay"].at[here], ROW)
        log_z_after = _log_add_exp(log_z, key)
        refs["log_z_after"][here] = log_z_after  # the same for all columns

        values = [
            along(0, load(refs["value"].at[i * of_tile + h, columns], COLUMN), shape)
            for h in range(of_tile)
        ]
        value = values[0]
        for mine, other in zip(belongs[1:], values[1:], strict=True):
            value = jnp.where(mine, other, value)
        before = load(refs["content"].at[here, columns], MATRIX)
        if is_log:
            if decay is not None:
                before = before + along(1, load(refs["decay"].at[here], ROW), shape)
            after = _log_add_exp(before, value + along(1, key, shape))
        else:
            after = before * along(1, share(log_z, log_z_after), shape)
            after = after + value * along(1, share(key, log_z_after), shape)
        refs["content_after"][here, columns] = after

        for r in range(heads):
            query = load(refs["query"].at[r, here], ROW)
            for h, mine in enumerate(belongs):
                logits = jnp.where(mine, along(1, query + log_z_after, shape), -jnp.inf)
                if is_log:
                    log_s = jnp.where(mine, after + along(1, query, shape), -jnp.inf)
                    log_s = _column_sums(log_s)
                    difference = log_s - where_empty(_column_sums(logits), 0.0)
                    y = jnp.where(log_s == -jnp.inf, -jnp.inf, difference)
                else:
                    weights = share(logits, along(0, _column_sums(logits), shape))
                    y = jnp.sum(weights * after, 0)
                refs["y"][r, i * of_tile + h, columns] = y

    kernel = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        grid=(len(key) // rows, value_depth // width),
        grid_names=("rows", "columns"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    y, log_z_after, content_after = kernel(*arrays.values())
    return y, log_z_after, content_after


def _log_add_exp(x: Array, y: Array) -> Array:
    largest = jnp.maximum(x, y)
    return jnp.log(share(x, largest) + share(y, largest)) + where_empty(largest, 0.0)


def _column_sums(x: Array) -> Array:
    """LSE over rows."""
    largest = where_empty(jnp.max(x, 0), 0.0)
    return jnp.log(jnp.sum(jnp.exp(x - along(0, largest, x.shape)), 0)) + largest
