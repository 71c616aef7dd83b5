"""The choice between matrix products and exact blocks, and what each of them can serve alone."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.log_attention import chunked
from heinsen_jax.ops.log_attention.chunked import ChunkedOptions
from heinsen_jax.ops.log_attention.state import LogAttentionState, MeanState
from tests.ops.log_attention.cases import assert_within

ALWAYS_FAST = ChunkedOptions(safe_range=math.inf)
ALWAYS_EXACT = ChunkedOptions(safe_range=-1.0)
TOKENS = np.arange(128, dtype=np.float32)[None, :, None]


def inputs(seed: int = 0, key_slope: float = 0.0, value_slope: float = 0.0):
    """query [X, R, T, K], key [X, T, K], log_value [X, T, V]"""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, 2, 128, 4)).astype(np.float32)
    key = rng.standard_normal((2, 128, 4)).astype(np.float32)
    log_value = rng.standard_normal((2, 128, 3)).astype(np.float32)
    return query, key + np.float32(key_slope) * TOKENS, log_value + np.float32(value_slope) * TOKENS


def empty(dtype=jnp.float32) -> LogAttentionState:
    return LogAttentionState.empty((), 2, 4, 3, dtype)


@partial(jax.jit, static_argnames="options")
def value_and_gradients(query, key, log_value, state, options):
    def loss(query, key, log_value):
        log_y, _ = chunked.log_attention(
            query, key, log_value, state, is_causal=True, options=options
        )
        return jnp.sum(jnp.sin(log_y)), log_y

    (_, log_y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(query, key, log_value)
    return log_y, gradients


def exact_in_float64(arrays):
    with jax.enable_x64(True):
        arrays = (x.astype(np.float64) for x in arrays)
        return value_and_gradients(*arrays, empty(jnp.float64), ALWAYS_EXACT)


UNSERVABLE = {
    "keys rise inside a chunk": {"key_slope": 10},
    "log-values span too much": {"value_slope": 10},
    "both, each alone within range": {"key_slope": 0.9, "value_slope": 0.45},
}


@pytest.mark.parametrize("name", [*UNSERVABLE])
def test_the_safety_test_chooses_exact_blocks_where_products_fail(name):
    arrays = inputs(**UNSERVABLE[name])
    log_y, gradients = value_and_gradients(*arrays, empty(), chunked.DEFAULT)
    exact_log_y, exact_gradients = value_and_gradients(*arrays, empty(), ALWAYS_EXACT)
    np.testing.assert_array_equal(log_y, exact_log_y)
    for have, want in zip(gradients, exact_gradients, strict=True):
        np.testing.assert_array_equal(have, want)
    expected, _ = exact_in_float64(arrays)
    size = max(np.max(np.abs(x)) for x in arrays)
    assert_within(log_y, expected, 5e-6 * (1 + np.abs(expected) + size))


@pytest.mark.parametrize("name", ["keys rise inside a chunk", "log-values span too much"])
def test_products_alone_fail_there(name):
    """If this no longer holds the safety test can go."""
    arrays = inputs(**UNSERVABLE[name])
    log_y, _ = value_and_gradients(*arrays, empty(), ALWAYS_FAST)
    expected, _ = exact_in_float64(arrays)
    assert not np.allclose(log_y, expected, atol=1)


def test_causal_means_alone_lose_early_queries_where_keys_rise():
    query, key, log_value = map(jnp.asarray, inputs(key_slope=10))
    state = MeanState(jnp.full((2, 4), -jnp.inf), jnp.zeros((2, 4, 3)))
    y, _ = chunked._causal_means(query, key, jnp.exp(log_value), state, 64)
    first = np.asarray(y[:, :, 0])
    expected = np.broadcast_to(np.exp(log_value[:, None, 0]), first.shape)
    assert not np.allclose(first, expected, rtol=0.5)


def test_ordinary_inputs_take_the_products():
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, empty(), chunked.DEFAULT)
    fast_log_y, fast_gradients = value_and_gradients(*arrays, empty(), ALWAYS_FAST)
    np.testing.assert_array_equal(log_y, fast_log_y)
    for have, want in zip(gradients, fast_gradients, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("options", [ALWAYS_FAST, ALWAYS_EXACT], ids=["products", "exact blocks"])
def test_both_forms_serve_ordinary_inputs(options):
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, empty(), options)
    expected, expected_gradients = exact_in_float64(arrays)
    assert_within(log_y, expected, 5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize("slope", [0.3, 0.6, 0.7, 0.8])
def test_products_serve_all_that_the_safety_test_lets_through(slope):
    """Right up to the limit, the gradient included: safe_range leaves enough margin."""
    arrays = inputs(key_slope=slope)
    log_y, gradients = value_and_gradients(*arrays, empty(), ALWAYS_FAST)
    chosen, _ = value_and_gradients(*arrays, empty(), chunked.DEFAULT)
    np.testing.assert_array_equal(log_y, chosen)
    expected, expected_gradients = exact_in_float64(arrays)
    assert_within(log_y, expected, 5e-6 * (1 + np.abs(expected)))
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 1e-5 * np.max(np.abs(want)))


@pytest.mark.parametrize(
    "options", [ChunkedOptions(16, 128), ChunkedOptions(32, 64), ChunkedOptions(128, 128)], ids=str
)
def test_sizes_do_not_change_the_result(options):
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, empty(), options)
    expected, expected_gradients = value_and_gradients(*arrays, empty(), chunked.DEFAULT)
    np.testing.assert_allclose(log_y, expected, atol=5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


def test_one_unsafe_block_leaves_the_others_to_products():
    """The choice is made block by block, so one outlier does not slow a whole sequence."""
    query, key, log_value = inputs()
    key = key.copy()
    key[:, 100:] += 1e4
    options = ChunkedOptions(chunk_size=32, block_size=64)
    log_y, _ = value_and_gradients(query, key, log_value, empty(), options)
    fast = ChunkedOptions(chunk_size=32, block_size=64, safe_range=math.inf)
    fast_log_y, _ = value_and_gradients(query, key, log_value, empty(), fast)
    np.testing.assert_array_equal(log_y[:, :, :64], fast_log_y[:, :, :64])
    expected, _ = exact_in_float64((query, key, log_value))
    assert_within(log_y, expected, 5e-2)
