"""Random features of Performer layers."""

import jax
import numpy as np

from heinsen_jax.attention import performer
from tests.attention.small import MODEL_DIM, random_layer


def test_features_are_constants_whatever_the_generator_is():
    """A trained model would be another one where `jax_default_prng_impl` is "rbg"."""
    layer = random_layer("performer")
    x = np.random.default_rng(0).standard_normal((1, 5, MODEL_DIM)).astype(np.float32)
    expected = layer(x)
    performer._features.cache_clear()
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(layer(x), expected)
    assert "qr" not in jax.jit(layer).lower(x).as_text()
