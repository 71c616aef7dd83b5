"""The log-attention layer and the registry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention


def layer(**config) -> attention.LogAttention:
    return attention.build("log", model_dim=12, num_heads=3, rngs=nnx.Rngs(0), **config)


def test_projection_is_query_key_and_log_value_by_head():
    module = layer(key_depth=2, value_depth=5, implementation="scan")
    x = jax.random.normal(jax.random.key(0), (2, 7, 12))
    heads = module.project(x).reshape(2, 7, 3, 9)
    split = jnp.split(heads, [2, 4], -1)
    log_y = attention.log_attention(*split, implementation="scan")
    gated = module.gate(log_y.reshape(2, 7, 15))
    expected = (gated[..., :12] * jax.nn.sigmoid(gated[..., 12:])) @ module.output.kernel[...]
    np.testing.assert_allclose(module(x), expected, atol=1e-5)


def test_state_size_is_constant():
    module = layer(key_depth=2, value_depth=5)
    state = module.init_state(())
    assert module.state_size(10) == module.state_size(10**6)
    assert module.state_size(10) == sum(x.nbytes for x in jax.tree.leaves(state)) == 4 * 3 * 2 * 6


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="attention mechanism 'nope': unknown; choose one of "):
        attention.build("nope", model_dim=12, num_heads=3, rngs=nnx.Rngs(0))


def test_unknown_options_are_named_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"log\.widnow: no such field; the options of log are .*window_"
    ):
        attention.build("log", model_dim=12, num_heads=3, widnow=4, rngs=nnx.Rngs(0))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=5 does not divide model_dim=12"):
        attention.build("log", model_dim=12, num_heads=5, rngs=nnx.Rngs(0))


def test_initial_time_constants():
    module = layer(decay="head", max_timescale=100.0)
    timescales = np.array([100.0, 10.0, 1.0])
    after = jnp.exp(jax.nn.log_sigmoid(module.decay_proj.bias[...]) * timescales)
    np.testing.assert_allclose(after, (1 + 1 / timescales) ** -timescales, rtol=1e-5)  # about 1/e


@pytest.mark.parametrize(
    "config",
    [
        {"decay": "feature", "num_kv_heads": 1},
        {"window_size": 4},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param(
            {"decay": "head", "values": "linear", "query_key_norm": True},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_importance_gives_the_layers_weights(config):
    module = layer(gated=False, implementation="scan", **config)
    x = jax.random.normal(jax.random.key(0), (2, 9, 12))
    weights = module.importance(x)
    assert weights.shape == (2, 9, 9, 3)
    np.testing.assert_allclose(weights.sum(-2), 1, atol=1e-5)
    value = jnp.repeat(module.heads(x)[2], 3 // module.num_kv_heads, -2)
    if module.config.values == "linear":
        y = jnp.einsum("btsn,bsnv->btnv", weights, value)
    else:
        y = jnp.log(jnp.einsum("btsn,bsnv->btnv", weights, jnp.exp(value)))
    np.testing.assert_allclose(module.out_proj(y), module(x), atol=2e-5)


def test_product_features_need_two_halves():
    with pytest.raises(ValueError, match="key_depth=5 is odd"):
        layer(features="product", key_depth=5)


def test_scores_of_product_features_are_sums_of_those_of_the_halves():
    module = layer(features="product", key_depth=6)
    x = jax.random.normal(jax.random.key(1), (5, 12))
    query, key, _ = super(attention.LogAttention, module).heads(x)
    parts = jnp.split(query[:, None] + key[None], 2, -1)
    scores = sum(jax.nn.logsumexp(part, -1) for part in parts)
    past = jnp.tril(jnp.ones((5, 5), bool))[..., None]
    expected = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), 1)
    np.testing.assert_allclose(module.importance(x), expected, rtol=1e-5)
