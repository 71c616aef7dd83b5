"""Chains of matrix products, one after the other or as a parallel scan, with selective resets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.goom.blocks import products, with_identities
from heinsen_jax.goom.numbers import Goom, floats
from heinsen_jax.goom.wide import Wide, product
from heinsen_jax.ops.layout import equally_varying
from heinsen_jax.ops.numerics import matmul as matrix_product
from heinsen_jax.typing import Array, Float, common_dtype

T = TypeVar("T", bound=Goom | Array)


@dataclass(frozen=True)
class Reset:
    """Replace states whose columns are nearly collinear by an orthonormal basis.

    Attributes:
      cosine: a state is replaced if the cosine between two of its columns exceeds this; a number
        that is not traced.
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
    """Compute S_t = A_t S_{t-1} for all t, for matrices A `[T, N, N]`. Numbers below exp(-3.7e8)
    become 0, numbers above exp(3.7e8) infinite.

    "parallel" splits the chain into about sqrt(T) chunks of sqrt(T) products. All chunks are
    computed in parallel, each from the identity, and then combined: about twice the products in
    2 sqrt(T) steps (3 sqrt(T) with `reset`).

    With `reset`, the states are not the products: a state whose columns are nearly collinear is
    replaced by the orthonormal basis Q of its QR decomposition, which spans the same subspaces, so
    that differences of growth are not lost to rounding (selective resetting, arXiv:2510.03426). In
    parallel, states before the chunks are reset first, and then, in all chunks, the states after
    each matrix. The product of a chunk may have lost directions that a sequence of states keeps.

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
      TypeError: the matrices or S_0 are complex.

    Examples:
      >>> matrices = jnp.broadcast_to(jnp.array([[2.0, 1.0], [1.0, 1.0]]), (10_000, 2, 2))
      >>> last = chain_products(matrices, return_all=False)
      >>> round(float(last.log_abs[0, 0] / 10_000), 3)  # log((3 + sqrt(5)) / 2)
      0.962
    """
    matrices = square("matrices", matrices if isinstance(matrices, Goom) else floats(matrices))
    size = matrices.shape[-1]
    if initial is None:
        initial = jnp.eye(size, dtype=matrices.dtype)
    initial = initial if isinstance(initial, Goom) else floats(initial)
    dtype = common_dtype(matrices.dtype, initial.dtype)
    matrices, start = matrices.astype(dtype), Wide.of(initial.astype(dtype))
    matrices, start = equally_varying((matrices, start))
    if len(start.shape) != 2 or start.shape[0] != size:
        raise ValueError(f"initial {start.shape} must be [N, M], with N = {size}")
    if reset is not None and start.shape[1] > size:
        raise ValueError(f"initial {start.shape} must have at most N = {size} columns with reset")
    if implementation not in ("sequential", "parallel"):
        raise ValueError(f"implementation={implementation!r} must be 'sequential' or 'parallel'")
    compute = _sequential if implementation == "sequential" else _parallel
    reset = None if reset is None else Reset(float(reset.cosine))
    return compute(bool(return_all), reset, matrices, start).goom()


def square(name: str, matrices: T) -> T:
    """Square matrices `[T, N, N]`.

    Raises:
      ValueError: they are not, or none is given.
    """
    shape = matrices.shape
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        raise ValueError(f"{name} {shape} must be [T, N, N], with T > 0 and N > 0")
    return matrices


@partial(jax.jit, static_argnums=(0, 1))  # compiled once outside another `jit`
def _sequential(keep: bool, reset: Reset | None, matrices: Goom | Array, start: Wide) -> Wide:
    if reset is None:
        last, states = products(matrices, start, keep=keep)
    else:
        last, states = _with_resets(Wide.of(matrices), start, reset, keep=keep)
    return states if keep else last


@partial(jax.jit, static_argnums=(0, 1))
def _parallel(keep: bool, reset: Reset | None, matrices: Goom | Array, start: Wide) -> Wide:
    length, size = matrices.shape[0], matrices.shape[-1]
    chunk = max(1, round(length**0.5))
    count = -(-length // chunk)
    padded = with_identities(matrices, count * chunk - length)
    # [matrices of a chunk, chunks, N, N]; the first chunk begins with the padding
    chunks = jax.tree.map(lambda x: x.reshape(count, chunk, size, size).swapaxes(0, 1), padded)
    ones = Wide.of(jnp.broadcast_to(jnp.eye(size, dtype=matrices.dtype), (count, size, size)))
    ends, prefixes = products(chunks, ones, keep=keep and reset is None)
    if reset is None:
        last, at_ends = products(ends, start, keep=keep)
        if not keep:
            return last
    else:
        _, at_ends = _with_resets(ends, start, reset, keep=True)
    before = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), start, at_ends)
    if reset is None:
        states = product(prefixes, before)
    else:
        last, states = _with_resets(Wide.of(chunks), before, reset, keep=keep)
        if not keep:
            return last[-1]
    joined = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(count * chunk, *start.shape), states)
    return joined[count * chunk - length :]


def _with_resets(steps: Wide, start: Wide, reset: Reset, *, keep: bool) -> tuple[Wide, Any]:
    """The last of the states `[*B, N, M]`, and all of them, if they are kept."""

    def step(state: Wide, matrix: Wide) -> tuple[Wide, Wide | None]:
        state = _reset(product(matrix, state), reset)
        return state, state if keep else None

    return lax.scan(step, start, steps)


def _reset(state: Wide, reset: Reset) -> Wide:
    columns = _unit_columns(state)
    cosines = jnp.abs(matrix_product(jnp.swapaxes(columns, -1, -2), columns))
    itself = jnp.broadcast_to(jnp.eye(cosines.shape[-1], dtype=bool), cosines.shape)
    is_collinear = (
        jnp.max(jnp.where(itself, 0, cosines), (-2, -1), keepdims=True, initial=0) > reset.cosine
    )
    # other states may be singular, where the decomposition has no gradient
    regular = jnp.broadcast_to(jnp.eye(*columns.shape[-2:], dtype=columns.dtype), columns.shape)
    basis = Wide.of(jnp.linalg.qr(jnp.where(is_collinear, columns, regular))[0])
    return jax.tree.map(partial(jnp.where, is_collinear), basis, state)


def _unit_columns(state: Wide) -> Array:
    """Columns of norm 1, as floats; a column of zeros stays."""
    columns = state.scaled(state.largest(-2))
    squares = jnp.sum(columns**2, -2, keepdims=True)
    return columns / jnp.sqrt(jnp.where(squares == 0, 1, squares))
