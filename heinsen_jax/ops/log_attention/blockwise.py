"""Runs each block of tokens through the cheapest tier that is exact on it, forward and backward.

Not left to differentiation of `lax.scan` and `lax.cond`, which would keep copies of every block's
inputs, and those of all tiers at once: backward needs the inputs themselves, the state before each
block, and which tier it took.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.log_attention.tokens import Tokens, varying_like
from heinsen_jax.typing import Array


@dataclass(frozen=True)
class Tiers:
    """How blocks are computed.

    Attributes:
      choose: (tokens, state) -> index of the first tier that is exact on them, a scalar, and what
        was found out for the first tier, without gradient.
      first: (tokens, state, what was found out) -> ((output, log Z), state after them).
      others: slower ones, for more inputs.
      block_size: tokens of a block; divides their number.
      recompute: whether backward computes the first tier again, or forward keeps what it needs.
    """

    choose: Callable
    first: Callable
    others: tuple["Streamed", ...]
    block_size: int
    recompute: bool


@dataclass(frozen=True)
class Streamed:
    """A tier that is given some tokens of a block at a time, in forward and in backward.

    A call needs the memory of its hungriest tier whichever it takes, and C libraries hand out large
    memory untouched, page by page, at every call: that would slow down the first one.

    Attributes:
      tier: (tokens, state) -> ((output, log Z), state after them).
      piece: how many tokens at a time; divides those of a block.
    """

    tier: Callable
    piece: int

    def alone(self) -> Tiers:
        """A way to compute a block that has no other tiers."""
        return Tiers(
            choose=lambda _tokens, _state: (jnp.zeros((), jnp.int32), ()),
            first=lambda tokens, state, found: self.tier(tokens, state),
            others=(),
            block_size=self.piece,
            recompute=True,
        )


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("value",))
@dataclass(frozen=True)
class _Static:
    """What is known when a function is traced, among arrays that are not."""

    value: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(tiers: Tiers, tokens: Tokens, state: Any) -> tuple[tuple[Array, Array], Any]:
    """((output, log Z), state after all tokens)."""
    return _forward(replace(tiers, recompute=True), tokens, state)[0]


def _forward(tiers: Tiers, tokens: Tokens, state: Any):
    structure = None

    def first(tokens, state, found):
        """Results, and what backward needs."""
        nonlocal structure
        if tiers.recompute:
            return tiers.first(tokens, state, found), ()
        outputs, pullback = jax.vjp(partial(tiers.first, found=found), tokens, state)
        leaves, structure = jax.tree.flatten(pullback)
        return outputs, leaves

    def streamed(other, tokens, state, _found):
        outputs, (_, saved, _) = _forward(other.alone(), tokens, state)
        return outputs, varying_like(saved, tokens)

    def block(state, index):
        """State after a block, and (its outputs, what backward needs)."""
        tokens_ = _slice(tokens, index, tiers.block_size)
        tier, found = tiers.choose(tokens_, state)
        ways = [first, *(partial(streamed, other) for other in tiers.others)]
        kept = [jax.eval_shape(way, tokens_, state, found)[1] for way in ways]
        branches = [partial(_keeping, way, i, kept) for i, way in enumerate(ways)]
        (outputs, after), kept = lax.switch(tier, branches, tokens_, state, found)
        return after, (outputs, (state, tier, found, kept))

    def step(carry, index):
        state, outputs = carry
        state, (block_outputs, saved) = block(state, index)
        return (state, _write(outputs, block_outputs, index)), saved

    if tokens.length == tiers.block_size:
        after, (outputs, saved) = block(state, 0)
    else:
        num_blocks = tokens.length // tiers.block_size
        shapes = jax.eval_shape(block, state, 0)[1][0]
        outputs = jax.tree.map(lambda x: _stretched(x, num_blocks), shapes)
        outputs = varying_like(outputs, tokens)
        (after, outputs), saved = lax.scan(step, (state, outputs), jnp.arange(num_blocks))
    return (outputs, after), (tokens, saved, _Static(structure))


def _backward(tiers: Tiers, saved, cotangents):
    tokens, saved, structure = saved
    d_outputs, d_state = cotangents

    def block(d_state, index, saved):
        """Cotangents of the state before a block and of its tokens."""
        state, tier, found, kept = saved
        tokens_, d_outputs_ = _slice((tokens, d_outputs), index, tiers.block_size)

        def first(tokens, state, cotangents):
            if tiers.recompute:
                pullback = jax.vjp(partial(tiers.first, found=found), tokens, state)[1]
            else:
                pullback = jax.tree.unflatten(structure.value, kept[0])
            return _floating(pullback(cotangents))

        def streamed(other, saved, tokens, _state, cotangents):
            saved = tokens, saved, _Static(None)
            return _floating(_backward(other.alone(), saved, cotangents))

        others = zip(tiers.others, kept[1:], strict=True)
        branches = [first, *(partial(streamed, *other) for other in others)]
        return lax.switch(tier, branches, tokens_, state, (d_outputs_, d_state))

    def step(carry, xs):
        d_state, d_tokens = carry
        index, saved = xs
        d_block, d_state = block(d_state, index, saved)
        return (d_state, _write(d_tokens, d_block, index)), None

    if tokens.length == tiers.block_size:
        d_tokens, d_state = block(d_state, 0, saved)
    else:
        d_tokens = jax.tree.map(jnp.zeros_like, _floating((tokens, None))[0])
        xs = jnp.arange(tokens.length // tiers.block_size), saved
        (d_state, d_tokens), _ = lax.scan(step, (d_state, d_tokens), xs, reverse=True)
    return Tokens(*d_tokens, starts=None), d_state


run.defvjp(_forward, _backward)


def _keeping(way: Callable, index: int, kept: list, tokens: Tokens, state: Any, found: Any):
    """Results of one way, with what it keeps among nothing of the other ways'."""
    outputs, own = way(tokens, state, found)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)
    nothing = varying_like(nothing, tokens)
    return outputs, [*nothing[:index], own, *nothing[index + 1 :]]


def _floating(cotangents: tuple[Tokens, Any]) -> tuple[tuple, Any]:
    """Cotangents of the arrays that have one: not of `starts`, which is boolean."""
    tokens, state = cotangents
    return (tokens.query, tokens.key, tokens.value, tokens.log_decay), state


def _slice(tree: Any, index: Any, size: int) -> Any:
    def part(x: Array) -> Array:
        return x if x.shape[1] == size else lax.dynamic_slice_in_dim(x, index * size, size, 1)

    return jax.tree.map(part, tree)


def _write(whole: Any, block: Any, index: Any) -> Any:
    def put(x: Array, part: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, part, index * part.shape[1], 1)

    return jax.tree.map(put, whole, block)


def _stretched(x: Any, times: int) -> Array:
    return jnp.zeros((x.shape[0], times * x.shape[1], *x.shape[2:]), x.dtype)
