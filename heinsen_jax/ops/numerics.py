"""Log-space primitives with correct values and gradients at -inf = log 0.

An empty sum is log 0 = -inf. If every term is -inf, `jnp.logaddexp` and `jax.nn.logsumexp` return
the right value but a NaN gradient; here that gradient is 0. Derivatives are formed from the *share*
of a term in its sum, which is at most 1, so they do not overflow. Shares are computed relative to
the largest term and divided by their sum: exp(term - total) would depend on the rounding of a large
total, and equal terms of 1e8 would each have a share of 1.
"""

import math
from collections.abc import Callable
from functools import partial, reduce, wraps
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import is_symbolic
from heinsen_jax.typing import Array, DTypeLike, Float, pytree_dataclass

# Maximum number of terms in memory in a backward pass: 2 MiB of float32, which fits a CPU's cache;
# or 1 GiB.
TERMS = 2**19
TERMS_ELSEWHERE = 2**28
MAX_TERMS = 1 << 21  # of `running_sums`

# GPUs and TPUs would multiply float32 as TF32 or bfloat16.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def share(term: Array, total: Array) -> Array:
    """exp(term - total): the share of a term in a log-space total; 0 if the total is -inf."""
    # Beyond these limits exp is 0 or infinite anyway, so clipping changes no result. It keeps XLA's
    # CPU backend from unrolling short loops, which costs five times the time of compilation.
    difference = term - finite(total)
    limit = np.asarray(2 * math.log(jnp.finfo(difference.dtype).max), difference.dtype)
    return jnp.exp(lax.clamp(-limit, difference, limit))


@share.defjvp
def _share_jvp(primals, tangents):
    y = share(*primals)
    return y, y * (tangents[0] - tangents[1])


def finite(x: Array) -> Array:
    """Replace -inf by the lowest finite number, so that -inf minus it is -inf, not NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def where_empty(x: Array, substitute: float) -> Array:
    """Replace log 0 = -inf, so that a later difference of two -inf is not NaN."""
    return jnp.where(x == -jnp.inf, substitute, x)


@jax.custom_jvp
def log_add_exp(x: Array, y: Array) -> Array:
    """log(exp(x) + exp(y)), elementwise."""
    return jnp.logaddexp(x, y)


@log_add_exp.defjvp
def _log_add_exp_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    x_exp, y_exp, total = _exps_of_pair(x, y)
    return log_add_exp(x, y), (x_exp * dx + y_exp * dy) / total


def _exps_of_pair(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Exponentials relative to the larger one, and their sum, or 1 if both are 0."""
    largest = jnp.maximum(x, y)
    exps = share(x, largest), share(y, largest)
    return *exps, jnp.maximum(exps[0] + exps[1], 1)


@jax.custom_jvp
def safe_log(x: Array) -> Array:
    """log x, with derivative 0, not infinite, at x = 0."""
    return jnp.log(x)


@safe_log.defjvp
def _safe_log_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return safe_log(x), jnp.where(x == 0, 0.0, dx / jnp.where(x == 0, 1, x))


def log_sum_exp(x: Array, axis: int) -> Array:
    """log(sum(exp(x))) over one axis; -inf if the axis is empty or all its terms are -inf."""
    largest = lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))
    total = jnp.sum(share(x, largest), axis)
    return safe_log(total) + finite(jnp.squeeze(largest, axis))


class Softmax(NamedTuple):
    """One softmax over an axis of several arrays, as if they were concatenated: weights and their
    logarithms by array, and log_sum_exp of all inputs. Weights are 0 if all inputs are -inf."""

    weights: tuple[Array, ...]
    log_weights: tuple[Array, ...]
    log_z: Array


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(parts: tuple[Array, ...], axis: int) -> Softmax:
    """Return exp(x - log Z) and x - log Z for each array x, and log Z of all along the axis,
    computed relative to the largest x, so that weights sum to 1 whatever the size of log Z."""
    initials = (-jnp.inf if x.shape[axis] == 0 else None for x in parts)
    each = (
        jnp.max(x, axis, keepdims=True, initial=initial)
        for x, initial in zip(parts, initials, strict=True)
    )
    largest = reduce(jnp.maximum, each)
    exps = [share(x, largest) for x in parts]
    total = reduce(jnp.add, [jnp.sum(x, axis) for x in exps])
    log_total, inverse = jnp.log(total), jnp.expand_dims(reciprocal(total), axis)
    offset = jnp.expand_dims(finite(log_total), axis)
    return Softmax(
        tuple(x * inverse for x in exps),
        tuple(x - finite(largest) - offset for x in parts),
        log_total + jnp.squeeze(largest, axis),
    )


