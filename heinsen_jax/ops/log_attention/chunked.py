"""Log-attention by matrix products over chunks where they are exact, by halves elsewhere.

Three tiers, chosen block by block from two scalars measured beforehand:

1. `one_level`: masked matrix products over chunks. Needs the range of exponents to hold how far
   keys *rise* inside a chunk above what its first query sees, plus the *span* of log-values;
2. `exact.mean_attention`: by halves, for any keys and decays. Needs room for the span alone;
   values in linear space, as in `heinsen_attention`, have none;
3. `exact.log_attention`: by halves in log space, for everything.

Nothing is clamped.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.log_attention import exact, one_level
from heinsen_jax.ops.log_attention.blockwise import Streamed, Tiers, run
from heinsen_jax.ops.log_attention.passes import read_all
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.ops.numerics import safe_log, where_empty
from heinsen_jax.typing import Array

# In how many pieces slower tiers compute a block: so many that all tiers of a call need little more
# memory than the first. For log-values, averages hold those in linear space as well.
PIECES_OF_MEANS = 1
PIECES_OF_MEANS_OF_LOGS = 2
PIECES_OF_SUMS = 8


BLOCK_ON_CPU = 1024  # what caches hold
ELEMENTS_OF_BLOCK = 2**28  # on accelerators: 1 GiB of float32, in few large operations


@dataclass(frozen=True)
class Chunked:
    """Sizes of the chunked form; an instance can be given as `implementation`.

    What is None is chosen: for CPUs, small blocks that caches hold; for accelerators, few large
    operations, and chunks of which states take about as much memory as weights do.

    Attributes:
      chunk_size: tokens whose [C, C] weights are formed at once; a multiple of 16.
      block_size: tokens processed in parallel before the state is handed on, and for which a tier
        is chosen; a multiple of chunk_size.
      recompute: whether backward computes weights again, from the state before each block: in the
        memory of one block, and some 20% more time. False keeps them. None: if there are several
        blocks.
      safe_range: the part of the exponent range, log(1 / smallest normal number), that a block may
        use. The rest is margin for sums and for gradients.
      side_by_side: whether the states of a block's chunks are formed in a tree, not one by one.
      half: whether factors of matrix products are rounded to bfloat16; sums and states are not.
        None: if all inputs are bfloat16.

    Examples:
      >>> key = jnp.zeros((40, 1, 2))
      >>> log_attention(key, key, key, implementation=Chunked(chunk_size=16)).shape
      (40, 1, 2)
    """

    chunk_size: int | None = None
    block_size: int | None = None
    recompute: bool | None = None
    safe_range: float = 0.7
    side_by_side: bool | None = None
    half: bool | None = None

    def __post_init__(self) -> None:
        size = self.chunk_size
        if size is not None and (size < 1 or size % exact.MULTIPLE):
            raise ValueError(f"chunk_size must be a multiple of {exact.MULTIPLE}, is {size}")
        if self.block_size is None:
            return
        least = exact.MULTIPLE if size is None else size
        if self.block_size < 1 or self.block_size % least:
            raise ValueError(
                f"block_size must be a multiple of chunk_size={least}, is {self.block_size}"
            )

    def causal(self, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
        """Output, log Z and the state after all tokens: in log space if that is where `state` is,
        with values in linear space if it is a `MeanState`."""
        form, length = self.form(tokens), tokens.length
        num_blocks = -(-length // self._block(tokens, form.chunk_size))
        block_size = -(-length // (num_blocks * form.chunk_size)) * form.chunk_size
        recompute = num_blocks > 1 if self.recompute is None else self.recompute
        kind = _log_tiers if isinstance(state, LogAttentionState) else _mean_tiers
        tiers = kind(self, form, block_size, recompute)
        result: Any = run(tiers, padded(tokens, num_blocks * block_size), state)
        (y, log_z), after = result
        return y[:, :length], log_z[:, :length], after

    def form(self, tokens: Tokens) -> one_level.Form:
        """Of the first tier, for such tokens."""
        on_cpu = jax.default_backend() == "cpu"
        chunk = self.chunk_size
        if chunk is None:
            depth = math.sqrt(tokens.key.shape[-1] * tokens.value.shape[-1])
            chunk = 64 if on_cpu or depth <= 64 else 128
            chunk = chunk if self.block_size is None else math.gcd(chunk, self.block_size)
        side_by_side = not on_cpu if self.side_by_side is None else self.side_by_side
        return one_level.Form(chunk, bool(self.half), side_by_side)

    def _block(self, tokens: Tokens, chunk: int) -> int:
        if self.block_size is not None:
            return self.block_size
        if jax.default_backend() == "cpu":
            return max(chunk, BLOCK_ON_CPU // chunk * chunk)
        batch, _, groups, heads, depth = tokens.query.shape
        of_token = batch * groups * heads * (chunk + depth + tokens.value.shape[-1])
        return max(BLOCK_ON_CPU, ELEMENTS_OF_BLOCK // max(of_token, 1)) // chunk * chunk

    def bidirectional(self, tokens: Tokens, state: Any) -> tuple[Array, Any]:
        """Output and the state after all tokens, all of which every query sees."""
        if isinstance(state, MeanState):
            return read_all(tokens, state)
        low, high = _log_value_range(tokens.value, state)
        scale = where_empty(high, 0.0)

        def by_means(tokens: Tokens, state: LogAttentionState):
            tokens, means = _to_means(tokens, state, scale)
            y, means = read_all(tokens, means)
            return safe_log(y) + scale[:, None, :, None], means.to_logs(scale[:, :, None])

        tier = first_safe((_span(low, high) - self.limit(tokens.key.dtype))[None])
        return lax.switch(tier, (by_means, jax.checkpoint(read_all)), tokens, state)

    def limit(self, dtype: Any) -> float:
        """How many nats apart the exponents of a block may lie."""
        return -self.safe_range * math.log(jnp.finfo(dtype).smallest_normal)


def _log_tiers(options: Chunked, form: one_level.Form, block_size: int, recompute: bool) -> Tiers:
    def choose(tokens: Tokens, state: LogAttentionState):
        tokens, state = lax.stop_gradient((tokens, state))
        low, high = _log_value_range(tokens.value, state)
        scales, rise = one_level.scales_and_rise(tokens, state.log_z, form)
        span = _span(low, high)
        used = jnp.stack([span + rise, span])
        return first_safe(used - options.limit(span.dtype)), (where_empty(high, 0.0), scales)

    def in_logs(attention: Any, tokens: Tokens, state: LogAttentionState, scale: Array):
        tokens, means = _to_means(tokens, state, scale)
        y, log_z, means = attention(tokens, means)
        log_y = safe_log(y) + scale[:, None, :, None]
        return (log_y, log_z), means.to_logs(scale[:, :, None])

    def one(tokens: Tokens, state: LogAttentionState, found: Any):
        scale, scales = found
        products = partial(one_level.mean_attention, scales=scales, form=form)
        return in_logs(products, tokens, state, scale)

    def two(tokens: Tokens, state: LogAttentionState):
        scale = where_empty(_log_value_range(tokens.value, state)[1], 0.0)
        return in_logs(exact.mean_attention, tokens, state, scale)

    def three(tokens: Tokens, state: LogAttentionState):
        log_y, log_z, state = exact.log_attention(tokens, state)
        return (log_y, log_z), state

    others = (  # under `jit`, so as to be traced once: many transformations ask for their shapes
        Streamed(jax.jit(two), _piece(block_size, PIECES_OF_MEANS_OF_LOGS)),
        Streamed(jax.jit(three), _piece(block_size, PIECES_OF_SUMS)),
    )
    return Tiers(choose, one, others, block_size, recompute)


def _mean_tiers(options: Chunked, form: one_level.Form, block_size: int, recompute: bool) -> Tiers:
    def choose(tokens: Tokens, state: MeanState):
        tokens, state = lax.stop_gradient((tokens, state))
        largest = jnp.maximum(
            jnp.max(jnp.abs(tokens.value), 1), jnp.max(jnp.abs(state.mean), -2, initial=0)
        )
        scales, rise = one_level.scales_and_rise(tokens, state.log_z, form)
        # Backward multiplies values by 1 / Z <= exp(rise): large ones use up the range as well.
        used = rise + jnp.log(jnp.max(largest, initial=1))
        # Large values stay as they are: dividing by them would lose small ones before them.
        scale = jnp.where(largest == 0, 1, jnp.minimum(1, largest))
        return first_safe(used - options.limit(rise.dtype)), (scale, scales)

    def one(tokens: Tokens, state: MeanState, found: Any):
        scale, scales = found
        tokens = replace(tokens, value=tokens.value / scale[:, None])
        state = replace(state, mean=state.mean / scale[:, :, None])
        y, log_z, state = one_level.mean_attention(tokens, state, scales, form)
        after = replace(state, mean=state.mean * scale[:, :, None])
        return (y * scale[:, None, :, None], log_z), after

    def two(tokens: Tokens, state: MeanState):
        y, log_z, state = exact.mean_attention(tokens, state)
        return (y, log_z), state

    return Tiers(
        choose,
        one,
        (Streamed(jax.jit(two), _piece(block_size, PIECES_OF_MEANS)),),
        block_size,
        recompute,
    )


def _piece(block_size: int, number: int) -> int:
    """Tokens of the largest equal pieces that are at least `number`, or the smallest there are."""
    sizes = range(exact.MULTIPLE, max(exact.MULTIPLE, block_size // number) + 1, exact.MULTIPLE)
    return max(size for size in sizes if block_size % size == 0)


def _to_means(tokens: Tokens, state: LogAttentionState, scale: Array) -> tuple[Tokens, MeanState]:
    """Values in linear space, divided by exp(scale), `[B, G, V]`."""
    value = jnp.exp(tokens.value - scale[:, None])
    return replace(tokens, value=value), state.to_means(scale[:, :, None])


def _log_value_range(log_value: Array, state: LogAttentionState) -> tuple[Array, Array]:
    """Smallest and largest log-value of each feature `[B, G, V]`, the state's averages included;
    those of log 0 = -inf, which any range holds, left out. (inf, -inf) where there are none."""
    log_value, state = lax.stop_gradient((log_value, state))
    log_mean = state.log_s - where_empty(state.log_z, jnp.inf)[..., None]

    def smallest(x: Array, axis: int) -> Array:
        return jnp.min(jnp.where(x == -jnp.inf, jnp.inf, x), axis, initial=jnp.inf)

    low = jnp.minimum(smallest(log_value, 1), smallest(log_mean, -2))
    high = jnp.maximum(
        jnp.max(log_value, 1, initial=-jnp.inf), jnp.max(log_mean, -2, initial=-jnp.inf)
    )
    return low, high


def _span(low: Array, high: Array) -> Array:
    return jnp.max(jnp.where(high == -jnp.inf, 0.0, high - low), initial=0.0)


def padded(tokens: Tokens, length: int) -> Tokens:
    """With unseen tokens at the end, which widen no range of values."""
    missing = length - tokens.length
    if not missing:
        return tokens

    def pad(x: Array | None, **options: Any) -> Any:
        if x is None:
            return None
        return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], **options)

    return Tokens(
        query=pad(tokens.query),
        key=pad(tokens.key, constant_values=-jnp.inf),
        value=pad(tokens.value, mode="edge"),
        log_decay=pad(tokens.log_decay),
        starts=pad(tokens.starts),
    )
