"""Softmax attention as a layer: biases of ALiBi, and shared key/value heads."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention


def abstract(name: str, num_heads: int, **options) -> attention.Attention:
    """Return a layer with shapes in place of parameters."""
    sizes = {"model_dim": 24, "num_heads": num_heads}
    return nnx.eval_shape(lambda: attention.build(name, **sizes, rngs=nnx.Rngs(0), **options))


def test_slopes_of_alibi_are_powers_of_two():
    layer = abstract("softmax", 4, positions="alibi")
    decay = layer._log_decay(jnp.zeros((1, 4, 6)))
    np.testing.assert_allclose(decay, [[-1 / 4, -1 / 16, -1 / 64, -1 / 256]])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (4, 1), (10, 1)])
def test_four_query_heads_share_a_key_by_default(num_heads, num_kv_heads):
    layer = abstract("gqa", num_heads, key_depth=2, value_depth=2)
    assert layer.num_kv_heads == num_kv_heads
