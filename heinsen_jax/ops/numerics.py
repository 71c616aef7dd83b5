"""Log-space primitives that are right at -inf = log 0, in value and in gradient.

The sum of nothing is log 0 = -inf. There `jnp.logaddexp` and `jax.nn.logsumexp` have the right
value but, where every term is -inf, a NaN gradient; here that gradient is 0. Each function has a
derivative rule of its own in terms of the *share* of a term in its sum, exp(term - total) <= 1, so
no derivative overflows.
"""

from functools import partial

import jax
import jax.numpy as jnp

from heinsen_jax.typing import Array, Float, typed


def share(term: Array, total: Array) -> Array:
    """exp(term - total): the part of a log-space total that a term makes up; 0 of an empty one."""
    return jnp.exp(term - where_empty(total, jnp.inf))


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


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def log_sum_exp(x: Array, axis: int) -> Array:
    """log(sum(exp(x))) over one axis; -inf where that axis is empty or holds nothing but -inf."""
    largest = where_empty(jnp.max(x, axis, keepdims=True, initial=-jnp.inf), 0.0)
    return jnp.log(jnp.sum(jnp.exp(x - largest), axis)) + jnp.squeeze(largest, axis)


@log_sum_exp.defjvp
def _log_sum_exp_jvp(axis, primals, tangents):
    (x,), (dx,) = primals, tangents
    total = log_sum_exp(x, axis)
    return total, jnp.sum(share(x, jnp.expand_dims(total, axis)) * dx, axis)


@jax.custom_jvp
def safe_log(x: Array) -> Array:
    """log x, with derivative 0, not infinite, at x = 0."""
    return jnp.log(x)


@safe_log.defjvp
def _safe_log_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return safe_log(x), jnp.where(x == 0, 0.0, dx / jnp.where(x == 0, 1, x))


def log_difference(log_numerator: Array, log_denominator: Array) -> Array:
    """log(n / d). Of n = 0 it is log 0 = -inf, with gradient 0, also if d = 0: an average over
    nothing."""
    empty = log_numerator == -jnp.inf
    return jnp.where(empty, -jnp.inf, log_numerator - jnp.where(empty, 0.0, log_denominator))


@jax.custom_vjp
@typed
def log_matmul(
    x: Float[Array, "*batch I K"], y: Float[Array, "*batch K J"]
) -> Float[Array, "*batch I J"]:
    """log(exp(x) exp(y)): LSE_k(x_ik + y_kj).

    Exact for any finite input, and -inf where a sum holds nothing but -inf. Backward forms the
    terms `[*batch, I, K, J]` again: they are not kept.
    """
    return log_sum_exp(x[..., :, :, None] + y[..., None, :, :], x.ndim - 1)


def _log_matmul_forward(x, y):
    total = log_matmul(x, y)
    return total, (x, y, total)


def _log_matmul_backward(saved, cotangent):
    x, y, total = saved
    shares = share(x[..., :, :, None] + y[..., None, :, :], total[..., :, None, :])
    terms = shares * cotangent[..., :, None, :]
    return jnp.sum(terms, -1), jnp.sum(terms, -3)


log_matmul.defvjp(_log_matmul_forward, _log_matmul_backward)


def signed_log_difference(x: Array, y: Array) -> tuple[Array, Array]:
    """log|exp(x) - exp(y)|, and whether the difference is negative. Of equals it is log 0 = -inf,
    with gradient 0."""
    equal = x == y
    largest = jnp.where(equal, 0.0, jnp.maximum(x, y))
    gap = jnp.where(equal, -1.0, jnp.minimum(x, y) - largest)
    return jnp.where(equal, -jnp.inf, largest + jnp.log(-jnp.expm1(gap))), y > x
