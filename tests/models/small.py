"""Small models whose weights need no compilation, and one compiled pass as their oracle."""

from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.models import LanguageModel, LanguageModelConfig


@cache
def random_model(config: LanguageModelConfig) -> LanguageModel:
    """Weights are uniform in -1/2 .. 1/2, scales of norms around 1: NumPy draws them, for the
    initialization compiles some eighty functions."""
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
    """The model, compiled once for each shape."""
    return _apply(*nnx.split(model), jnp.asarray(tokens), state, return_state)


def assert_greedy(model: LanguageModel, prompts: Sequence, new) -> None:
    """Each row of new tokens `[B, N]` is what one pass over the whole sequence finds likeliest.

    Sequences are padded on the right, for one length to compile.
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