@softmax.defjvp
def _softmax_jvp(axis, primals, tangents):
    (parts,), (d_parts,) = primals, tangents
    result = softmax(parts, axis)
    products = [w * d for w, d in zip(result.weights, d_parts, strict=True)]
    d_log_z = reduce(jnp.add, [jnp.sum(x, axis, keepdims=True) for x in products])
    d_log_weights = tuple(d - d_log_z for d in d_parts)
    d_weights = tuple(w * d for w, d in zip(result.weights, d_log_weights, strict=True))
    return result, Softmax(d_weights, d_log_weights, jnp.squeeze(d_log_z, axis))


@jax.custom_jvp
def softmax_pair(x: Array, y: Array) -> Softmax:
    """`softmax` of two arrays of one shape, element by element: the weights exp(x) / (exp(x) +
    exp(y)) and exp(y) / (exp(x) + exp(y)), both 0 if both inputs are -inf."""
    largest, (x_exp, y_exp, total) = jnp.maximum(x, y), _exps_of_pair(x, y)
    scale, log_total = finite(largest), jnp.log1p(jnp.minimum(x_exp, y_exp))
    return Softmax(
        (x_exp / total, y_exp / total),
        (x - scale - log_total, y - scale - log_total),
        log_total + largest,
    )


@softmax_pair.defjvp
def _softmax_pair_jvp(primals, tangents):
    result, (dx, dy) = softmax_pair(*primals), tangents
    x_weight, y_weight = result.weights
    difference = dx - dy
    d_log_weights = y_weight * difference, -x_weight * difference
    d_weights = x_weight * d_log_weights[0], y_weight * d_log_weights[1]
    return result, Softmax(d_weights, d_log_weights, x_weight * dx + y_weight * dy)


@pytree_dataclass
class Scaled:
    """Number factor * exp(exponent): a sum beyond the range of floating point.

    The exponent is close to the largest term's, -inf for an empty sum, and broadcasts to the
    factor. It has no gradient: gradients flow through the factor alone.
    """

    factor: Array
    exponent: Array

    @staticmethod
    def exp(x: Array, axis: int) -> "Scaled":
        """Return exp(x), with a common exponent along one axis."""
        exponent = lax.stop_gradient(jnp.max(x, axis, keepdims=True))
        return Scaled(share(x, exponent), exponent)

    def sum(self, axis: int) -> "Scaled":
        """Sum over an axis with a common exponent."""
        return Scaled(jnp.sum(self.factor, axis), jnp.squeeze(self.exponent, axis))

    def log(self) -> Array:
        return safe_log(self.factor) + finite(self.exponent)

    def or_by_terms(self, x: Array, y: Array, added: Array | None = None) -> "Scaled":
        """exp(x) exp(y) + exp(added), for x `[..., I, K]`, y `[..., K, J]` and added `[..., I, J]`.

        Equals self, which is computed by matrix products, but sums are recomputed term by term if
        one of them is too small to be exact. Supports reverse-mode derivatives only.
        """
        factor, exponent = _or_by_terms(self.factor, self.exponent, x, y, added)
        return Scaled(factor, lax.stop_gradient(exponent))


def smallest_sum(dtype: DTypeLike) -> float:
    """Smallest exact sum of products of exponentials that are at most 1.

    Terms below the smallest normal number are flushed to 0: each is then a relative error of less
    than eps^1.5.
    """
    info = jnp.finfo(dtype)
    return float(info.smallest_normal) / float(info.eps) ** 1.5


