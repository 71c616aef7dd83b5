"""Numbers as logarithms and signs, and their elementwise functions and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops.numerics import finite, safe_log
from heinsen_jax.typing import (
    Array,
    ArrayLike,
    Complex,
    DTypeLike,
    Float,
    common_dtype,
    pytree_dataclass,
    wide,
)


@pytree_dataclass
class Goom:
    """Real numbers x = sign exp(log_abs): generalized orders of magnitude
    (arXiv:2510.03426), with a sign in place of an imaginary part of 0 or pi.

    Gradients are of the number: the tangent of `log_abs` is dx / x, or dx where x = 0. Functions of
    this package follow this convention, so that first derivatives of real functions are right at 0
    and for both signs, where they are in the range of the dtype; other functions of `log_abs` have
    a gradient of 0 where x = 0. Infinite numbers give NaN in sums and products.

    Attributes:
      log_abs: log |x|, -inf for 0.
      sign: 1, -1, or 0 for 0, as int8.
    """

    log_abs: Array
    sign: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.log_abs.shape

    @property
    def ndim(self) -> int:
        return self.log_abs.ndim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the logarithms."""
        return self.log_abs.dtype

    def __len__(self) -> int:
        return len(self.log_abs)

    def __iter__(self) -> Iterator[Goom]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: object) -> Goom:
        return jax.tree.map(lambda x: x[index], self)

    def astype(self, dtype: DTypeLike) -> Goom:
        return Goom(self.log_abs.astype(dtype), self.sign)

    def __neg__(self) -> Goom:
        return multiply(self, Goom(jnp.zeros((), self.dtype), jnp.int8(-1)))

    def __add__(self, other: Goom | ArrayLike) -> Goom:
        return add(self, other)

    def __sub__(self, other: Goom | ArrayLike) -> Goom:
        return add(self, -as_goom(other))

    def __rsub__(self, other: ArrayLike) -> Goom:
        return add(other, -self)

    def __mul__(self, other: Goom | ArrayLike) -> Goom:
        return multiply(self, other)

    __radd__, __rmul__ = __add__, __mul__
    __array_ufunc__ = None  # NumPy's arrays leave their operators to these


class CustomJVP:
    """Function of numbers with a rule of differentiation.

    Inside, signs are floats of tangent 0: `jax.shard_map` refuses tangents of integers.
    """

    def __init__(self, function: Callable[..., Goom]):
        self._parts = jax.custom_jvp(lambda *x: _in_floats(function(*x)))

    def __call__(self, *x: Any) -> Goom:
        log_abs, sign = self._parts(*x)
        return Goom(log_abs, sign.astype(jnp.int8))

    def defjvp(self, rule: Callable[[Any, Any], tuple[Goom, Array]]) -> None:
        """Set the rule: it returns the result and the tangent of its `log_abs`."""

        @self._parts.defjvp
        def parts(primals, tangents):
            z, tangent = rule(primals, tangents)
            return _in_floats(z), (tangent, jnp.zeros_like(tangent))


def _in_floats(x: Goom) -> tuple[Array, Array]:
    return x.log_abs, x.sign.astype(x.log_abs.dtype)


def unit(x: Goom) -> Goom:
    """The unit of a tangent: the number itself, or 1 for 0."""
    is_zero = x.log_abs == -jnp.inf
    return Goom(jnp.where(is_zero, 0, x.log_abs), jnp.where(is_zero, 1, x.sign).astype(jnp.int8))


def ratio(x: Goom, y: Goom) -> Array:
    """x / y for y != 0, at most the largest finite number."""
    return signed(x.sign * y.sign, clipped_exp(x.log_abs - y.log_abs))


def signed(sign: Array, x: Array) -> Array:
    """sign x, for signs -1, 0 and 1."""
    return sign.astype(x.dtype) * x


def clipped_exp(x: Array) -> Array:
    """exp(x), but finite."""
    largest = np.log(jnp.finfo(x.dtype).max).astype(x.dtype)
    return jnp.exp(jnp.minimum(x, np.nextafter(largest, np.zeros_like(largest))))


def floats(x: Goom | ArrayLike) -> Array:
    """Real numbers in at least float32."""
    if isinstance(x, Goom):
        raise TypeError("numbers: a Goom; convert it to floats with from_goom")
    x = jnp.asarray(float(x) if isinstance(x, int) else x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"numbers: {x.dtype} is not real; from_complex takes complex logarithms")
    return x.astype(wide(x))


def as_goom(x: Goom | ArrayLike) -> Goom:
    return x if isinstance(x, Goom) else to_goom(x)


def to_goom(x: ArrayLike) -> Goom:
    """Real numbers `[*S]` as logarithms, in at least float32, and signs. JAX first converts other
    numbers to its default dtype; those beyond its normal range become infinite or 0.

    Raises:
      TypeError: x is complex, or a Goom. Other functions raise it, too.

    Examples:
      >>> to_goom(jnp.array([-1.0, 0.0])).sign.tolist()
      [-1, 0]
    """
    return _to_goom(floats(x))


@CustomJVP
def _to_goom(x: Float[Array, "*S"]) -> Goom:
    return Goom(jnp.log(jnp.abs(x)), jnp.sign(x).astype(jnp.int8))


@_to_goom.defjvp
def _to_goom_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _to_goom(x), dx / jnp.where(x == 0, 1, x)


@jax.custom_jvp
def from_goom(x: Goom) -> Float[Array, "*S"]:
    """The real numbers, infinite or 0 beyond the range of the dtype.

    Examples:
      >>> from_goom(to_goom(jnp.array([-2.0, 0.0]))).tolist()
      [-2.0, 0.0]
    """
    return signed(x.sign, jnp.exp(x.log_abs))


