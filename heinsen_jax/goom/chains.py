"""Chains of matrix products, one after the other or as a parallel scan, with selective resets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.goom.numbers import Goom
from heinsen_jax.goom.runs import run, with_identities
from heinsen_jax.goom.wide import Wide, add, product
from heinsen_jax.ops.numerics import matmul as matrix_product
from heinsen_jax.typing import Array, Float, pytree_dataclass


@dataclass(frozen=True)
class Reset:
    """Replace states whose columns are nearly collinear by an orthonormal basis.

    Attributes:
      cosine: a state is replaced if the cosine between two of its columns exceeds this.
    """

    cosine: float = 0.99


def chain_products(
    matrices: Goom | Float[Array, "T N N"],
    *,
    initial: Goom | Float[Array, "N M"] | None = None,
    return_all: bool = True,
    reset: Reset | None = None,
    implementation: Literal["sequential", "parallel"] = "parallel",
) -> Goom:
    """Compute S_t = A_t S_{t-1} for all t, for matrices A `[T, N, N]`, at magnitudes of up to
    exp(7e8), which exponents of 32 bits have.

    "parallel" splits the chain into about sqrt(T) chunks of sqrt(T) products. All chunks are
    computed in parallel, each from the identity, and then combined, with three times the products
    in 2 sqrt(T) steps.

    With `reset`, the states are not the products: a state whose columns are nearly collinear is
    replaced by the orthonormal basis Q of its QR decomposition, which spans the same subspaces, so
    that differences of growth are not lost to rounding (selective resetting, arXiv:2510.03426). In
    parallel, products of consecutive matrices are reset by the same rule. A state is then a later
    product of matrices times such a basis: it depends neither on S_0 nor on earlier matrices, and
    its subspaces approach the sequential ones over the next products.

    Args:
      matrices: A, as numbers or as floats.
      initial: S_0 `[N, M]`; the identity when None.
      return_all: whether to return all states, not only the last one.
      reset: the rule of resets; none when None.
      implementation: "sequential" or "parallel".

    Returns:
      S `[T, N, M]`, or the last one `[N, M]`.

    Raises:
      ValueError: the shapes do not fit, no matrix is given, or the implementation is unknown.

    Examples:
      >>> matrices = jnp.broadcast_to(jnp.array([[2.0, 1.0], [1.0, 1.0]]), (10_000, 2, 2))
      >>> last = chain_products(matrices, return_all=False)
      >>> round(float(last.log_abs[0, 0] / 10_000), 3)  # log((3 + sqrt(5)) / 2)
      0.962
    """
    matrices = matrices if isinstance(matrices, Goom) else jnp.asarray(matrices)
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or not matrices.shape[0]:
        raise ValueError(f"matrices {matrices.shape} must be [T, N, N], with T > 0")
    size = matrices.shape[-1]
    if initial is None:
        initial = jnp.eye(size, dtype=matrices.dtype)
    start = Wide.of(initial if isinstance(initial, Goom) else jnp.asarray(initial))
    if len(start.shape) != 2 or start.shape[0] != size:
        raise ValueError(f"initial {start.shape} must be [N, M], with N = {size}")
    if reset is not None and start.shape[1] > size:
        raise ValueError(f"initial {start.shape} must have at most N = {size} columns with reset")
    if implementation not in ("sequential", "parallel"):
        raise ValueError(f"implementation={implementation!r} must be 'sequential' or 'parallel'")
    compute = _sequential if implementation == "sequential" else _parallel
    return compute(matrices, start, return_all, reset).goom()


def _sequential(matrices: Goom | Array, start: Wide, keep: bool, reset: Reset | None) -> Wide:
    if reset is None:
        last, states = run(matrices, start, keep=keep)
        return states if keep else last

    def step(state: Wide, matrix: Wide) -> tuple[Wide, Wide | None]:
        state = _reset(product(matrix, state), reset)
        return state, state if keep else None

    states: Any
    last, states = lax.scan(step, start, Wide.of(matrices))
    return states if keep else last


@pytree_dataclass
class _Affine:
    """S -> A S + B: the product A of consecutive matrices, and B, what follows a reset in it."""

    product: Wide
    offset: Wide


def _parallel(matrices: Goom | Array, start: Wide, keep: bool, reset: Reset | None) -> Wide:
    length, size = matrices.shape[0], matrices.shape[-1]
    chunk = max(1, round(length**0.5))
    count = -(-length // chunk)
    padded = with_identities(matrices, count * chunk - length)
    # [matrices of a chunk, chunks, N, N]; the first chunk begins with the padding
    chunks = jax.tree.map(lambda x: x.reshape(count, chunk, size, size).swapaxes(0, 1), padded)
    prefixes: Any
    at_ends: Any
    if reset is None:
        ones = jnp.broadcast_to(jnp.eye(size, dtype=matrices.dtype), (count, size, size))
        ends, prefixes = run(chunks, Wide.of(ones), keep=keep)
        last, at_ends = run(ends, start, keep=keep)
        if not keep:
            return last
    else:
        nothing = Wide.of(jnp.zeros((chunk, count, *start.shape), matrices.dtype))
        ends, prefixes = _scan(_Affine(Wide.of(chunks), nothing), reset)
        at_ends = _apply(_scan(ends, reset)[1], start, reset)
        if not keep:
            return at_ends[-1]
    before = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), start, at_ends)
    states = product(prefixes, before) if reset is None else _apply(prefixes, before, reset)
    joined = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *start.shape), states)
    return joined[count * chunk - length :]


def _scan(maps: _Affine, reset: Reset) -> tuple[_Affine, _Affine]:
    """The composition of maps along the first axis, and all partial compositions."""

    def step(earlier: _Affine, later: _Affine) -> tuple[_Affine, _Affine]:
        composed = _compose(earlier, later, reset)
        return composed, composed

    first, others = jax.tree.map(lambda x: x[0], maps), jax.tree.map(lambda x: x[1:], maps)
    last, kept = lax.scan(step, first, others)
    return last, jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, kept)


def _compose(earlier: _Affine, later: _Affine, reset: Reset) -> _Affine:
    matrix, offset = earlier.product, earlier.offset
    is_reset = _is_collinear(matrix, reset) & jnp.all(offset.mantissa == 0, (-2, -1))
    offset = _where(is_reset, _basis(matrix)[..., : offset.shape[-1]], offset)
    matrix = _where(is_reset, jax.tree.map(jnp.zeros_like, matrix), matrix)
    moved = add(product(later.product, offset), later.offset)
    return _Affine(product(later.product, matrix), moved)


def _apply(maps: _Affine, state: Wide, reset: Reset) -> Wide:
    return _reset(add(product(maps.product, state), maps.offset), reset)


def _reset(state: Wide, reset: Reset) -> Wide:
    return _where(_is_collinear(state, reset), _basis(state), state)


def _where(condition: Array, x: Wide, y: Wide) -> Wide:
    return jax.tree.map(partial(jnp.where, condition[..., None, None]), x, y)


def _is_collinear(state: Wide, reset: Reset) -> Array:
    columns = _unit_columns(state)
    cosines = jnp.abs(matrix_product(jnp.swapaxes(columns, -1, -2), columns))
    itself = jnp.broadcast_to(jnp.eye(cosines.shape[-1], dtype=bool), cosines.shape)
    return jnp.max(jnp.where(itself, 0, cosines), (-2, -1)) > reset.cosine


def _unit_columns(state: Wide) -> Array:
    """Columns of norm 1, as floats; a column of zeros stays."""
    columns = state.scaled(state.largest(-2))
    lengths = jnp.sqrt(jnp.sum(columns**2, -2, keepdims=True))
    return columns / jnp.where(lengths == 0, 1, lengths)


def _basis(state: Wide) -> Wide:
    """The orthonormal basis of a QR decomposition."""
    return Wide.of(jnp.linalg.qr(_unit_columns(state))[0])
