"""Log-space primitives that are right at -inf = log 0, in value and in gradient.

The sum of nothing is log 0 = -inf. There `jnp.logaddexp` and `jax.nn.logsumexp` have the right
value but, where every term is -inf, a NaN gradient; here that gradient is 0. Each function has a
derivative rule of its own in terms of the *share* of a term in its sum, exp(term - total) <= 1, so
no derivative overflows.
"""

from functools import partial

import jax
import jax.numpy as jnp

from heinsen_jax.typing import Array


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


def log_difference(log_numerator: Array, log_denominator: Array) -> Array:
    """log(n / d), where 0 / 0 counts as 0: an average over nothing."""
    return log_numerator - where_empty(log_denominator, 0.0)
