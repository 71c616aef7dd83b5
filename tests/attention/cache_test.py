"""States that hold tokens: positions, valid slots, and sequences in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.attention.cache import TokenCache, WindowCache, bucket
from tests.attention.small import MODEL_DIM, assert_chunks_equal_one_pass, random_layer


@pytest.mark.parametrize("capacity", [None, 4])
def test_a_cache_tells_the_position_of_its_first_new_token(capacity):
    cache = TokenCache.empty((), [(1, 2)], jnp.float32, capacity)
    cache, first = cache.append(jnp.ones((3, 1, 2)))
    assert int(first) == 0
    cache, second = cache.append(jnp.full((1, 1, 2), 2.0))
    assert (int(second), int(cache.num_tokens)) == (3, 4)
    np.testing.assert_array_equal(cache.tokens[0][:, 0, 0], [1, 1, 1, 2])


def test_a_cache_beyond_its_capacity_is_refused():
    cache = TokenCache.empty((), [(1, 2)], jnp.float32, 2)
    cache, _ = cache.append(jnp.ones((2, 1, 2)))
    with pytest.raises(ValueError, match="its capacity of 2 tokens is less than 3"):
        cache.append(jnp.ones((1, 1, 2)))


def test_a_window_has_the_last_tokens_and_counts_its_empty_slots():
    cache = WindowCache.empty((), [(1, 1)], jnp.float32, 3)
    for number, first in ((1, 2), (2, 1), (3, 0), (4, 0)):
        together, cache = cache.append(jnp.full((1, 1, 1), float(number)))
        assert together[0].shape == (4, 1, 1)
        assert int(cache.first) == first
    np.testing.assert_array_equal(cache.arrays[0].ravel(), [2, 3, 4])
    np.testing.assert_array_equal(cache.bounds(2, (1,)), [[0, 5]])


@pytest.mark.parametrize(
    ("length", "rounded"), [(0, 256), (256, 256), (257, 512), (2048, 2048), (2049, 2560)]
)
def test_lengths_are_rounded_up_to_few_values(length, rounded):
    assert bucket(length) == rounded


LAYERS = {
    "softmax": {"positions": "rotary"},
    "sliding_window": {"window_size": 3, "positions": "rotary"},
    "sliding_window, sinks": {"window_size": 2, "num_sinks": 3, "positions": "rotary"},
    "dilated": {"window_size": 2, "dilation": 2},
    "fox": {},
    "mla": {},
    "longformer": {"window_size": 3, "num_global_tokens": 2},
}


@pytest.mark.parametrize("name", ["sliding_window, sinks", "longformer"])
def test_long_chunks_need_memory_in_proportion_to_their_tokens(name):
    """And equal one pass, whether their parts divide them or not."""
    layer = random_layer(name.partition(",")[0], **LAYERS[name])
    for length in (1024, 1030):
        x = np.random.default_rng(0).standard_normal((2, length, MODEL_DIM)).astype(np.float32)
        state = layer.init_state((2,), capacity=length)
        call = jax.jit(lambda x, state: layer(x, state=state, return_state=True))
        y, after = call(x, state)
        np.testing.assert_allclose(y, layer(x), atol=1e-5 * np.abs(y).max())
        assert int(after.window.num_tokens) == length
    sizes = []
    for length in (2048, 8192):
        x = jax.ShapeDtypeStruct((2, length, MODEL_DIM), np.float32)
        sizes.append(call.lower(x, state).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 5 * sizes[0]


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_equal_one_pass(name):
    assert_chunks_equal_one_pass(random_layer(name.partition(",")[0], **LAYERS[name]), [4, 3])
