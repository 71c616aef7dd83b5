"""Selection of tiers under `jax.vmap`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from heinsen_jax.ops import heinsen_attention, log_attention

each_function = pytest.mark.parametrize("function", [log_attention, heinsen_attention])


def primitives(jaxpr: Any) -> set[str]:
    """Return the names of all primitives outside of branches of `cond`."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name != "cond":
            for inner in jaxprs_in_params(equation.params):
                names |= primitives(inner)
    return names


@each_function
@pytest.mark.parametrize("length", [20, 1100], ids=["one block", "two blocks"])
def test_a_mapped_choice_stays_a_choice(function, length):
    """`vmap` must not compute all tiers and select between their results."""

    def gradients(*arrays):
        return jax.vjp(function, *arrays)[1](jnp.ones_like(arrays[0]))

    arrays = [jnp.ones((3, length, 1, 2))] * 3
    mapped = jax.make_jaxpr(jax.vmap(gradients))(*arrays)
    alone = jax.make_jaxpr(gradients)(*(x[0] for x in arrays))
    assert "cond" in primitives(alone.jaxpr)
    assert "cond" in primitives(mapped.jaxpr)
    # A product outside of the branches would be a tier that always runs.
    assert "dot_general" not in primitives(mapped.jaxpr)


@each_function
def test_nested_maps_equal_single_calls(function):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 3, 20, 2, 4)).astype(np.float32) for _ in range(3)]
    arrays[1][0, 1] += 10 * np.arange(20, dtype=np.float32)[:, None, None]  # one is harder
    mapped = jax.jit(jax.vmap(jax.vmap(function)))(*arrays)
    single = jax.jit(function)
    for index in np.ndindex(2, 3):
        expected = single(*(x[index] for x in arrays))
        np.testing.assert_allclose(mapped[index], expected, atol=2e-5)


@each_function
@pytest.mark.parametrize("keywords", [{}, {"is_causal": False}], ids=str)
def test_products_keep_their_type_on_accelerators(function, keywords):
    """Otherwise float32 would be multiplied with the precision of TF32 or bfloat16."""

    def gradients(*arrays):
        attention = partial(function, **keywords)
        return jax.vjp(attention, *arrays)[1](jnp.ones_like(arrays[0]))

    arrays = [jnp.ones((1, 200, 1, 8))] * 3
    for platform in ("cuda", "tpu"):
        lowered = jax.jit(gradients).trace(*arrays).lower(lowering_platforms=(platform,))
        products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
        assert products
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
