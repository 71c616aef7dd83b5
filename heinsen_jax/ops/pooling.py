r"""Weighted averages of tokens over windows of any size, with one weight per token.

Tokens are split into chunks of C. A window of n C tokens that ends in row r of a chunk consists of
that chunk's columns c <= r, the columns c > r of the chunk n before it, and the n - 1 complete
chunks in between. The first two together are C columns: products with a `[C, C]` matrix of weights.
The averages of complete chunks are tokens themselves and are pooled recursively:

    pool(tokens, n C) = products + pool(chunks, n - 1)

Nothing is subtracted from a sum, and exponentials are relative to the largest one in their window,
so logits may be of any size. Gradients are pooled likewise, from later tokens to earlier ones.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.ops.numerics import reciprocal, safe_log, share
from heinsen_jax.typing import Array

CHUNK = 32  # maximum number of tokens in a chunk


class WeightedTokens(NamedTuple):
    """Tokens x `[X, T, D]` with the weights factor * exp(logits) `[X, T]`, X = prod(*B) N.

    Averages are represented as tokens, too, with the total weight of the averaged tokens: the
    largest logit, without gradient, and the sum relative to it. Their logarithm, a single float,
    would lose the sum where logits are large.
    """

    x: Array
    logits: Array
    factor: Array

    @property
    def log_weight(self) -> Array:
        """Logarithms of the weights; -inf without tokens."""
        return safe_log(self.factor) + self.logits


NOTHING = WeightedTokens._make([0.0, -jnp.inf, 0.0])
"""Fill values: a token without weight."""


def weighted(x: Array, logits: Array) -> WeightedTokens:
    """Tokens with the weights exp(logits)."""
    return WeightedTokens(x, logits, jnp.ones_like(logits))


def average(tokens: WeightedTokens) -> WeightedTokens:
    """Average all tokens into one."""
    largest = lax.stop_gradient(jnp.max(tokens.logits, 1, keepdims=True, initial=-jnp.inf))
    weights = tokens.factor * share(tokens.logits, largest)
    total = jnp.sum(weights, 1, keepdims=True)
    x = (weights * reciprocal(total))[:, None] @ tokens.x
    return WeightedTokens(x, largest, total)


def merged(a: WeightedTokens, b: WeightedTokens) -> WeightedTokens:
    """Average two averages."""
    largest = lax.stop_gradient(jnp.maximum(a.logits, b.logits))
    weight_a, weight_b = (z.factor * share(z.logits, largest) for z in (a, b))
    total = weight_a + weight_b
    inverse = reciprocal(total)
    x = (weight_a * inverse)[..., None] * a.x + (weight_b * inverse)[..., None] * b.x
    return WeightedTokens(x, largest, total)


def _pool(window: int, tokens: WeightedTokens, segments: Array | None) -> WeightedTokens:
    """Return at each token the average of the last `window` tokens, itself included.

    With `segments` `[X, T]`, monotonic ids, only tokens of the same id are averaged.
    """
    length = tokens.x.shape[1]
    window = min(window, length)
    count = math.ceil(window / CHUNK)  # chunks in a window
    size = math.ceil(window / count) if count > 1 else min(CHUNK, length)
    layout = _Layout(length, window if count > 1 else size, count, size)
    chunks = jax.tree.map(layout.split, tokens, NOTHING)
    ids = None if segments is None else layout.split(segments, None)
    pooled = _products(chunks, ids, count, window)
    if count > 1:
        ends = jax.tree.map(lambda x: x[:, size - 1 :: size], pooled)  # averages of complete chunks
        end_ids = None if ids is None else ids[:, :, -1]
        past = _pool(count - 1, ends, end_ids)
        past = jax.tree.map(lambda x, fill: _later(x, 1, fill), past, NOTHING)
        past = jax.tree.map(partial(jnp.repeat, repeats=size, axis=1), past)
        if ids is not None and end_ids is not None:
            same = ids == _later(end_ids, 1, 0)[:, :, None]
            past = past._replace(
                logits=jnp.where(same.reshape(past.logits.shape), past.logits, -jnp.inf)
            )
        pooled = merged(pooled, past)
    return jax.tree.map(layout.joined, pooled)


pool = jax.custom_vjp(_pool, nondiff_argnums=(0,))


def _pool_forward(window, tokens, segments):
    pooled = _pool(window, tokens, segments)
    return pooled, (tokens, segments, pooled)


def _pool_backward(window, saved, cotangents):
    """The weight of a token in the average at t is its weight, divided by t's total weight:
    cotangents are pooled as well, from later tokens, with the inverse of that as weights."""
    tokens, segments, pooled = saved
    d_total = cotangents.factor * pooled.factor - jnp.sum(cotangents.x * pooled.x, -1)
    flows = jnp.concatenate([cotangents.x, d_total[..., None]], -1)
    empty = pooled.factor == 0
    logits = jnp.where(empty, -jnp.inf, -pooled.logits)
    readers = WeightedTokens(flows, logits, reciprocal(pooled.factor))
    flipped = jax.tree.map(partial(jnp.flip, axis=1), (readers, segments))
    flows, logits, factor = jax.tree.map(partial(jnp.flip, axis=1), pool(window, *flipped))
    shares = jnp.exp(tokens.logits + logits) * factor
    d_x = (tokens.factor * shares)[..., None] * flows[..., :-1]
    d_factor = shares * (jnp.sum(flows[..., :-1] * tokens.x, -1) + flows[..., -1])
    return WeightedTokens(d_x, tokens.factor * d_factor, d_factor), None


pool.defvjp(_pool_forward, _pool_backward)


class _Layout(NamedTuple):
    """Layout of `length` tokens in blocks of `block`, each of `chunks` chunks of `size`."""

    length: int
    block: int
    chunks: int
    size: int

    def split(self, x: Array, fill: float | None) -> Array:
        """`[X, T, ...]` -> `[X, chunks, C, ...]`, padded at the end of a block with `fill`, or with
        the last token if None."""
        blocks = math.ceil(self.length / self.block)
        rest = self.length - (blocks - 1) * self.block
        x = _filled(x, 1, blocks * self.block, fill)
        x = x.reshape(len(x), blocks, self.block, *x.shape[2:])
        x = _filled(x, 2, self.chunks * self.size, fill)
        x = x.reshape(len(x), blocks * self.chunks, self.size, *x.shape[3:])
        return x[:, : (blocks - 1) * self.chunks + math.ceil(rest / self.size)]

    def joined(self, x: Array) -> Array:
        """`[X, chunks C, ...]` -> `[X, T, ...]`: remove the padding of `split`."""
        blocks = math.ceil(self.length / self.block)
        x = _filled(x, 1, blocks * self.chunks * self.size, 0)
        x = x.reshape(len(x), blocks, self.chunks * self.size, *x.shape[2:])[:, :, : self.block]
        return x.reshape(len(x), blocks * self.block, *x.shape[3:])[:, : self.length]


def _filled(x: Array, axis: int, length: int, fill: float | None) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    if widths[axis][1] == 0:
        return x
    return jnp.pad(x, widths, "edge") if fill is None else jnp.pad(x, widths, constant_values=fill)


def _later(x: Array, steps: int, fill: float) -> Array:
    """Return x `[X, chunks, ...]` of the chunk `steps` before each chunk."""
    nothing = jnp.full_like(x[:, :steps], fill)
    return jnp.concatenate([nothing, x[:, : x.shape[1] - steps]], 1)


def _products(chunks: WeightedTokens, ids: Array | None, count: int, window: int) -> WeightedTokens:
    """Average the tokens `[X, chunks C, ...]` of a window that lie in its last chunk and in the one
    `count` before."""
    x, logits, factor = chunks
    folds, number, size = logits.shape
    own = jnp.broadcast_to(jnp.tri(size, dtype=bool), (folds, number, size, size))
    has_earlier = number > count

    def by_row(x: Array) -> Array:
        # Elementwise operations on two short axes are unrolled, and compile slowly.
        return x.reshape(folds * number * size, size)

    def pairs(x: Array, fill: float) -> Array:
        """Return x of the token that a row averages in a column."""
        earlier = _later(x, count, fill) if has_earlier else jnp.full_like(x, fill)
        return by_row(jnp.where(own, x[:, :, None], earlier[:, :, None]))

    scores = pairs(logits, -jnp.inf)
    if window < size:
        index = np.arange(size)
        age = (index[:, None] - index[None]) % size
        visible = jnp.broadcast_to(jnp.asarray(age < window), own.shape)
        scores = jnp.where(by_row(visible), scores, -jnp.inf)
    if ids is not None:
        scores = jnp.where(pairs(ids, -1) == ids.reshape(-1, 1), scores, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = pairs(factor, 0.0) * share(scores, largest)
    total = jnp.sum(weights, -1, keepdims=True)  # 0 if empty
    weights = weights * reciprocal(total)  # before the products, since x may be large

    def products(mask: Array, x: Array) -> Array:
        return jnp.where(by_row(mask), weights, 0.0).reshape(own.shape) @ x

    y = products(own, x)
    if has_earlier:
        y = y + products(~own, _later(x, count, 0.0))
    largest, total = (z.reshape(folds, number * size) for z in (largest, total))
    return WeightedTokens(y.reshape(folds, number * size, y.shape[-1]), largest, total)
