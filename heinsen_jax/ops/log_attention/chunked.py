"""Log-attention as batched matrix products over chunks of tokens.

A convex average of values needs no logarithm: with every exponential scaled by a maximum, the
output is S / Z, S = (Q^ K^T . mask) V^ + Q^ M, all terms positive, nothing cancels. What can go
wrong is underflow alone, and only where

- keys *rise* inside a chunk far above what its first query may see (that query is scaled by a
  maximum of keys it must not see), or
- log-values, divided by their largest one, *span* more than the floating-point range.

Both are measured beforehand (`_rise`, `_span`), block by block. A block whose sum of the two
exceeds `ChunkedOptions.safe_range` takes the exact path of `stream` instead. Nothing is clamped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention import scan, stream
from heinsen_jax.ops.log_attention.blocks import scan_blocks
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState, safe_log
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array, Float, typed


@dataclass(frozen=True)
class ChunkedOptions:
    """Sizes of the chunked form.

    Attributes:
      chunk_size: tokens whose [C, C] weights are formed at once.
      block_size: tokens processed in parallel before the state is handed on, and between two of
        which backward keeps a state; a multiple of chunk_size.
      safe_range: the part of the exponent range, log(1 / smallest normal number), that a block may
        use. The rest is margin for sums and for gradients.
    """

    chunk_size: int = 64
    block_size: int = 1024
    safe_range: float = 0.7


DEFAULT = ChunkedOptions()


def log_attention(
    query: Array,
    key: Array,
    log_value: Array,
    state: LogAttentionState,
    *,
    is_causal: bool,
    options: ChunkedOptions = DEFAULT,
) -> tuple[Array, LogAttentionState]:
    """`scan.log_attention` by matrix products, with exact log-space blocks where they fail."""

    @partial(_recomputed, length=query.shape[-2], options=options)
    def fast(query, key, log_value, state):
        scale = _log_value_range(log_value, state)[1]
        value = jnp.exp(log_value - scale[:, None])
        means = state.to_means(scale[:, None])
        if is_causal:
            y, means = _causal_means(query, key, value, means, options.chunk_size)
        else:
            y, means = scan.mean_attention(query, key, value, means, is_causal=False)
        return safe_log(y) + scale[:, None, None], means.to_logs(scale[:, None])

    @jax.checkpoint
    def exact(query, key, log_value, state):
        if is_causal:
            return stream.log_attention(query, key, log_value, state)
        return scan.log_attention(query, key, log_value, state, is_causal=False)

    def body(state: LogAttentionState, block: tuple[Array, ...]):
        key, log_value, query = block
        used = _span(log_value, state)
        if is_causal:
            used = used + _rise(key, state.log_z, options.chunk_size)
        log_y, state = lax.cond(
            used <= _limit(key.dtype, options), fast, exact, query, key, log_value, state
        )
        return state, log_y

    if not is_causal:
        state, log_y = body(state, (key, log_value, query))
    else:
        state, log_y = scan_blocks(
            body,
            state,
            (key, log_value, query),
            block_size=options.block_size,
            multiple_of=options.chunk_size,
        )
    assert log_y is not None
    return log_y, state


def mean_attention(
    query: Array,
    key: Array,
    value: Array,
    state: MeanState,
    *,
    is_causal: bool,
    options: ChunkedOptions = DEFAULT,
) -> tuple[Array, MeanState]:
    """`scan.mean_attention` by matrix products; values may lie any distance apart."""
    if not is_causal:
        return scan.mean_attention(query, key, value, state, is_causal=False)

    @partial(_recomputed, length=query.shape[-2], options=options)
    def fast(query, key, value, state):
        # Large values stay as they are: dividing by them would lose small ones before them.
        scale = jnp.minimum(1, _largest_value(value, state))
        scale = jnp.where(scale == 0, 1, scale)[:, None]
        state = MeanState(state.log_z, state.mean / scale)
        y, state = _causal_means(query, key, value / scale, state, options.chunk_size)
        return y * scale[:, None], MeanState(state.log_z, state.mean * scale)

    exact = jax.checkpoint(stream.mean_attention)

    def body(state: MeanState, block: tuple[Array, ...]):
        key, value, query = block
        # Backward multiplies values by 1 / Z <= exp(rise): large ones use up the range as well.
        used = _rise(key, state.log_z, options.chunk_size)
        used = used + jnp.log(jnp.maximum(1, jnp.max(_largest_value(value, state), initial=1)))
        safe = used <= _limit(key.dtype, options)
        y, state = lax.cond(safe, fast, exact, query, key, value, state)
        return state, y

    state, y = scan_blocks(
        body,
        state,
        (key, value, query),
        block_size=options.block_size,
        multiple_of=options.chunk_size,
    )
    assert y is not None
    return y, state


def _recomputed(function: Callable, *, length: int, options: ChunkedOptions) -> Callable:
    """`function`, computed again in backward where there are several blocks: memory of one."""
    return jax.checkpoint(function) if length > options.block_size else function


@typed
def _causal_means(
    query: Float[Array, "X R T K"],
    key: Float[Array, "X T K"],
    value: Float[Array, "X T V"],
    state: MeanState,
    chunk_size: int,
) -> tuple[Float[Array, "X R T V"], MeanState]:
    """Causal averages of values; T is a multiple of chunk_size, keys may be -inf (padding)."""
    heads, key_depth = query.shape[1], query.shape[-1]
    key, value = _chunks(key, chunk_size), _chunks(value, chunk_size)

    # What each chunk adds to the state, and the state before each chunk.
    largest = lax.stop_gradient(where_empty(jnp.max(key, 2), 0.0))
    key = jnp.exp(key - largest[:, :, None])
    total = jnp.sum(key, 2)
    added = MeanState(
        largest + safe_log(total),
        jnp.einsum("xjck,xjcv->xjkv", key, value) / jnp.where(total == 0, 1, total)[..., None],
    )
    state, before = _running(state, added)

    # Queries are scaled by the largest exponent they meet, as if they saw their whole chunk. All
    # heads' queries of a chunk are rows of one matrix.
    scale = lax.stop_gradient(where_empty(jnp.maximum(largest, before.log_z), 0.0))
    rows = jnp.moveaxis(_chunks(query, chunk_size), 1, 2)
    rows = rows.reshape(*key.shape[:2], heads * chunk_size, key_depth) + scale[:, :, None]
    rows = jnp.exp(rows - lax.stop_gradient(where_empty(jnp.max(rows, -1, keepdims=True), 0.0)))
    to_chunk = rows * jnp.exp(largest - scale)[:, :, None]
    to_state = rows * jnp.exp(before.log_z - scale)[:, :, None]
    visible = jnp.tile(jnp.tri(chunk_size, dtype=bool), (heads, 1))[None, None]
    weights = jnp.where(visible, jnp.einsum("xjck,xjdk->xjcd", to_chunk, key), 0.0)
    s = jnp.einsum("xjcd,xjdv->xjcv", weights, value)
    s = s + jnp.einsum("xjck,xjkv->xjcv", to_state, before.mean)
    z = jnp.sum(weights, -1) + jnp.sum(to_state, -1)
    # z is 0 only where there is nothing to see. Elsewhere it is as small as exp(-rise), and the
    # derivative of a quotient has its square: divide both by it, as a constant, beforehand.
    inverse = lax.stop_gradient(1 / jnp.where(z == 0, 1, z))
    y = (s * inverse[..., None]) / jnp.where(z == 0, 1, z * inverse)[..., None]
    y = jnp.moveaxis(_chunks(y, chunk_size), 2, 1)
    return y.reshape(*query.shape[:-1], -1), state


def _running(state: MeanState, added: MeanState) -> tuple[MeanState, MeanState]:
    """The state after all chunks, and the states before each: `added` has chunks on axis 1."""

    def step(state: MeanState, added: MeanState) -> tuple[MeanState, MeanState]:
        return state.merge(added), state

    last, before = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), added))
    return last, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), before)


def _chunks(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _limit(dtype, options: ChunkedOptions) -> float:
    return -options.safe_range * math.log(jnp.finfo(dtype).smallest_normal)


def _rise(key: Array, log_z: Array, chunk_size: int) -> Array:
    """How far, in nats, keys rise inside any chunk above what its first query may see. A scalar."""
    key, log_z = lax.stop_gradient((_chunks(key, chunk_size), log_z))
    largest = jnp.max(key, 2)
    before = lax.cummax(jnp.concatenate([log_z[:, None], largest[:, :-1]], 1), axis=1)
    visible = jnp.maximum(before, key[:, :, 0])
    return jnp.max(jnp.where(largest == -jnp.inf, 0.0, largest - visible), initial=0.0)


def _span(log_value: Array, state: LogAttentionState) -> Array:
    """How far log-values, in nats, lie apart in any value feature, past ones included. A scalar."""
    low, high = _log_value_range(log_value, state)
    return jnp.max(high - low, initial=0.0)


def _largest_value(value: Array, state: MeanState) -> Array:
    """The largest magnitude of each value feature `[X, V]`, the state's averages included."""
    value, mean = lax.stop_gradient((value, state.mean))
    return jnp.maximum(jnp.max(jnp.abs(value), 1), jnp.max(jnp.abs(mean), 1, initial=0))


def _log_value_range(log_value: Array, state: LogAttentionState) -> tuple[Array, Array]:
    """Smallest and largest log-value of each feature `[X, V]`; the state counts as averages."""
    log_value, state = lax.stop_gradient((log_value, state))
    log_mean = state.log_s - where_empty(state.log_z, 0.0)[..., None]
    known = (state.log_z > -jnp.inf)[..., None]
    low = jnp.minimum(
        jnp.min(log_value, 1), jnp.min(jnp.where(known, log_mean, jnp.inf), 1, initial=jnp.inf)
    )
    high = jnp.maximum(
        jnp.max(log_value, 1), jnp.max(jnp.where(known, log_mean, -jnp.inf), 1, initial=-jnp.inf)
    )
    return low, high
