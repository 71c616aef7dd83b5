"""Projections of layers with shared key/value heads."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.attention.parameters import NORMS
from tests.attention.small import MODEL_DIM, random_layer

X, SOURCE = np.random.default_rng(0).standard_normal((2, 3, MODEL_DIM)).astype(np.float32)


def layer(**options):
    return random_layer("softmax", num_heads=4, num_kv_heads=2, value_depth=3, **options)


def test_columns_of_shared_heads_are_repeated_in_their_group():
    ours = layer(use_bias=False)
    query, key, value = ours.heads(jnp.asarray(X))
    expected = {"query": query, "key": jnp.repeat(key, 2, -2), "value": jnp.repeat(value, 2, -2)}
    columns = ours.columns()
    for name, of_heads in expected.items():
        product = X @ np.asarray(ours.project.kernel[...])[:, columns[name]]
        np.testing.assert_allclose(product.reshape(of_heads.shape), of_heads, atol=1e-5)


def test_queries_are_those_of_the_tokens_and_keys_those_of_the_source():
    ours = layer()
    query, key, value = ours.heads(jnp.asarray(X), jnp.asarray(SOURCE))
    np.testing.assert_allclose(query, ours.heads(jnp.asarray(X))[0], atol=1e-5)
    for have, want in zip((key, value), ours.heads(jnp.asarray(SOURCE))[1:], strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5)


def test_layer_norms_are_exact_where_the_mean_is_large():
    """E[x^2] - E[x]^2 would be wrong by a third for a mean of 1000."""
    x = 1000 + np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    options = {"dtype": None, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    exact = np.float64(x) - np.float64(x).mean(-1, keepdims=True)
    exact /= np.sqrt(np.mean(exact**2, -1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(NORMS["layer"](256, **options)(x), exact, atol=3e-4)
