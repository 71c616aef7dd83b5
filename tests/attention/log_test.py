"""The log-attention layer and the registry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.attention.log import hedgehog_features, log_complement


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


def test_product_features_need_an_even_depth():
    with pytest.raises(ValueError, match="key_depth=5 must be even"):
        layer(features="product", key_depth=5)


def test_scores_of_product_features_are_sums_of_those_of_the_parts():
    module = layer(features="product", key_depth=6)
    x = jax.random.normal(jax.random.key(1), (5, 12))
    query, key, _ = super(attention.LogAttention, module).heads(x)
    parts = jnp.split(query[:, None] + key[None], 2, -1)
    scores = sum(jax.nn.logsumexp(part, -1) for part in parts)
    past = jnp.tril(jnp.ones((5, 5), bool))[..., None]
    expected = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), 1)
    np.testing.assert_allclose(module.importance(x), expected, rtol=1e-5)


def test_coupled_decay_needs_two_features():
    with pytest.raises(
        ValueError, match="key_depth=1 gives one feature: decay='coupled' needs two"
    ):
        layer(decay="coupled", key_depth=1)


def test_slots_hold_averages_of_values():
    """Against the recurrence of each slot: a token replaces a share of its average."""
    log_key = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(0), (9, 1, 4)))
    value = jax.random.normal(jax.random.key(1), (9, 1, 5))
    log_decay = log_complement(log_key)
    options = {"log_decay": log_decay, "return_state": True}
    _, state = attention.heinsen_attention(log_key, log_key, value, **options)
    s, z = np.zeros((4, 5)), np.zeros(4)
    for p, v in zip(np.exp(np.asarray(log_key)[:, 0]), np.asarray(value)[:, 0], strict=True):
        s, z = (1 - p)[:, None] * s + p[:, None] * v, (1 - p) * z + p
    np.testing.assert_allclose(state.log_z[0], np.log(z), atol=1e-5)
    np.testing.assert_allclose(state.mean[0], s / z[:, None], atol=1e-5)


def test_coupled_decays_are_not_above_zero_in_half_precision():
    """The exponentials of the log softmax of 256 equal features have a sum above 1 in bfloat16."""
    module = layer(decay="coupled", features="product", key_depth=32, dtype=jnp.bfloat16)
    module.project.bias[...] = jnp.zeros_like(module.project.bias[...])
    y = module(jnp.zeros((3, 12), jnp.bfloat16))  # a decay above 0 is refused
    np.testing.assert_array_equal(y, jnp.broadcast_to(y[:1], y.shape))


def test_normalized_product_features_start_sharper():
    scales = {
        features: layer(features=features, query_key_norm=True, key_depth=4).query_norm.scale[...]
        for features in ("identity", "product")
    }
    np.testing.assert_array_equal(scales["identity"], np.ones(4))
    np.testing.assert_array_equal(scales["product"], np.full(4, 2.0))


@pytest.mark.nightly
def test_logarithms_of_complements_are_accurate():
    with jax.enable_x64():
        logits = jnp.asarray([[0.0, 0, 0], [1, 2, 3], [0, 60, -60], [-800, 0, -900]])
        log_p = jax.nn.log_softmax(logits)

        def slow(logits):
            log_p = jax.nn.log_softmax(logits)
            others = jnp.stack([jnp.delete(log_p, k, 1) for k in range(3)], 1)
            return jax.nn.logsumexp(others, -1)

        expected, slopes = slow(logits), jax.grad(lambda x: slow(x).sum())(logits)
    log_p = log_p.astype(jnp.float32)
    np.testing.assert_allclose(log_complement(log_p), expected, rtol=1e-5, atol=1e-20)
    gradients = jax.grad(lambda x: log_complement(jax.nn.log_softmax(x)).sum())
    np.testing.assert_allclose(gradients(logits.astype(jnp.float32)), slopes, atol=1e-5)


def test_features_of_hedgehog_are_probabilities_in_bfloat16():
    """Near -log 32 neighbors in bfloat16 differ by 1.6%."""
    x = jnp.sin(jnp.arange(3 * 2 * 32.0)).reshape(3, 2, 32).astype(jnp.bfloat16)
    features = hedgehog_features(x, jnp.stack([jnp.eye(32)] * 2))
    expected = np.array(x, np.float64)
    for part, sign in zip(np.split(np.array(features), 2, -1), (1, -1), strict=True):
        weights = np.exp(sign * expected)
        np.testing.assert_allclose(
            np.exp(part), weights / weights.sum(-1, keepdims=True), rtol=1e-5
        )
