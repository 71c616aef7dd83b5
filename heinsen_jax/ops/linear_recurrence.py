"""First-order linear recurrences over time, in linear and in log space, as blocked scans.

Written with cumulative sums of log coefficients (Heinsen, 2023, arXiv:2311.06281), the log-space
recurrence suffers from cancellation over long sequences; these forms never subtract. T tokens are
split into about sqrt(T) chunks of sqrt(T): one scan processes all chunks in parallel, another one
carries their results from chunk to chunk. This needs 2 sqrt(T) steps, with rounding errors that
grow no faster, and a program of constant size, whereas `lax.associative_scan` unrolls log2(T)
levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.devices import split_like
from heinsen_jax.ops.layout import equally_varying
from heinsen_jax.ops.numerics import (
    Softmax,
    finite,
    log_add_exp,
    log_sum_exp,
    share,
    softmax_pair,
    where_empty,
)
from heinsen_jax.typing import Array, Float, common_dtype, pytree_dataclass


@partial(jax.jit, static_argnames="axis")  # compiled once outside another `jit`
def linear_recurrence(
    coefficients: Float[Array, "*C"],
    inputs: Float[Array, "*B"],
    *,
    initial: Float[Array, "*_"] | None = None,
    axis: int = -2,
) -> Float[Array, "*B"]:
    """Compute x_t = a_t x_{t-1} + b_t for all t.

    Args:
      coefficients: a, broadcastable to the shape of `inputs`, but with the full time axis.
      inputs: b `[..., T, D]`, with time on `axis`.
      initial: x_0 `[..., D]`; zero when None.
      axis: the time axis of `coefficients` and `inputs`.

    Returns:
      x `[..., T, D]`.

    Raises:
      ValueError: the shapes do not fit.
    """
    coefficients, inputs = _aligned(axis, coefficients=coefficients, inputs=inputs)
    length = inputs.shape[axis]
    if length == 0:
        return inputs
    a, b = _chunks(coefficients, axis), _chunks(inputs, axis)
    if initial is None:
        initial = jnp.zeros_like(b[0, 0])

    def step(x: Array, ab: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = ab
        return a * x + b, a * x + b

    def multiply(product: Array, a: Array) -> tuple[Array, Array]:
        return a * product, a * product

    # Products need a separate scan: a scan can be transposed only if its whole carry is linear.
    product = _join(a[0], _later(multiply, a[0], a[1:]))
    x = _join(b[0], _later(step, b[0], (a[1:], b[1:])))
    initial = jnp.broadcast_to(initial, b.shape[2:])
    ends = product[-1], x[-1]
    first = ends[0][0] * initial + ends[1][0]
    after = _later(step, first, (ends[0][1:-1], ends[1][1:-1]))
    before = _join(initial, _join(first, after)[: x.shape[1] - 1])
    return _join_chunks(x + product * before[None], length, axis)


def log_linear_recurrence(
    log_coefficients: Float[Array, "*_"],
    log_inputs: Float[Array, "*B"],
    *,
    initial: Float[Array, "*_"] | None = None,
    axis: int = -2,
) -> Float[Array, "*B"]:
    """Compute h_t = logaddexp(log a_t + h_{t-1}, log b_t), the log of `linear_recurrence`.

    Sums are represented as pairs (largest term, sum relative to it) until the end, which loses less
    to rounding than a tree of logaddexp. Coefficients and inputs may be -inf = log 0.

    Args:
      log_coefficients: log a, broadcastable to the shape of `log_inputs`, but with the full time
        axis.
      log_inputs: log b `[..., T, D]`, with time on `axis`.
      initial: h_0 `[..., D]`; log 0 = -inf when None.
      axis: the time axis of `log_coefficients` and `log_inputs`.

    Returns:
      h `[..., T, D]`.

    Raises:
      ValueError: the shapes do not fit.

    Examples:
      >>> log_two, log_one = jnp.full((3, 1), jnp.log(2)), jnp.zeros((3, 1))
      >>> jnp.exp(log_linear_recurrence(log_two, log_one)).ravel().round().tolist()
      [1.0, 3.0, 7.0]
    """
    log_coefficients, log_inputs = _aligned(
        axis, log_coefficients=log_coefficients, log_inputs=log_inputs
    )
    if log_inputs.shape[axis] == 0:
        return log_inputs
    first = lax.index_in_dim(log_inputs, 0, axis, keepdims=False)
    initial = jnp.asarray(-jnp.inf, log_inputs.dtype) if initial is None else initial
    initial = split_like(jnp.broadcast_to(initial, first.shape), first, first.ndim)
    arguments = log_coefficients, log_inputs, initial
    log_coefficients, log_inputs, initial = equally_varying(arguments)
    return _log_total(axis, log_coefficients, log_inputs, initial)


def convex_recurrence(
    log_coefficients: Float[Array, "*_"],
    log_inputs: Float[Array, "*B"],
    initial: Float[Array, "*_"],
    axis: int,
) -> Softmax:
    """`log_linear_recurrence` h `[..., T, D]` as `log_z`, and the shares of the two terms of every
    step: log weights log a_t + h_{t-1} - h_t and log b_t - h_t, and their exponentials.

    They are computed before h is rounded: equal terms of 1e8 have shares of 1/2, although log 2 is
    less than the spacing of floats there. The initial state is `[..., D]`.
    """
    parts = _log_linear_recurrence(axis, log_coefficients, log_inputs, initial)
    shares = _shares(axis, parts, log_coefficients, log_inputs, initial)
    return shares._replace(log_z=_total(parts))


def decay_to_end(log_decay: Array, axis: int) -> Array:
    """Return the sum of the log decays after each token along `axis`, 0 at the last one. They may
    be -inf."""
    steps = jnp.moveaxis(log_decay, axis, 0)
    later = jnp.concatenate([steps[1:], jnp.zeros_like(steps[:1])])
    return jnp.moveaxis(lax.cumsum(later, reverse=True), 0, axis)


@pytree_dataclass
class RecurrenceState:
    """State of a log-linear recurrence.

    Attributes:
      log_decay: sum of the log coefficients of its tokens `[..., D]`, by which earlier states
        decay.
      h: value of the recurrence after its tokens, starting from log 0 `[..., D]`.
    """

    log_decay: Float[Array, "*B D"]
    h: Float[Array, "*B D"]

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: Any = jnp.float32) -> RecurrenceState:
        """Return the state of no tokens: h is log 0 = -inf."""
        return cls(jnp.zeros(shape, dtype), jnp.full(shape, -jnp.inf, dtype))

    @classmethod
    def begun(cls, h: Array) -> RecurrenceState:
        """Return the state before the first token, given h_0."""
        return cls(jnp.zeros_like(h), h)

    @classmethod
    def of(cls, log_coefficients: Array, log_inputs: Array) -> RecurrenceState:
        """Return the state of tokens `[..., T, D]`."""
        kept = decay_to_end(log_coefficients, -2)
        return cls(jnp.sum(log_coefficients, -2), log_sum_exp(log_inputs + kept, -2))

    def merge(self, other: RecurrenceState) -> RecurrenceState:
        """Return the state of these tokens followed by the tokens of `other`."""
        h = log_add_exp(self.h + other.log_decay, other.h)
        return RecurrenceState(self.log_decay + other.log_decay, h)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_linear_recurrence(axis, log_a, log_b, initial):
    length = log_b.shape[axis]
    if length == 0:
        return log_b, jnp.zeros_like(log_b)
    a, b = _chunks(log_a, axis), _chunks(log_b, axis, -jnp.inf)

    def within(before, ab):
        (log_product, *total), (a, b) = before, ab
        after = log_product + a, *_add(total, a, (b, jnp.ones_like(b)))
        return after, after

    def across(before, block):
        log_product, *total = block
        after = _add(before, log_product, total)
        return after, after

    first = a[0], b[0], jnp.ones_like(b[0])
    later = _later(within, first, (a[1:], b[1:]))
    log_product, *total = jax.tree.map(_join, first, later)
    initial = jnp.broadcast_to(initial, b.shape[2:])
    initial = initial, jnp.ones_like(initial)
    ends = log_product[-1], *(x[-1] for x in total)
    first = _add(initial, ends[0][0], [x[0] for x in ends[1:]])
    later = _later(across, first, tuple(x[1:-1] for x in ends))
    before = jax.tree.map(
        lambda i, f, x: _join(i, _join(f, x)[: b.shape[1] - 1])[None], initial, first, tuple(later)
    )
    largest, total = _add(before, log_product, total)
    return _join_chunks(largest, length, axis), _join_chunks(jnp.log(total), length, axis)


def _later(step: Callable[..., Any], first: Any, rest: Array | tuple[Array, ...]) -> Any:
    """The results of the steps after the first."""
    if jax.tree.leaves(rest)[0].shape[0] == 0:  # `jax.disable_jit` refuses scans of no steps
        return jax.tree.map(lambda x: x[None][:0], first)
    return lax.scan(step, first, rest)[1]


@partial(jax.jit, static_argnums=0)
def _log_total(axis: int, log_a: Array, log_b: Array, initial: Array) -> Array:
    return _total(_log_linear_recurrence(axis, log_a, log_b, initial))


def _total(parts: tuple[Array, Array]) -> Array:
    largest, log_rest = parts
    return log_rest + where_empty(largest, 0.0)


def _shares(
    axis: int, parts: tuple[Array, Array], log_a: Array, log_b: Array, initial: Array
) -> Softmax:
    """The softmax of the two terms of every step."""

    def previous(first: Array, x: Array) -> Array:
        shifted = jnp.concatenate([jnp.expand_dims(first, axis), x], axis)
        return lax.slice_in_dim(shifted, 0, x.shape[axis], axis=axis)

    largest, log_rest = parts
    kept = log_a + previous(initial, largest)
    scale = finite(lax.stop_gradient(jnp.maximum(kept, log_b)))
    return softmax_pair((kept - scale) + previous(jnp.zeros_like(initial), log_rest), log_b - scale)


def _aligned(axis: int, **arrays: Array) -> tuple[Array, Array]:
    """Coefficients with as many axes as the inputs, and both in one dtype.

    Raises:
      ValueError: they do not have the same time axis, or do not broadcast.
    """
    (name, a), (_, b) = arrays.items()
    expanded = a.reshape((1,) * (b.ndim - a.ndim) + a.shape)
    fits = expanded.ndim == b.ndim and expanded.shape[axis] == b.shape[axis]
    if not fits or any(n not in (1, m) for n, m in zip(expanded.shape, b.shape, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to shape {b.shape}, with all of its {b.shape[axis]} "
            f"tokens, got {a.shape}"
        )
    dtype = common_dtype(a, b)
    return expanded.astype(dtype), b.astype(dtype)


def _join(first: Array, others: Array) -> Array:
    return jnp.concatenate([first[None], others])


def _add(earlier, log_decay, later):
    """Add a decayed sum and another one, each a pair (largest term, sum relative to it)."""
    (largest1, sum1), (largest2, sum2) = earlier, later
    decayed = largest1 + log_decay
    largest = jnp.maximum(decayed, largest2)
    return largest, sum1 * share(decayed, largest) + sum2 * share(largest2, largest)


def _chunks(x: Array, axis: int, padding: float = 0.0) -> Array:
    """`[..., T, ...]` -> `[C, J, ...]`: token c of chunk j, with padding at the end."""
    x = jnp.moveaxis(x, axis, 0)
    size = math.isqrt(len(x) - 1) + 1
    widths = [(0, -len(x) % size), *[(0, 0)] * (x.ndim - 1)]
    x = jnp.pad(x, widths, constant_values=padding)
    return jnp.swapaxes(x.reshape(len(x) // size, size, *x.shape[1:]), 0, 1)


def _join_chunks(x: Array, length: int, axis: int) -> Array:
    """Invert `_chunks`."""
    x = jnp.swapaxes(x, 0, 1)
    tokens = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return jnp.moveaxis(tokens[:length], 0, axis)


@_log_linear_recurrence.defjvp
def _log_linear_recurrence_jvp(axis, primals, tangents):
    (log_a, log_b, initial), (d_log_a, d_log_b, d_initial) = primals, tangents
    parts = _log_linear_recurrence(axis, log_a, log_b, initial)
    kept, added = _shares(axis, parts, log_a, log_b, initial).weights
    dh = linear_recurrence(kept, kept * d_log_a + added * d_log_b, initial=d_initial, axis=axis)
    return parts, (dh, jnp.zeros_like(dh))