def in_units(function: Callable[..., Array]) -> Callable[..., Array]:
    """Scale cotangents in the backward pass, so that logarithms of small sums do not overflow it.

    With the cotangent d `[*batch, I, J]` of the result, and its largest magnitude u per batch, the
    cotangents of the arguments `[*batch, ...]` are u pullback(d / u), equal to pullback(d).
    """

    @jax.custom_vjp
    @wraps(function)
    def scaled(*arguments: Array) -> Array:
        return function(*arguments)

    def backward(pullback: Callable[[Array], tuple[Array, ...]], d_result: Array):
        largest = jnp.max(jnp.abs(d_result), (-2, -1), initial=0, keepdims=True)
        unit = jnp.where(largest == 0, 1, largest)
        return tuple(unit * d_argument for d_argument in pullback(d_result / unit))

    scaled.defvjp(partial(jax.vjp, function), backward)
    return scaled


@in_units
def log_scores(
    query: Float[Array, "*batch I K"], key: Float[Array, "*batch J K"]
) -> Float[Array, "*batch I J"]:
    """log(exp(Q) exp(K)^T): LSE_k(Q_ik + K_jk), exact for any finite input; -inf if all terms are.

    A matrix product of rows relative to their largest element; if one of its sums is too small to
    be exact, or if the product saves little, all sums are computed term by term. Supports
    reverse-mode derivatives only.
    """
    (size, sources), transposed = (query.shape[-2], key.shape[-2]), jnp.swapaxes(key, -1, -2)
    if size * sources <= 2 * (size + sources):
        return Scaled.exp(_terms(query, transposed), -2).sum(-2).log()
    rows = Scaled.exp(query, -1)
    columns = jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), Scaled.exp(key, -1))
    product = Scaled(matmul(rows.factor, columns.factor), rows.exponent + columns.exponent)
    return product.or_by_terms(query, transposed).log()


@jax.custom_vjp
def _or_by_terms(sums: Array, exponent: Array, x: Array, y: Array, added: Array | None):
    return _or_by_terms_forward(sums, exponent, x, y, added)[0]


def _or_by_terms_forward(sums, exponent, x, y, added):
    excess = smallest_sum(sums.dtype) - sums
    way = first_safe(jnp.max(jnp.where(exponent == -jnp.inf, 0.0, excess), initial=0.0)[None])

    def by_terms():
        largest = jnp.max(_terms(x, y), -2)
        if added is not None:
            largest = jnp.maximum(largest, added)
        # Without the barrier, XLA would compute the terms once and store them for both reductions.
        terms = _terms(*lax.optimization_barrier((x, y)))
        total = jnp.sum(share(terms, largest[..., None, :]), -2)
        return total if added is None else total + share(added, largest), largest

    result = lax.switch(way, (lambda: (sums, jnp.broadcast_to(exponent, sums.shape)), by_terms))
    return result, (way, x, y, added, result[1])


def _or_by_terms_backward(saved, cotangents):
    way, x, y, added, exponent = saved
    d_sums, _ = cotangents

    def sums_pullback():
        return d_sums, *jax.tree.map(jnp.zeros_like, (x, y, added))

    def terms_pullback():
        d_x, d_y = _terms_backward(x, y, exponent, d_sums)
        d_added = None if added is None else share(added, exponent) * d_sums
        return jnp.zeros_like(d_sums), d_x, d_y, d_added

    d_sums, *d_terms = lax.switch(way, (sums_pullback, terms_pullback))
    return d_sums, None, *d_terms


def _terms_backward(x: Array, y: Array, exponent: Array, d_sums: Array) -> tuple[Array, Array]:
    """Return the cotangents of x and y, computed for a few matrices of the batch at a time: at most
    `TERMS` terms, or one matrix."""

    def part_cotangents(part: tuple[Array, ...]) -> tuple[Array, Array]:
        x, y, exponent, d_sums = part
        d_terms = share(_terms(x, y), exponent[..., None, :]) * d_sums[..., None, :]
        return jnp.sum(d_terms, -1), jnp.sum(d_terms, -3)

    max_terms = TERMS if jax.default_backend() == "cpu" else TERMS_ELSEWHERE
    number, terms = math.prod(x.shape[:-2]), y.shape[-1] * math.prod(x.shape[-2:])
    size = 1
    if not is_symbolic(number * terms):
        sizes = (size for size in range(1, number + 1) if number % size == 0)
        size = max((size for size in sizes if size * terms <= max_terms), default=min(number, 1))
    if size == number:
        return part_cotangents((x, y, exponent, d_sums))

    def split(m: Array) -> Array:  # every n-th matrix, which stays on its device
        return jnp.swapaxes(m.reshape(size, -1, *m.shape[-2:]), 0, 1)

    parts = lax.map(part_cotangents, tuple(split(m) for m in (x, y, exponent, d_sums)))
    d_x, d_y = (jnp.swapaxes(part, 0, 1) for part in parts)
    return d_x.reshape(x.shape), d_y.reshape(y.shape)


