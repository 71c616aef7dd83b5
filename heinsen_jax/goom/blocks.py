"""Chains of products, in blocks in which each column of the state has one exponent."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.goom.numbers import Goom, to_goom
from heinsen_jax.goom.wide import LARGEST, NONE, Wide, exponent_of, normal, power_of_2, product
from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.numerics import matmul as matrix_product
from heinsen_jax.typing import Array

BLOCK = 32
"""Products between two checks that none lost a term."""
Matrices = Goom | Wide | Array
M = TypeVar("M", bound=Matrices)


def products(matrices: Matrices, start: Wide, *, keep: bool) -> tuple[Wide, Any]:
    """The last of the states S_t = A_t S_{t-1}, and all of them, if they are kept.

    In a block of products, each column of the state has one exponent, so that a product is one of
    floats. If it could have lost a term, the block is computed again by `product`.

    Args:
      matrices: A `[T, *B, N, N]`.
      start: S_0 `[*B, N, M]`.
      keep: whether all states are kept.
    """
    start = varying_like(start, matrices)
    length = len(jax.tree.leaves(matrices)[0])
    block = min(BLOCK, length)
    count = -(-length // block)
    padded = with_identities(matrices, count * block - length)
    blocks = jax.tree.map(lambda x: x.reshape(count, block, *x.shape[1:]), padded)

    def step(state: Wide, matrices: Matrices) -> tuple[Wide, Wide | None]:
        columns, least = _fast(matrices, state, keep=keep)
        limits = jnp.finfo(state.mantissa.dtype)
        margin = limits.minexp + 2 * limits.nmant
        tier = first_safe((margin - lax.stop_gradient(least)).astype(limits.dtype)[None])
        exact = jax.checkpoint(partial(_exact, keep=keep))  # or it stores its residuals
        return lax.switch(tier, (lambda: columns, lambda: exact(Wide.of(matrices), state)))

    last, states = lax.scan(step, start, blocks)
    if keep:
        states = jax.tree.map(lambda x: x.reshape(count * block, *x.shape[2:]), states)
        states = states[count * block - length :]
    return last, states


def with_identities(matrices: M, number: int) -> M:
    """Matrices after a number of identities."""
    like = jax.tree.leaves(matrices)[0]
    dtype = jnp.zeros((), like.dtype).dtype
    ones: Any = jnp.broadcast_to(jnp.eye(like.shape[-1], dtype=dtype), (number, *like.shape[1:]))
    if isinstance(matrices, Goom):
        ones = to_goom(ones)
    elif isinstance(matrices, Wide):
        ones = Wide.of(ones)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), ones, matrices)


def _scaled(matrices: Matrices) -> tuple[Array, Array, Array]:
    """Matrices as floats below 1, an exponent for each `[..., 1, 1]`, and whether numbers were
    lost."""
    if isinstance(matrices, Goom | Wide):
        wide = Wide.of(matrices)
        exponent = wide.largest((-2, -1))
        floats = wide.scaled(exponent)
        return floats, exponent, _is_lost(floats, wide.mantissa)
    exponent, dtype = _exponent(matrices, (-2, -1)), matrices.dtype
    half = exponent // 2  # 2^-exponent may be too small for a float
    floats = matrices * power_of_2(-half, dtype) * power_of_2(half - exponent, dtype)
    return floats, exponent, _is_lost(floats, matrices)


def _is_lost(scaled: Array, numbers: Array) -> Array:
    return jnp.any((scaled == 0) & (numbers != 0))


def _exponent(x: Array, axis: int | tuple[int, ...]) -> Array:
    """The exponent of the largest number along axes; 0 if all are 0."""
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis, keepdims=True)
    return jnp.where(largest == 0, 0, exponent_of(largest))


def _least(x: Array) -> Array:
    """The exponent of the smallest number that is not 0."""
    x = jnp.abs(lax.stop_gradient(x))
    return exponent_of(jnp.min(jnp.where(x == 0, 1, x), initial=1))


def _fast(matrices: Matrices, start: Wide, *, keep: bool) -> tuple[tuple[Wide, Wide | None], Array]:
    """The states of a block, and the least exponent of a term of their products."""
    floats, exponents, is_lost = _scaled(matrices)
    columns = start.largest(-2)
    state = start.scaled(columns)
    is_lost |= _is_lost(state, start.mantissa)

    def step(carry, matrix):
        (state, columns, least), (matrix, exponent) = carry, matrix
        least = jnp.minimum(least, _least(matrix) + _least(state))
        state = matrix_product(matrix, state)
        shift = _exponent(state, -2)
        state = state * power_of_2(-shift, state.dtype)
        columns = columns + shift + exponent
        is_far = jnp.any(jnp.abs(columns) > LARGEST)
        columns, least = jnp.clip(columns, -LARGEST, LARGEST), jnp.where(is_far, NONE, least)
        return (state, columns, least), ((state, columns) if keep else None)

    least = jnp.where(is_lost, jnp.int32(NONE), jnp.int32(0))
    kept: Any
    (state, columns, least), kept = lax.scan(step, (state, columns, least), (floats, exponents))
    return (normal(state, columns), normal(*kept) if keep else None), least


def _exact(matrices: Wide, start: Wide, *, keep: bool) -> tuple[Wide, Wide | None]:
    def step(state: Wide, matrix: Wide) -> tuple[Wide, Wide | None]:
        state = product(matrix, state)
        return state, state if keep else None

    return lax.scan(step, start, matrices)