@from_goom.defjvp
def _from_goom_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    unit_x = unit(x)
    return from_goom(x), signed(unit_x.sign, clipped_exp(unit_x.log_abs)) * dx.log_abs


def from_complex(log_x: Complex[Array, "*S"]) -> Goom:
    """Complex logarithms of real numbers, with imaginary parts that are multiples of pi, as in the
    authors' implementation; they are rounded to the nearest multiple.

    Examples:
      >>> from_complex(jnp.array([jnp.pi * 1j])).sign.tolist()
      [-1]
    """
    log_abs = jnp.real(log_x)
    sign = 1 - 2 * (jnp.round(jnp.imag(log_x) / jnp.pi).astype(jnp.int32) % 2)
    return Goom(log_abs, jnp.where(log_abs == -jnp.inf, 0, sign).astype(jnp.int8))


def to_complex(x: Goom) -> Complex[Array, "*S"]:
    """Complex logarithms, with imaginary parts 0 or pi.

    Examples:
      >>> to_complex(to_goom(jnp.array([-1.0]))).imag.round(4).tolist()
      [3.1415998935699463]
    """
    return jax.lax.complex(x.log_abs, jnp.where(x.sign < 0, np.pi, 0).astype(x.dtype))


def add(x: Goom | ArrayLike, y: Goom | ArrayLike) -> Goom:
    """x + y, broadcast; both may also be floats.

    Examples:
      >>> total = add(Goom(jnp.array(1e4), jnp.int8(1)), Goom(jnp.array(1e4), jnp.int8(1)))
      >>> round(float(total.log_abs), 2)
      10000.69
    """
    return _add(*broadcast(x, y))


@CustomJVP
def _add(x: Goom, y: Goom) -> Goom:
    largest = finite(jnp.maximum(x.log_abs, y.log_abs))
    first, second = (signed(z.sign, jnp.exp(z.log_abs - largest)) for z in (x, y))
    return scaled(first + second, largest)


@_add.defjvp
def _add_jvp(primals, tangents):
    z = _add(*primals)
    first, second = (ratio(unit(x), unit(z)) for x in primals)
    return z, first * tangents[0].log_abs + second * tangents[1].log_abs


@CustomJVP
def _multiply(x: Goom, y: Goom) -> Goom:
    return Goom(x.log_abs + y.log_abs, x.sign * y.sign)


@_multiply.defjvp
def _multiply_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    z = _multiply(x, y)
    is_zero = z.log_abs == -jnp.inf
    from_x = jnp.where(is_zero, signed(y.sign, clipped_exp(y.log_abs)), 1)
    from_y = jnp.where(is_zero, signed(x.sign, clipped_exp(x.log_abs)), 1)
    return z, from_x * dx.log_abs + from_y * dy.log_abs


def multiply(x: Goom | ArrayLike, y: Goom | ArrayLike) -> Goom:
    """x y, broadcast; both may also be floats.

    Examples:
      >>> x = to_goom(jnp.array([1e30, -1e30]))
      >>> multiply(multiply(x, x), x).sign.tolist()
      [1, -1]
    """
    return _multiply(*broadcast(x, y))


def broadcast(x: Goom | ArrayLike, y: Goom | ArrayLike) -> tuple[Goom, Goom]:
    x, y = as_goom(x), as_goom(y)
    shape, dtype = jnp.broadcast_shapes(x.shape, y.shape), common_dtype(x.dtype, y.dtype)
    return tuple(
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape), z.astype(dtype)) for z in (x, y)
    )


def sum(x: Goom | ArrayLike, axis: int) -> Goom:
    """The sum over an axis. Terms are scaled by the largest one, to which errors are relative.

    Examples:
      >>> x = Goom(jnp.array([1e4, 1e4, 9999.0]), jnp.array([1, -1, 1], jnp.int8))
      >>> round(float(sum(x, 0).log_abs), 2)
      9999.0
    """
    return _sum(jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), as_goom(x)))


@CustomJVP
def _sum(x: Goom) -> Goom:
    """The sum over the first axis."""
    largest = finite(jnp.max(x.log_abs, 0, initial=-jnp.inf))
    total = jnp.sum(signed(x.sign, jnp.exp(x.log_abs - largest[None])), 0)
    return scaled(total, largest)


@_sum.defjvp
def _sum_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    z = _sum(x)
    unit_z = jax.tree.map(lambda leaf: leaf[None], unit(z))
    return z, jnp.sum(ratio(unit(x), unit_z) * dx.log_abs, 0)


def scaled(x: Array, exponent: Array) -> Goom:
    """x exp(exponent), for a finite exponent."""
    return Goom(jnp.log(jnp.abs(x)) + exponent, jnp.sign(x).astype(jnp.int8))


def dot(x: Goom | ArrayLike, y: Goom | ArrayLike, axis: int = -1) -> Goom:
    """The sum of x y over an axis.

    Examples:
      >>> x = to_goom(jnp.array([3.0, 4.0]))
      >>> round(float(from_goom(dot(x, x))), 4)
      25.0
    """
    return sum(multiply(x, y), axis)


def norm(x: Goom | ArrayLike, axis: int = -1) -> Goom:
    """The Euclidean norm over an axis; its gradient is 0 where it is 0.

    Examples:
      >>> round(float(from_goom(norm(to_goom(jnp.array([3.0, 4.0]))))), 4)
      5.0
    """
    x = as_goom(x)
    largest = finite(jax.lax.stop_gradient(jnp.max(x.log_abs, axis, initial=-jnp.inf)))
    squares = jnp.sum(jnp.exp(2 * (x.log_abs - jnp.expand_dims(largest, axis))), axis)
    return Goom(safe_log(squares) / 2 + largest, (squares > 0).astype(jnp.int8))
