"""Floats with an exponent of 32 bits, in which matrix products are computed.

Logarithms of large numbers have few digits after the point: at exp(1e6), float32 has steps of 6%.
A mantissa and an exponent lose none, however long a chain of products is.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.goom.numbers import Goom, as_goom, from_goom, multiply, to_goom
from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import is_symbolic
from heinsen_jax.ops.numerics import TERMS, smallest_sum
from heinsen_jax.ops.numerics import matmul as matrix_product
from heinsen_jax.typing import Array, ArrayLike, common_dtype, pytree_dataclass

NONE = -(1 << 30)
"""Exponent of 0, below all others."""
LARGEST = 1 << 29
"""Numbers with a larger exponent are infinite, those with a smaller one than -LARGEST are 0."""
LARGEST_LOG = 1e8
"""Logarithms beyond this are scaled before they become exponents."""


@pytree_dataclass
class Wide:
    """Numbers mantissa * 2^exponent, with |mantissa| in [1/2, 1), or 0, infinite or NaN.

    A mantissa of 0 may have any exponent, to which its gradient is relative.
    """

    mantissa: Array
    exponent: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mantissa.shape

    def __getitem__(self, index: object) -> Wide:
        return jax.tree.map(lambda x: x[index], self)

    def astype(self, dtype: np.dtype) -> Wide:
        return Wide(self.mantissa.astype(dtype), self.exponent)

    @staticmethod
    def of(x: Wide | Goom | Array) -> Wide:
        """Exact for normal floats."""
        if isinstance(x, Wide):
            return x
        if not isinstance(x, Goom):
            return normal(x, 0)
        is_zero = (x.sign == 0) | (x.log_abs == -jnp.inf)
        octaves = jnp.where(is_zero, 0, jnp.ceil(x.log_abs / math.log(2)))
        octaves = jnp.clip(lax.stop_gradient(octaves), -2 * LARGEST, 2 * LARGEST)
        high, low = _parts_of_log_2(x.dtype)  # octaves * high: exact up to 2^13 in float32
        rest = (x.log_abs - octaves * high) - octaves * low
        return normal(from_goom(Goom(rest, x.sign)), octaves.astype(jnp.int32))

    def goom(self) -> Goom:
        high, low = _parts_of_log_2(self.mantissa.dtype)
        octaves = self.exponent.astype(self.mantissa.dtype)
        is_zero = self.mantissa == 0  # only its gradient has the exponent
        digits = to_goom(
            self.mantissa * jnp.where(is_zero, power_of_2(self.exponent, self.mantissa.dtype), 1)
        )
        shift = jnp.where(is_zero, 0, octaves * low) + jnp.where(is_zero, 0, octaves * high)
        return Goom(digits.log_abs + shift, digits.sign)

    def scaled(self, exponent: Array) -> Array:
        """Floats relative to 2^exponent, which is at least their own exponent."""
        dtype = self.mantissa.dtype
        # only a 0 may have a larger one; this limits its cotangent to 3/4 of the range
        limit = jnp.finfo(dtype).maxexp * 3 // 4
        return self.mantissa * power_of_2(jnp.minimum(self.exponent - exponent, limit), dtype)

    def sum(self, axis: int) -> Wide:
        """The sum over an axis."""
        largest = self.largest(axis)
        return normal(jnp.sum(self.scaled(largest), axis), jnp.squeeze(largest, axis))

    def largest(self, axis: int | tuple[int, ...]) -> Array:
        """The largest exponent of numbers that are not 0, or 0 if all are."""
        exponent = jnp.where(self.mantissa == 0, NONE, self.exponent)
        largest = jnp.max(exponent, axis, keepdims=True, initial=NONE)
        return jnp.where(largest == NONE, 0, largest)


def _parts_of_log_2(dtype: np.dtype) -> tuple[float, float]:
    """log 2 as a number with half of the bits, and the rest."""
    bits = jnp.finfo(dtype).nmant // 2
    high = math.floor(math.log(2) * 2**bits) / 2**bits
    return high, math.log(2) - high


def power_of_2(exponent: Array, dtype: np.dtype) -> Array:
    """2^exponent; 0 below the smallest normal number, and the largest power beyond it."""
    limits, integer = jnp.finfo(dtype), _integer(dtype)
    bias = 1 - limits.minexp
    field = jnp.clip(exponent + bias, 0, 2 * bias).astype(integer)
    return lax.bitcast_convert_type(field << limits.nmant, dtype)


def exponent_of(x: Array) -> Array:
    """The exponent of floats as int32, for a mantissa in [1/2, 1); the least one for 0."""
    limits, integer = jnp.finfo(x.dtype), _integer(x.dtype)
    bits = lax.bitcast_convert_type(lax.stop_gradient(jnp.abs(x)), integer)
    return (bits >> limits.nmant).astype(jnp.int32) + limits.minexp


def _integer(dtype: np.dtype) -> np.dtype:
    """Integers with as many bits as a float."""
    return np.dtype(f"int{jnp.finfo(dtype).bits}")


def normal(x: Array, exponent: Array | int) -> Wide:
    """x * 2^exponent with a mantissa in [1/2, 1); infinite beyond 2^LARGEST, 0 below
    2^-LARGEST."""
    shift = jnp.where(x == 0, 0, exponent_of(x))
    # two factors: 2^-shift overflows for the smallest normal numbers
    half = shift // 2
    mantissa = x * power_of_2(-half, x.dtype) * power_of_2(half - shift, x.dtype)
    exponent = jnp.broadcast_to(shift + exponent, x.shape)
    infinite = jnp.copysign(jnp.inf, lax.stop_gradient(mantissa))
    is_finite = jnp.isfinite(mantissa)
    mantissa = jnp.where(is_finite & (mantissa != 0) & (exponent > LARGEST), infinite, mantissa)
    mantissa = jnp.where(is_finite & (exponent < -LARGEST), 0, mantissa)
    return Wide(mantissa, jnp.clip(exponent, -LARGEST, LARGEST))


def product(x: Wide, y: Wide) -> Wide:
    """The matrix product of x `[*B, I, K]` and y `[*B, K, J]`, whose batch axes are broadcast.

    Rows of x and columns of y are scaled by their largest elements and multiplied as floats, unless
    a sum could then be lost: if so, all sums are computed term by term.
    """
    rank = max(len(x.shape), len(y.shape))
    x, y = jax.tree.map(lambda leaf: leaf.reshape((1,) * (rank - leaf.ndim) + leaf.shape), (x, y))
    rows, columns = x.largest(-1), y.largest(-2)
    tier = _tier(x.scaled(rows), y.scaled(columns), _span(x, rows) + _span(y, columns))
    return lax.switch(tier, (_scaled_product, _by_terms), x, y)


def _span(x: Wide, largest: Array) -> Array:
    """The least exponent of numbers that are not 0, relative to the largest."""
    below = jnp.maximum(x.exponent - largest, NONE // 2)  # two of them fit into 32 bits
    return jnp.min(jnp.where(x.mantissa == 0, 0, below), initial=0)


def _tier(x: Array, y: Array, span: Array) -> Array:
    """0 if the product of scaled matrices is exact for all sums, otherwise 1.

    Args:
      x: scaled rows.
      y: scaled columns.
      span: the least exponent of a product of two of their elements that are not 0.
    """
    x, y = lax.stop_gradient((x, y))
    excess = (jnp.finfo(x.dtype).minexp + 2 - span).astype(x.dtype)

    def by_product() -> Array:
        sums = matrix_product(jnp.abs(x), jnp.abs(y))
        return first_safe(jnp.max(smallest_sum(x.dtype) - sums, initial=0)[None])

    by_span = first_safe(excess[None])
    return lax.cond(by_span == 0, lambda: by_span, by_product)


def _scaled_product(x: Wide, y: Wide) -> Wide:
    rows, columns = x.largest(-1), y.largest(-2)
    return normal(matrix_product(x.scaled(rows), y.scaled(columns)), rows + columns)


def _by_terms(x: Wide, y: Wide) -> Wide:
    """The product, for a few rows of x at a time, so that at most `TERMS` terms are in memory."""
    size = x.shape[-2]
    batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    terms = math.prod((*batch, *y.shape[-2:]))  # of one row of x
    several = 1
    if not is_symbolic(size * terms):
        limit = max(1, TERMS // max(1, terms))
        several = max((n for n in range(1, size + 1) if size % n == 0 and n <= limit), default=1)

    @jax.checkpoint  # a backward pass would otherwise store all terms
    def rows_product(rows: Wide) -> Wide:  # [*B, rows, K] to [*B, rows, J]
        mantissa = rows.mantissa[..., None] * y.mantissa[..., None, :, :]
        terms = Wide(mantissa, rows.exponent[..., None] + y.exponent[..., None, :, :])
        return terms.sum(-2)

    def split(leaf: Array) -> Array:
        return jnp.moveaxis(
            leaf.reshape(*leaf.shape[:-2], size // several, several, leaf.shape[-1]), -3, 0
        )

    def join(leaf: Array) -> Array:
        leaf = jnp.moveaxis(leaf, 0, -3)
        return leaf.reshape(*leaf.shape[:-3], size, leaf.shape[-1])

    return jax.tree.map(join, lax.map(rows_product, jax.tree.map(split, x)))


def total(x: Wide, y: Wide) -> Wide:
    """The sum of two arrays of numbers."""
    return jax.tree.map(lambda *leaves: jnp.stack(jnp.broadcast_arrays(*leaves)), x, y).sum(0)


def matmul(x: Goom | ArrayLike, y: Goom | ArrayLike) -> Goom:
    """The matrix product Z = X Y for X `[*B, I, K]` and Y `[*B, K, J]` of any magnitudes: the
    log-matmul-exp of arXiv:2510.03426, scaled by row and column.

        Z_ij = exp(c_i + d_j) sum_k (X_ik exp(-c_i)) (Y_kj exp(-d_j))

    c_i is the logarithm of the largest number in a row of X, d_j in a column of Y; the scaled
    matrices are multiplied as floats. If this could lose a sum, because the largest numbers of a
    row and a column are at different k, all sums are computed term by term. Errors are relative to
    the sum of the magnitudes of the terms. Numbers in a row of X, or a column of Y, may differ by
    exp(3e8).

    Args:
      x: X, as numbers or as floats; batch axes are broadcast.
      y: Y.

    Returns:
      Z `[*B, I, J]`.

    Raises:
      ValueError: the shapes do not fit.

    Examples:
      >>> large = Goom(jnp.full((2, 2), 1e6), jnp.ones((2, 2), jnp.int8))
      >>> matmul(to_goom(jnp.eye(2)), large).log_abs.tolist()
      [[1000000.0, 1000000.0], [1000000.0, 1000000.0]]
    """
    x, y = as_goom(x), as_goom(y)
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-2]:
        raise ValueError(f"x {x.shape} and y {y.shape} must be [..., I, K] and [..., K, J]")
    batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    dtype = common_dtype(x.dtype, y.dtype)
    if 0 in (*x.shape, *y.shape):
        return to_goom(jnp.zeros((*batch, x.shape[-2], y.shape[-1]), dtype))
    return _matmul(x.astype(dtype), y.astype(dtype))


@jax.jit  # compiled once outside another `jit`
def _matmul(x: Goom, y: Goom) -> Goom:
    rows, columns = _largest_log(x, -1), _largest_log(y, -2)
    scaled = multiply(x, _exp(-rows)), multiply(y, _exp(-columns))
    z = product(*map(Wide.of, scaled)).goom()
    return multiply(multiply(z, _exp(rows)), _exp(columns))


def _largest_log(x: Goom, axis: int) -> Array:
    """The largest logarithm along an axis if exponents of 32 bits may not have it, otherwise 0."""
    largest = jnp.max(lax.stop_gradient(x.log_abs), axis, keepdims=True, initial=-jnp.inf)
    is_far = (jnp.abs(largest) > LARGEST_LOG) & (largest != -jnp.inf)
    return jnp.where(is_far, largest, 0)


def _exp(x: Array) -> Goom:
    return Goom(x, jnp.ones(x.shape, jnp.int8))