_or_by_terms.defvjp(_or_by_terms_forward, _or_by_terms_backward)


def _terms(x: Array, y: Array) -> Array:
    return x[..., :, :, None] + y[..., None, :, :]


def signed_log_difference(x: Array, y: Array) -> tuple[Array, Array]:
    """Return log|exp(x) - exp(y)|, and whether the difference is negative. For x = y it is log 0 =
    -inf, with gradient 0."""
    equal = x == y
    largest = jnp.where(equal, 0.0, jnp.maximum(x, y))
    gap = jnp.where(equal, -1.0, jnp.minimum(x, y) - largest)
    return jnp.where(equal, -jnp.inf, largest + jnp.log(-jnp.expm1(gap))), y > x


@jax.custom_jvp
def reciprocal(x: Array) -> Array:
    """1 / x, at most 1 / the smallest normal number; 0, with derivative 0, for x = 0."""
    return jnp.sign(x) / jnp.maximum(jnp.abs(x), jnp.finfo(x.dtype).smallest_normal)


@reciprocal.defjvp
def _reciprocal_jvp(primals, tangents):
    y = reciprocal(*primals)
    return y, -y * (y * tangents[0])


def split_exact(x: Array, quantum: float) -> Array:
    """Split x into two parts `[2, ...]` that add up to it.

    The first has multiples of a power of two, whose sums are exact while they fit into the bits of
    the dtype, without gradient; the second has the rests, at most half of that power.
    """
    coarse = lax.stop_gradient(quantum * jnp.round(x / quantum))
    return jnp.stack([coarse, x - coarse])


def running_sums(x: Array, axis: int, quantum: float) -> tuple[Array, Array, Array]:
    """Return running sums of x <= 0 as the sums of two arrays, without gradient; and the rests of
    at most half a quantum, whose sums are not taken.

    The arrays are multiples of 2^24 quanta, and multiples of the quantum below that; differences
    of each are exact in float32, and so is their sum if it is below 2^24 quanta. The quantum is a
    power of two. Values below `smallest_term` are clipped to it. For at most 2^21 terms.
    """
    if not is_symbolic(x.shape[axis]) and x.shape[axis] > MAX_TERMS:
        raise NotImplementedError(
            f"decays of {x.shape[axis]:,} tokens: they are summed for at most {MAX_TERMS:,}; split "
            "the sequence"
        )
    x = jnp.maximum(x, smallest_term(x.shape[axis], quantum))
    coarse = lax.stop_gradient(jnp.round(x / quantum))
    units = coarse.astype(jnp.int32)
    # Integers wrap around; sums of up to 2^21 low parts, and of the high ones, do not.
    low = jnp.cumsum(units & 0x3FF, axis, dtype=jnp.int32)
    high = jnp.cumsum(units >> 10, axis, dtype=jnp.int32) + (low >> 10)
    small = ((high & 0x3FFF) << 10) | (low & 0x3FF)
    return (
        (2.0**24 * quantum) * (high >> 14).astype(x.dtype),
        quantum * small.astype(x.dtype),
        x - quantum * coarse,
    )


def smallest_term(length: int, quantum: float) -> float:
    """Return the least value that `running_sums` over this length represents."""
    length = MAX_TERMS if is_symbolic(length) else length
    return -quantum * min(2.0**30, 2.0**40 / max(length, 1))


def divide_or_zero(numerator: Array, total: Array) -> Array:
    """numerator / total; 0, without gradient, if the total is too small to divide by."""
    limits = jnp.finfo(total.dtype)
    nothing = jnp.abs(total) <= limits.smallest_normal / limits.eps
    return jnp.where(nothing, 0, numerator / jnp.where(nothing, 1, total))
