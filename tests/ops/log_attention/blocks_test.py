"""Blocks of tokens: padding has no weight, and outputs keep their order."""

import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.log_attention.blocks import scan_blocks


@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_each_token_counts_once(length):
    rng = np.random.default_rng(length)
    key, value = rng.standard_normal((2, length, 1)), rng.standard_normal((2, length, 3))

    def add(total, tokens):
        key, value = tokens
        return total + jnp.sum(jnp.exp(key) * value, -2), 2 * value

    total, outputs = scan_blocks(add, jnp.zeros((2, 3)), (key, value), block_size=4)
    np.testing.assert_allclose(total, (np.exp(key) * value).sum(-2), atol=1e-5)
    np.testing.assert_allclose(outputs, 2 * value, rtol=1e-6)
