"""Second derivatives, and the errors of implementations without them, as their docstrings say."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import (
    additive_pooling,
    dot_product_attention,
    heinsen_attention,
    l1_attention,
    l1_sparse_attention,
    log_attention,
)
from heinsen_jax.typing import Array

EDGES = np.argwhere(np.tri(9) > 0)
OF_SECOND_ORDER: dict[str, Callable[[Array, Array, Array], Array]] = {
    "log, reference": partial(log_attention, implementation="reference"),
    "log, scan": partial(log_attention, implementation="scan"),
    "heinsen, reference": partial(heinsen_attention, implementation="reference"),
    "heinsen, scan": partial(heinsen_attention, implementation="scan"),
    "softmax, xla": partial(dot_product_attention, is_causal=True, implementation="xla"),
    "softmax, tiled": partial(dot_product_attention, is_causal=True, implementation="tiled"),
    "l1, causal": partial(l1_attention, is_causal=True),
    "l1_sparse": lambda query, key, value: l1_sparse_attention(query, key, value, EDGES),
    "additive": lambda query, key, value: additive_pooling(value, jnp.sum(query * key, -1)),
}
FORWARD = "can't apply forward-mode autodiff \\(jvp\\) to a custom_vjp function"
SECOND = "Linearization failed to produce known values"
REFUSED = [
    ("log", partial(log_attention, implementation="chunked"), FORWARD, SECOND),
    ("heinsen", partial(heinsen_attention, implementation="chunked"), FORWARD, SECOND),
    ("softmax", OF_SECOND_ORDER["softmax, tiled"], FORWARD, None),
    ("l1", OF_SECOND_ORDER["l1, causal"], FORWARD, None),
    ("l1_sparse", OF_SECOND_ORDER["l1_sparse"], FORWARD, None),
    ("additive", OF_SECOND_ORDER["additive"], FORWARD, None),
]


def loss(op: Callable[..., Array], query: Array) -> Array:
    return jnp.sum(op(query, jnp.cos(query), jnp.sin(3 * query)) ** 2)


def directional(op: Callable[..., Array], x: Array, direction: Array) -> Array:
    return jax.grad(lambda x: jnp.vdot(jax.grad(partial(loss, op))(x), direction))(x)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * name.startswith(("heinsen", "l1,")))
        for name in OF_SECOND_ORDER
    ],
)
def test_second_derivatives(name):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, direction = (jnp.asarray(rng.standard_normal((9, 2, 3))) for _ in range(2))
        gradient = jax.jit(jax.grad(partial(loss, OF_SECOND_ORDER[name])))
        step = 1e-5 * direction
        want = (gradient(x + step) - gradient(x - step)) / 2e-5
        have = jax.jit(partial(directional, OF_SECOND_ORDER[name]))(x, direction)
        np.testing.assert_allclose(have, want, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize(("name", "op", "forward", "second"), REFUSED)
def test_other_derivatives_raise_what_docstrings_say(name, op, forward, second):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 2, 3)), jnp.float32)
    with pytest.raises(TypeError, match=forward):
        jax.jit(lambda x: jax.jvp(partial(loss, op), (x,), (x,))).lower(x)
    if second is not None:
        with pytest.raises(ValueError, match=second):
            jax.jit(partial(directional, op)).lower(x, x)
