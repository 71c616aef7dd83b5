"""Log-space primitives that are right at -inf = log 0, in value and in gradient.

The sum of nothing is log 0 = -inf. There `jnp.logaddexp` and `jax.nn.logsumexp` have the right
value but, where every term is -inf, a NaN gradient; here that gradient is 0. Derivatives are formed
from the *share* of a term in its sum, exp(term - total) <= 1, so they do not overflow.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.typing import Array, Float, typed

# GPUs and TPUs would multiply float32 as TF32 or bfloat16.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def share(term: Array, total: Array) -> Array:
    """exp(term - total): the part of a log-space total that a term makes up; 0 of an empty one."""
    return jnp.exp(term - finite(total))


def finite(x: Array) -> Array:
    """x, with -inf replaced by the lowest finite number, so that -inf minus it is -inf, not NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def where_empty(x: Array, substitute: float) -> Array:
    """x, with log 0 = -inf replaced: keeps a later difference of two -inf from being NaN."""
    return jnp.where(x == -jnp.inf, substitute, x)


@jax.custom_jvp
def log_add_exp(x: Array, y: Array) -> Array:
    """log(exp(x) + exp(y)), elementwise."""
    return jnp.logaddexp(x, y)


@log_add_exp.defjvp
def _log_add_exp_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    total = log_add_exp(x, y)
    return total, share(x, total) * dx + share(y, total) * dy


@jax.custom_jvp
def safe_log(x: Array) -> Array:
    """log x, with derivative 0, not infinite, at x = 0."""
    return jnp.log(x)


@safe_log.defjvp
def _safe_log_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return safe_log(x), jnp.where(x == 0, 0.0, dx / jnp.where(x == 0, 1, x))


def log_sum_exp(x: Array, axis: int) -> Array:
    """log(sum(exp(x))) over one axis; -inf where that axis is empty or holds nothing but -inf."""
    largest = lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))
    total = jnp.sum(share(x, largest), axis)
    return safe_log(total) + finite(jnp.squeeze(largest, axis))


class Softmax(NamedTuple):
    """A softmax over one axis: weights, their logarithms, and log_sum_exp of what they are of.

    Where all of that is -inf, or nothing, weights are 0."""

    weights: Array
    log_weights: Array
    log_z: Array


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x: Array, axis: int) -> Softmax:
    """exp(x - log Z), x - log Z and log Z, each relative to the largest x: weights sum up to 1
    however large log Z is."""
    largest = jnp.max(x, axis, keepdims=True)
    relative = x - finite(largest)
    log_total = jnp.log(jnp.sum(jnp.exp(relative), axis, keepdims=True))
    log_weights = relative - finite(log_total)
    return Softmax(jnp.exp(log_weights), log_weights, jnp.squeeze(log_total + largest, axis))


@softmax.defjvp
def _softmax_jvp(axis, primals, tangents):
    (x,), (dx,) = primals, tangents
    result = softmax(x, axis)
    d_log_z = jnp.sum(result.weights * dx, axis, keepdims=True)
    d_log_weights = dx - d_log_z
    d_weights = result.weights * d_log_weights
    return result, Softmax(d_weights, d_log_weights, jnp.squeeze(d_log_z, axis))


def log_difference(log_numerator: Array, log_denominator: Array) -> Array:
    """log(n / d). Of n = 0 it is log 0 = -inf, with gradient 0, also if d = 0: an average over
    nothing."""
    empty = log_numerator == -jnp.inf
    return jnp.where(empty, -jnp.inf, log_numerator - jnp.where(empty, 0.0, log_denominator))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """factor * exp(exponent): a sum beyond the range of floating point, without its logarithm.

    The exponent is about the largest term's, -inf of an empty sum, and has no gradient: all of it
    flows through the factor. It broadcasts to the factor.
    """

    factor: Array
    exponent: Array

    @staticmethod
    def exp(x: Array, axis: int | None = None) -> "Scaled":
        """exp(x), with one exponent for all along an axis, or else one each."""
        exponent = lax.stop_gradient(x if axis is None else jnp.max(x, axis, keepdims=True))
        return Scaled(share(x, exponent), exponent)

    def sum(self, axis: int) -> "Scaled":
        """Over an axis along which the exponent is one."""
        return Scaled(jnp.sum(self.factor, axis, keepdims=True), self.exponent)

    def at(self, exponent: Array) -> Array:
        """The factor that goes with another exponent, not less than this one's."""
        return self.factor * share(self.exponent, exponent)

    def __add__(self, other: "Scaled") -> "Scaled":
        exponent = jnp.maximum(self.exponent, other.exponent)
        return Scaled(self.at(exponent) + other.at(exponent), exponent)

    def log(self) -> Array:
        return safe_log(self.factor) + finite(self.exponent)


