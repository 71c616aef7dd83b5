"""Small models with weights from NumPy, and a compiled forward pass as their oracle."""

from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.models import LanguageModel, LanguageModelConfig


@cache
def random_model(config: LanguageModelConfig) -> LanguageModel:
    """Return the model with weights uniform in -1/2 .. 1/2 and scales of norms around 1, drawn by
    NumPy, since initialization compiles about eighty functions."""
    shapes = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(shapes)
    rng = np.random.default_rng(0)

    def draw(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        center = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(center + rng.uniform(-0.5, 0.5, x.shape), x.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))


@partial(jax.jit, static_argnames=("graph", "return_state"))
def _apply(graph, parameters, tokens, state, return_state):
    return nnx.merge(graph, parameters)(tokens, state=state, return_state=return_state)


def apply(model: LanguageModel, tokens, state=None, return_state=False):
    """Return the model, compiled once per shape."""
    return _apply(*nnx.split(model), jnp.asarray(tokens), state, return_state)


def assert_greedy(model: LanguageModel, prompts: Sequence, new) -> None:
    """Assert that new tokens `[B, N]` are the most probable ones in one pass over the whole
    sequence.

    Sequences are padded on the right to compile a single length.
    """
    rows = [
        [*np.asarray(row).tolist(), *more.tolist()]
        for row, more in zip(prompts, np.asarray(new), strict=True)
    ]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    likeliest = np.asarray(jnp.argmax(apply(model, tokens), -1))
    for prompt, found, more in zip(prompts, likeliest, new, strict=True):
        start = len(prompt) - 1
        np.testing.assert_array_equal(more, found[start : start + len(more)])
