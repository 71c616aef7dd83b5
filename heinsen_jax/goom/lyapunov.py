"""Lyapunov exponents of dynamical systems, from the Jacobians along a trajectory, in parallel."""

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.goom.blocks import products, with_identities
from heinsen_jax.goom.chains import chain_products, square
from heinsen_jax.goom.numbers import floats, norm, to_goom
from heinsen_jax.goom.wide import Wide
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.numerics import matmul as matrix_product
from heinsen_jax.typing import Array, Float


def lyapunov_exponents(jacobians: Float[Array, "T N N"], *, dt: float = 1.0) -> Float[Array, "N"]:
    """The spectrum of Lyapunov exponents of a system x_t = f(x_{t-1}), in parallel over time.

        J_t Q_{t-1} = Q_t R_t,    lambda_i = 1 / (T dt) sum_t log |R_t,ii|

    The trajectory is split into about sqrt(T) chunks. The products of their Jacobians, at any
    magnitude, give the basis Q before each chunk, but not the directions that have shrunk by more
    than the precision; those converge over the chunk before, at the rate by which their exponents
    differ. QR decompositions over the chunk itself then give R. All chunks are computed in
    parallel, in 4 sqrt(T) steps. (In a scan with selective resets, as in arXiv:2510.03426, bases
    after a reset depend on a few Jacobians only, which changes the exponents below the largest.)

    Args:
      jacobians: J_t, the derivative of x_t by x_{t-1}, along a trajectory.
      dt: time of a step; exponents are per unit of time.

    Returns:
      The exponents, the largest first, up to the error of a finite trajectory.

    Raises:
      ValueError: the Jacobians are not square matrices, or none is given.
      TypeError: they are complex.

    Examples:
      >>> cat_map = jnp.broadcast_to(jnp.array([[2.0, 1.0], [1.0, 1.0]]), (500, 2, 2))
      >>> [round(float(x), 3) for x in lyapunov_exponents(cat_map)]  # log((3 +- sqrt(5)) / 2)
      [0.962, -0.962]
    """
    jacobians = square("jacobians", floats(jacobians))
    return _exponents(jacobians) / (len(jacobians) * dt)


@jax.jit  # compiled once outside another `jit`
def _exponents(jacobians: Float[Array, "T N N"]) -> Float[Array, "N"]:
    """The exponents of all steps together."""
    length, size = jacobians.shape[:2]
    count = -(-length // max(1, round(length**0.5)))
    chunk = -(-length // count)
    padded = with_identities(jacobians, count * chunk - length)
    chunks = padded.reshape(count, chunk, size, size).swapaxes(0, 1)
    identity = varying_like(jnp.eye(size, dtype=jacobians.dtype), jacobians)
    ones = Wide.of(jnp.broadcast_to(identity, (count, size, size)))
    of_chunks, _ = products(chunks, ones, keep=False)

    def decompose(basis: Array, matrix: Array) -> tuple[Array, Array]:
        basis, triangle = jnp.linalg.qr(matrix_product(matrix, basis))
        return basis, jnp.abs(jnp.diagonal(triangle, axis1=-2, axis2=-1))

    def move(basis: Array, matrix: Array) -> tuple[Array, Array]:
        basis, _ = decompose(basis, matrix)
        return basis, basis

    _, ends = lax.scan(move, identity, of_chunks.scaled(of_chunks.largest((-2, -1))))
    start = jnp.broadcast_to(identity, (min(2, count), size, size))
    bases = jnp.concatenate([start, ends[:-2]])  # two chunks before the end of each
    before = jnp.concatenate(
        [jnp.broadcast_to(identity, (chunk, 1, size, size)), chunks[:, :-1]], 1
    )
    bases, _ = lax.scan(move, bases, before)
    _, growth = lax.scan(decompose, bases, chunks)
    return jnp.sort(jnp.sum(jnp.log(growth), (0, 1)), descending=True)


def largest_lyapunov_exponent(
    jacobians: Float[Array, "T N N"], *, dt: float = 1.0
) -> Float[Array, ""]:
    """The largest Lyapunov exponent, from the growth of a random vector u:

        lambda = 1 / (T dt) log (|J_T ... J_1 u| / |u|)

    Args:
      jacobians: as for `lyapunov_exponents`.
      dt: time of a step.

    Raises:
      ValueError: as `lyapunov_exponents`.

    Examples:
      >>> cat_map = jnp.broadcast_to(jnp.array([[2.0, 1.0], [1.0, 1.0]]), (5000, 2, 2))
      >>> round(float(largest_lyapunov_exponent(cat_map)), 3)
      0.962
    """
    jacobians = square("jacobians", floats(jacobians))
    vector = jax.random.normal(jax.random.key(0), (jacobians.shape[-1], 1), jacobians.dtype)
    last = chain_products(jacobians, initial=vector, return_all=False)
    grown, before = (norm(x, -2).log_abs[0] for x in (last, to_goom(vector)))
    return (grown - before) / (len(jacobians) * dt)
