"""Small layers with weights from NumPy, since initialization compiles many functions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax import attention

MODEL_DIM, NUM_HEADS = 8, 2


def random_layer(name: str, *, num_heads: int = NUM_HEADS, **options: Any) -> attention.Attention:
    """Return a mechanism's layer with random weights, and scales of norms around 1."""
    sizes = {"model_dim": MODEL_DIM, "num_heads": num_heads}
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: attention.build(name, **sizes, rngs=nnx.Rngs(0), **options))
    )
    rng = np.random.default_rng(0)

    def draw(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        center = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(center + 0.5 * rng.standard_normal(x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(draw, shapes))


def assert_chunks_equal_one_pass(layer: attention.Attention, sizes: Sequence[int]) -> None:
    """Assert that chunks of these sizes, each after the state of those before, give the results of
    the whole sequence."""
    graph, parameters = nnx.split(layer)
    x = np.random.default_rng(1).standard_normal((sum(sizes), MODEL_DIM)).astype(np.float32)

    @partial(jax.jit, static_argnames="return_state")
    def call(parameters: nnx.State, x: jax.Array, **options: Any) -> Any:
        return nnx.merge(graph, parameters)(x, **options)

    whole = call(parameters, x)
    state, parts = layer.init_state((), capacity=len(x)), []
    for chunk in np.split(x, np.cumsum(sizes)[:-1]):
        y, state = call(parameters, chunk, state=state, return_state=True)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-5 * np.abs(whole).max())
