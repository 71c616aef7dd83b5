"""A window of softmax attention merged with log-attention, as a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention


@pytest.mark.parametrize(
    ("num_kv_heads", "window_size", "timescales"),
    [(3, 4, [400, 40, 4]), (3, 500, [400, 400, 400]), (1, 4, [400])],
)
def test_initial_time_constants(num_kv_heads, window_size, timescales):
    options = {"num_kv_heads": num_kv_heads, "window_size": window_size, "max_timescale": 400.0}
    layer = attention.build(
        "log_window", model_dim=24, num_heads=3, rngs=nnx.Rngs(0), decay="head", **options
    )
    decay = -jax.nn.log_sigmoid(layer.decay_proj.bias[...])
    np.testing.assert_allclose(decay, np.log1p(1 / np.array(timescales)), rtol=1e-5)


@pytest.mark.parametrize("features", ["hedgehog", "identity"])
def test_equal_scores_have_equal_weights_on_both_sides_of_the_window(features):
    layer = attention.build(
        "log_window", model_dim=24, num_heads=3, rngs=nnx.Rngs(0), features=features, window_size=2
    )
    columns = layer.columns()
    zero = np.concatenate([columns["query"], columns["key"]])
    for parameter in (layer.project.kernel, layer.project.bias):
        parameter[...] = parameter[...].at[..., zero].set(0)
    x = jax.random.normal(jax.random.key(0), (9, 24))
    _, _, value = layer.heads(x)
    average = jnp.cumsum(value, 0) / jnp.arange(1, 10)[:, None, None]
    expected = layer.output(average.reshape(9, -1))
    np.testing.assert_allclose(layer(x, is_causal=True), expected, atol=1e-5)