@typed
def log_matmul(
    x: Float[Array, "*batch I K"], y: Float[Array, "*batch K J"]
) -> Float[Array, "*batch I J"]:
    """log(exp(x) exp(y)): LSE_k(x_ik + y_kj). Exact as `scaled_matmul` is."""
    return scaled_matmul(x, y).log()


@typed
def log_average(
    softmax: Softmax, log_value: Float[Array, "*batch K J"]
) -> Float[Array, "*batch I J"]:
    """log(weights exp(log_value)), of a softmax over the last axis; exact as `scaled_matmul` is."""
    empty = jnp.where(softmax.log_z == -jnp.inf, -jnp.inf, 0.0)[..., None]
    return scaled_matmul(softmax.log_weights, log_value, Scaled(softmax.weights, empty)).log()


@typed
def scaled_matmul(
    x: Float[Array, "*batch I K"], y: Float[Array, "*batch K J"], exp_x: Scaled | None = None
) -> Scaled:
    """exp(x) exp(y), exact for any finite input and 0 where a sum holds nothing but -inf.

    A matrix product, with rows of x and columns of y relative to their largest; where one of its
    sums comes out too small for that to be exact, or where it saves little, all of them are formed
    term by term. `exp_x` is exp(x) if that is known, with one exponent for each row. Has
    reverse-mode derivatives only.
    """
    if x.shape[-2] * y.shape[-1] <= 2 * (x.shape[-2] + y.shape[-1]):
        sums = Scaled.exp(_terms(x, y), -2).sum(-2)
        return jax.tree.map(lambda x: jnp.squeeze(x, -2), sums)
    rows = Scaled.exp(x, -1) if exp_x is None else exp_x
    factor, exponent = _scaled_matmul(x, y, lax.stop_gradient(rows))
    return Scaled(factor, lax.stop_gradient(exponent))


@jax.custom_vjp
def _scaled_matmul(x: Array, y: Array, rows: Scaled) -> tuple[Array, Array]:
    return _scaled_matmul_forward(x, y, rows)[0]


def _scaled_matmul_forward(x, y, rows):
    columns = Scaled.exp(y, -2)
    product = matmul(rows.factor, columns.factor)
    exponent = rows.exponent + columns.exponent
    # Terms smaller than normal numbers are lost: less than the square root of that, relatively.
    excess = math.sqrt(jnp.finfo(x.dtype).smallest_normal) - product
    way = first_safe(jnp.max(jnp.where(exponent == -jnp.inf, 0.0, excess), initial=0.0)[None])

    def by_terms(x, y):
        terms = _terms(x, y)
        largest = jnp.max(terms, -2)
        return jnp.sum(share(terms, largest[..., None, :]), -2), largest

    result = lax.switch(way, (lambda *_: (product, exponent), by_terms), x, y)
    return result, (x, y, way, rows.factor, columns.factor, result[1])


def _scaled_matmul_backward(saved, cotangents):
    x, y, way, rows, columns, exponent = saved

    def of_product(_x, _y, _exponent, cotangent):
        d_x = rows * matmul(cotangent, jnp.swapaxes(columns, -1, -2))
        return d_x, columns * matmul(jnp.swapaxes(rows, -1, -2), cotangent)

    def of_terms(x, y, exponent, cotangent):
        d_terms = share(_terms(x, y), exponent[..., None, :]) * cotangent[..., None, :]
        return jnp.sum(d_terms, -1), jnp.sum(d_terms, -3)

    d_x, d_y = lax.switch(way, (of_product, of_terms), x, y, exponent, cotangents[0])
    return d_x, d_y, None


_scaled_matmul.defvjp(_scaled_matmul_forward, _scaled_matmul_backward)


def _terms(x: Array, y: Array) -> Array:
    return x[..., :, :, None] + y[..., None, :, :]


def signed_log_difference(x: Array, y: Array) -> tuple[Array, Array]:
    """log|exp(x) - exp(y)|, and whether the difference is negative. Of equals it is log 0 = -inf,
    with gradient 0."""
    equal = x == y
    largest = jnp.where(equal, 0.0, jnp.maximum(x, y))
    gap = jnp.where(equal, -1.0, jnp.minimum(x, y) - largest)
    return jnp.where(equal, -jnp.inf, largest + jnp.log(-jnp.expm1(gap))), y > x


def reciprocal(x: Array) -> Array:
    """1 / x, and 0 of 0."""
    return jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1, x))
