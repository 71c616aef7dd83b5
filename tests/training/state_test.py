"""The initial state of training."""

import jax
import numpy as np
from flax import nnx

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.config import OptimizerConfig
from heinsen_jax.training.optimizer import make_optimizer
from heinsen_jax.training.state import initializer

CONFIG = LanguageModelConfig(
    vocab_size=11, model_dim=8, num_layers=1, num_heads=2, attention="linear"
)


def test_given_parameters_replace_random_ones():
    shapes = flatten_with_names(nnx.state(LanguageModel.abstract(CONFIG), nnx.Param))
    name = next(iter(shapes))
    given = {name: np.full(shapes[name].shape, 7.0, np.float32)}
    optimizer = make_optimizer(OptimizerConfig())
    init = jax.jit(initializer(CONFIG, optimizer, seed=3, has_average=True))
    state, random = init(given), init()
    assert int(state.step) == 0
    for key, value in flatten_with_names(state.parameters).items():
        expected = given if key == name else flatten_with_names(random.parameters)
        np.testing.assert_array_equal(value, expected[key], err_msg=key)
    for average, value in zip(
        *map(jax.tree.leaves, (state.average, state.parameters)), strict=True
    ):
        np.testing.assert_array_equal(average, value)
