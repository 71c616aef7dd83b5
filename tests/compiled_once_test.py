"""Equal calls outside `jit` are compiled once, backward passes included."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import goom
from heinsen_jax.goom.recurrence import dense_recurrence
from heinsen_jax.models import LanguageModelConfig, Layers
from tests.compilations import compiles_again
from tests.models.small import random_model

pytestmark = pytest.mark.nightly
MATRICES = np.random.default_rng(0).standard_normal((40, 3, 3)).astype(np.float32)
GOOM: dict[str, Callable[[Any], Any]] = {
    "chain_products, sequential": partial(goom.chain_products, implementation="sequential"),
    "chain_products, parallel": partial(goom.chain_products, implementation="parallel"),
    "chain_products, reset": partial(
        goom.chain_products, implementation="parallel", reset=goom.Reset()
    ),
    "dense_recurrence": lambda x: dense_recurrence(x, x[0], x[0]),
    "lyapunov_exponents": goom.lyapunov_exponents,
    "largest_lyapunov_exponent": goom.largest_lyapunov_exponent,
    "matmul": lambda x: goom.matmul(x[0], x[1]),
    "add": lambda x: goom.add(x[0], x[1]),
}


@pytest.mark.parametrize("name", GOOM)
def test_functions_of_goom(name):
    def total(x: jax.Array) -> jax.Array:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(GOOM[name](x)))

    x = jnp.asarray(MATRICES)
    assert not compiles_again(lambda: jax.grad(total)(x))


@pytest.mark.parametrize("layers", ["log", "gated_deltanet", "softmax"])
def test_language_models(layers):
    sizes = {"vocab_size": 17, "model_dim": 12, "num_layers": 2, "num_heads": 2}
    model = random_model(LanguageModelConfig(**sizes, attention=Layers(layers)))
    tokens = jnp.arange(10)[None]
    assert not compiles_again(lambda: nnx.grad(lambda model: jnp.sum(model(tokens)))(model))
