"""Conditional computation (CoLT5): a light branch for all tokens, a heavy one for routed tokens.

A router scores tokens, `soft_top_k` converts scores to weights, `route` selects tokens, and the two
conditional layers apply their heavy branch to these only:

    weights = soft_top_k(x @ router, 9 / 8 * num_routed)
    y = conditional_feed_forward(x, light, heavy, route(weights, num_routed))

Tokens compete over the whole sequence: routing depends on later tokens, so these layers are not
causal and cannot be streamed.

References:
  Ainslie et al., 2023, CoLT5: Faster Long-Range Transformers with Conditional Computation,
    arXiv:2303.09752. Lei et al., 2023, Conditional Adapters, arXiv:2304.04947 (epsilon decreases
    from iteration to iteration).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.ops.arguments import check_array, is_integer
from heinsen_jax.ops.devices import over_devices
from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array, Bool, Features, Float, Integer, Shaped, common_dtype, wide


@over_devices
def soft_top_k(
    scores: Float[Array, "*B T"],
    k: float | Shaped[Array, ""],
    *,
    num_iterations: int = 50,
    epsilon: float = 1.0,
    epsilon_init: float | None = None,
    epsilon_decay: float = 0.7,
    mask: Bool[Array, "*B T"] | None = None,
) -> Float[Array, "*B T"]:
    r"""Differentiable top-k: weights in [0, 1] that sum to k, largest for the largest scores.

    The lambda that maximizes `sum_i lambda_i s_i + epsilon entropy(lambda)` under these two
    constraints, by coordinate descent on their multipliers a and b (CoLT5). From b = -s, alternate

        a = epsilon (log k - LSE_i((s_i + b_i) / epsilon)),    b_i = -relu(s_i + a)

    then lambda_i = exp((s_i + a + b_i) / epsilon). Too few iterations at a small epsilon do not
    converge: the sum then differs from k. With `epsilon_init`, epsilon is
    `max(epsilon, epsilon_init * epsilon_decay**i)` in iteration i = 0, 1, ..., which needs fewer:
    `num_iterations=20, epsilon=0.03, epsilon_init=4.0` is common.

    Args:
      scores: s `[*B, T]`.
      k: sum of the weights; need not be an integer. CoLT5 uses 9/8 of the number of routed tokens.
      num_iterations: number of updates of a and b. Gradients flow through all of them.
      epsilon: smoothness of the selection.
      epsilon_init: initial epsilon, if larger.
      epsilon_decay: factor of epsilon per iteration, in (0, 1].
      mask: `[*B, T]`, True for valid tokens; padding has zero weights and gradients.

    Returns:
      lambda `[*B, T]`.

    Raises:
      ValueError: a shape, a dtype or a number does not fit; the message says which.

    Examples:
      >>> soft_top_k(jnp.array([4.0, 1.0, 3.0, 0.0]), 2, epsilon=0.1).round().tolist()
      [1.0, 0.0, 1.0, 0.0]
    """
    if scores.ndim < 1 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"scores must be [..., tokens] and floating point, got {scores.shape} {scores.dtype}"
        )
    check_array("mask", mask, (scores.shape,), jnp.bool_)
    if isinstance(k, int | float) and not k > 0:
        raise ValueError(f"k must be positive, got {k}")
    epsilons = _epsilons(num_iterations, epsilon, epsilon_init, epsilon_decay)
    dtype = wide(scores)
    valid = jnp.ones(scores.shape, bool) if mask is None else mask
    return _soft_top_k(scores, jnp.asarray(k, dtype), jnp.asarray(epsilons, dtype), valid)


@jax.jit  # compiled once outside another `jit`
def _soft_top_k(
    scores: Float[Array, "*B T"],
    k: Shaped[Array, ""],
    epsilons: Float[Array, "iterations"],
    valid: Bool[Array, "*B T"],
) -> Float[Array, "*B T"]:
    s, log_k = jnp.where(valid, scores, 0).astype(epsilons.dtype), jnp.log(k)

    def multiplier(s_and_b: Array, epsilon) -> Array:
        exponents = jnp.where(valid, s_and_b, -jnp.inf)
        largest = jnp.max(exponents, -1, keepdims=True, initial=-jnp.inf)
        largest = lax.stop_gradient(where_empty(largest, 0.0))
        total = jnp.sum(jnp.exp((exponents - largest) / epsilon), -1, keepdims=True)
        return epsilon * (log_k - jnp.log(jnp.where(total == 0, 1, total))) - largest

    @partial(jax.checkpoint, prevent_cse=False)  # saves one number per iteration, not T
    def iteration(a: Array, epsilon: Array) -> tuple[Array, None]:
        return multiplier(jnp.where(s + a > 0, -a, s), epsilon), None  # s + b

    a = varying_like(multiplier(jnp.zeros_like(s), epsilons[0]), s)
    if len(epsilons) > 2:  # `jax.disable_jit` refuses scans of no steps
        a, _ = lax.scan(iteration, a, epsilons[1:-1])
    weights = jnp.exp(jnp.where(s + a > 0, 0.0, s + a) / epsilons[-1])
    return jnp.where(valid, weights, 0).astype(scores.dtype)


def _epsilons(count: int, least: float, first: float | None, decay: float) -> list[float]:
    """Return epsilon for each iteration, and for the final weights."""
    if not is_integer(count) or count < 1:
        raise ValueError(f"num_iterations must be an integer >= 1, got {count!r}")
    if not least > 0:
        raise ValueError(f"epsilon must be positive, got {least}")
    if not 0 < decay <= 1:
        raise ValueError(f"epsilon_decay must be in (0, 1], got {decay}")
    first = least if first is None else first
    return [max(least, first * decay**i) for i in range(count + 1)]


class Routing(NamedTuple):
    """R tokens that are routed to the heavy branch.

    Attributes:
      indices: `[*B, R]`, by decreasing weight.
      weights: `[*B, R]`, 0 where the mask is False.
      mask: `[*B, R]`, False where a sequence has fewer than R valid tokens; the index there repeats
        the first one.
    """

    indices: Integer[Array, "*B R"]
    weights: Float[Array, "*B R"]
    mask: Bool[Array, "*B R"]


@over_devices
def route(
    weights: Float[Array, "*B T"], num_routed: int, *, mask: Bool[Array, "*B T"] | None = None
) -> Routing:
    """Select the `num_routed` tokens of largest weight, or all tokens if fewer.

    Soft weights saturate at 1, so ties are common: among equal weights the earliest tokens are
    selected. Gradients flow to the weights of selected tokens. For a straight-through estimator,
    replace the weights w of the result by `w + stop_gradient(1 - w)`.

    Args:
      weights: `[*B, T]`, for example from `soft_top_k`.
      num_routed: number of tokens to select, at least 1.
      mask: `[*B, T]`, True for valid tokens; padding is never selected.

    Raises:
      ValueError: a shape, a dtype or a number does not fit; the message says which.

    Examples:
      >>> route(jnp.array([0.1, 0.9, 0.5]), 2).indices.tolist()
      [1, 2]
    """
    if weights.ndim < 1 or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights must be [..., tokens] and floating point, got {weights.shape} {weights.dtype}"
        )
    check_array("mask", mask, (weights.shape,), jnp.bool_)
    if not is_integer(num_routed) or num_routed < 1:
        raise ValueError(f"num_routed must be an integer >= 1, got {num_routed!r}")
    valid = jnp.ones(weights.shape, bool) if mask is None else mask
    order = lax.stop_gradient(jnp.where(valid, weights, -jnp.inf))
    _, indices = lax.top_k(order, min(num_routed, weights.shape[-1]))
    taken = jnp.take_along_axis(valid, indices, -1)
    weights = jnp.where(taken, jnp.take_along_axis(weights, indices, -1), 0)
    return Routing(jnp.where(taken, indices, indices[..., :1]), weights, taken)


def conditional_feed_forward(
    x: Features,
    light: Callable[[Array], Array],
    heavy: Callable[[Array], Array],
    routing: Routing,
    *,
    residual: Features | None = None,
) -> Features:
    r"""A feed-forward layer with a heavy branch for routed tokens (CoLT5).

        Y_i = X_i + Light(X_i) + lambda_i Heavy(X_i),    lambda_i = 0 where i is not routed

    Args:
      x: `[*B, T, D]`.
      light: maps `[*B, T, D]` to the same shape; applied to all tokens.
      heavy: maps `[*B, R, D]` to the same shape; applied to routed tokens only.
      routing: from `route`.
      residual: `[*B, T, D]`, to which the branches are added; x when None. Pass it if x is
        normalized for the branches.

    Returns:
      Y `[*B, T, D]`.

    Raises:
      ValueError: an argument or a branch's output has a wrong shape; the message says which.

    Examples:
      >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1)
      >>> routing = route(jnp.array([0.0, 1.0, 0.5]), 1)
      >>> conditional_feed_forward(x, jnp.zeros_like, lambda x: 10 * x, routing).ravel().tolist()
      [1.0, 22.0, 3.0]
    """
    _check(x, residual, routing=routing)
    return _sum(x, residual, light(x), heavy(_routed(x, routing)), routing)


def conditional_attention(
    x: Features,
    light: Callable[[Array], Array],
    heavy: Callable[[Array, Array, Array], Array],
    query_routing: Routing,
    key_value_routing: Routing,
    *,
    residual: Features | None = None,
) -> Features:
    r"""Local attention for all tokens, full attention among routed tokens (CoLT5).

        Y_i = X_i + A_light(X)_i + lambda^q_i A_heavy(X_i, {lambda^kv_j X_j})

    for j over the tokens routed as keys and values by a separate router. Queries that are not
    routed have lambda^q = 0.

    Args:
      x: `[*B, T, D]`. Normalize it before the call and pass `residual`: a norm inside `heavy` would
        cancel lambda^kv.
      light: maps `[*B, T, D]` to the same shape: attention to nearby tokens.
      heavy: maps `(queries, sources, mask)` to the shape of the queries: attention from queries
        `[*B, R, D]` to sources `[*B, S, D]`, already multiplied by lambda^kv, where the mask
        `[*B, S]` is True. Tokens are ordered by decreasing weight, not by position.
      query_routing: from `route`; R tokens.
      key_value_routing: from `route`; S tokens.
      residual: `[*B, T, D]`, to which the branches are added; x when None.

    Returns:
      Y `[*B, T, D]`.

    Raises:
      ValueError: an argument or a branch's output has a wrong shape; the message says which.

    Examples:
      >>> def heavy(queries, sources, mask):
      ...     return jnp.broadcast_to(sources.sum(-2, keepdims=True), queries.shape)
      >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1)
      >>> routing = route(jnp.array([0.0, 1.0, 1.0]), 2)
      >>> conditional_attention(x, jnp.zeros_like, heavy, routing, routing).ravel().tolist()
      [1.0, 7.0, 8.0]
    """
    _check(x, residual, query_routing=query_routing, key_value_routing=key_value_routing)
    weights = key_value_routing.weights[..., None]
    sources = _routed(x, key_value_routing).astype(weights.dtype) * weights
    read = heavy(_routed(x, query_routing), sources.astype(x.dtype), key_value_routing.mask)
    return _sum(x, residual, light(x), read, query_routing)


def _check(x: Array, residual: Array | None, **routings: Routing) -> None:
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be [..., tokens, features] and floating point, got {x.shape} {x.dtype}"
        )
    check_array("residual", residual, (x.shape,), jnp.floating)
    for name, routing in routings.items():
        check_array(f"{name}.indices", routing.indices, (routing.weights.shape,), jnp.integer)
        if routing.indices.shape[:-1] != x.shape[:-2]:
            raise ValueError(
                f"{name} must have the batch axes of x {x.shape}, got {routing.indices.shape}"
            )


@over_devices
def _routed(x: Features, routing: Routing) -> Float[Array, "*B R D"]:
    return jnp.take_along_axis(x, routing.indices[..., None], -2, mode="clip")


@over_devices
def _sum(
    x: Features,
    residual: Features | None,
    light: Features,
    heavy: Float[Array, "*B R D"],
    routing: Routing,
) -> Features:
    """Return residual + light, plus heavy `[*B, R, D]` times its weights at the routed tokens."""
    residual = x if residual is None else residual
    *batch, length, width = x.shape
    count = routing.indices.shape[-1]
    check_array("the result of light", light, (x.shape,), jnp.floating)
    check_array("the result of heavy", heavy, ((*batch, count, width),), jnp.floating)
    dtype = wide(residual, x)
    added = routing.weights[..., None].astype(dtype) * heavy.astype(dtype)
    added = jnp.where(routing.mask[..., None], added, 0)

    rows = math.prod(batch)
    y = jnp.asarray(residual, dtype) + jnp.asarray(light, dtype)
    y = y.reshape(rows, length, width)
    places = np.arange(rows)[:, None], routing.indices.reshape(rows, count)
    y = y.at[places].add(added.reshape(rows, count, width))
    return y.reshape(x.shape).astype(common_dtype(residual, x))
