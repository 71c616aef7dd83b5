"""A state carries all that later tokens need: two chunks give the values of one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.small import MODEL_DIM, assert_chunks_equal_one_pass, random_layer

LAYERS = {
    "log": {"implementation": "scan"},
    "log_window": {"window_size": 3, "positions": "rotary", "implementation": "scan"},
    "linear": {},
    "taylor": {},
    "performer": {},
    "additive": {},
    "rmt": {"segment_length": 3, "num_memories": 2},
    "tglobal": {"radius": 2, "block_size": 3},
    "memory_compressed": {},
    "block_sparse": {"pattern": "local", "block_size": 3},
}


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_equal_one_pass(name):
    assert_chunks_equal_one_pass(random_layer(name, **LAYERS[name]), [4, 3])


@pytest.mark.parametrize("name", ["memory_compressed", "tglobal"])
def test_states_may_be_arrays_of_numpy(name):
    layer, x = random_layer(name, **LAYERS[name]), jnp.ones((4, MODEL_DIM))
    state = jax.device_get(layer.init_state((), capacity=4))
    np.testing.assert_allclose(layer(x, state=state), layer(x), atol=1e-6)
