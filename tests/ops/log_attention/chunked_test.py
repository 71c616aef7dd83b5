"""Selection of tiers, and the inputs on which each of them is exact."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.log_attention import Chunked, log_attention
from heinsen_jax.ops.log_attention.chunked import measure
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from tests.ops.log_attention.cases import assert_within

pytestmark = pytest.mark.usefixtures("as_users_compile")

DEFAULT = Chunked()
ALWAYS_FIRST = Chunked(exponent_budget=math.inf)
ALWAYS_LAST = Chunked(exponent_budget=-1.0)
TOKENS = np.arange(128, dtype=np.float32)[:, None, None]


def inputs(seed: int = 0, key_slope: float = 0.0, value_slope: float = 0.0):
    """query [B, T, N, K], key [B, T, G, K], log_value [B, T, G, V]"""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, 128, 4, 4)).astype(np.float32)
    key = rng.standard_normal((2, 128, 2, 4)).astype(np.float32)
    log_value = rng.standard_normal((2, 128, 2, 3)).astype(np.float32)
    return query, key + np.float32(key_slope) * TOKENS, log_value + np.float32(value_slope) * TOKENS


@partial(jax.jit, static_argnames="implementation")
def value_and_gradients(query, key, log_value, implementation):
    def loss(query, key, log_value):
        log_y = log_attention(query, key, log_value, implementation=implementation)
        return jnp.sum(jnp.sin(log_y)), log_y

    (_, log_y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(query, key, log_value)
    return log_y, gradients


@partial(jax.jit, static_argnames="implementation")
def value(query, key, log_value, implementation):
    return log_attention(query, key, log_value, implementation=implementation)


def in_float64(arrays):
    with jax.enable_x64(True):
        return value_and_gradients(*(x.astype(np.float64) for x in arrays), "reference")


def chosen_tier(query, key, value, is_log=True, **keywords) -> int:
    tokens = Inputs(query.reshape(2, 128, 2, 2, 4), key, value, **keywords)
    nothing = jnp.full((4, 4, 3), -jnp.inf if is_log else 0.0)
    state = Averages(jnp.full((4, 4), -jnp.inf), nothing)
    plan = DEFAULT.plan(tokens, is_log=is_log)
    return int(jax.jit(partial(measure, plan))(tokens, state).tier)


CHOICES = {
    "ordinary": ({}, 0),
    "keys rise a little": ({"key_slope": 0.8}, 0),
    "keys fall": ({"key_slope": -10}, 0),
    "keys rise inside a chunk": ({"key_slope": 10}, 1),
    "both, each alone within range": ({"key_slope": 0.8, "value_slope": 0.3}, 1),
    "log-values span too much": ({"value_slope": 10}, 1),
    "log-values span too much downward": ({"value_slope": -10}, 1),
    "both": ({"key_slope": 10, "value_slope": 10}, 1),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name == "keys rise a little"))
        for name in CHOICES
    ],
)
def test_the_cheapest_tier_that_is_exact_is_chosen(name):
    slopes, tier = CHOICES[name]
    arrays = inputs(**slopes)
    assert chosen_tier(*arrays) == tier
    log_y, gradients = value_and_gradients(*arrays, DEFAULT)
    expected, expected_gradients = in_float64(arrays)
    std = max(np.std(x) for x in arrays)
    assert_within(log_y, expected, 5e-6 * (1 + np.abs(expected) + std))
    size = max(np.max(np.abs(x)) for x in arrays)
    have, want = (np.concatenate([np.ravel(x) for x in g]) for g in (gradients, expected_gradients))
    assert np.linalg.norm(have - want) <= (5e-6 + 1e-6 * size) * np.linalg.norm(want)


def test_values_in_linear_space_never_need_log_space():
    query, key, value = inputs(value_slope=1e30)
    assert chosen_tier(query, key, value, is_log=False) == 1
    assert chosen_tier(query, key, value / 1e30, is_log=False) == 0
    assert chosen_tier(query, key + 10 * TOKENS, value / 1e30, is_log=False) == 1


def test_decay_and_segments_affect_the_choice():
    arrays = inputs()
    gentle, strong = (np.full((2, 128, 2, 1), x, np.float32) for x in (-0.5, -5.0))
    assert chosen_tier(*arrays, log_decay=gentle) == 0
    assert chosen_tier(*arrays, log_decay=strong) == 1
    assert chosen_tier(*arrays, log_decay=gentle - np.inf) == 1
    starts = np.zeros((2, 128), bool)
    starts[:, 20] = True
    assert chosen_tier(*arrays, starts=starts) == 0
    query, key, log_value = arrays
    high = np.where(np.arange(128) < 20, 100, 0)[:, None, None].astype(np.float32)
    assert chosen_tier(query, key + high, log_value) == 0
    assert chosen_tier(query, key + high, log_value, starts=starts) == 1


@pytest.mark.parametrize("padding", [1, 60, 65])
def test_padding_on_the_left_is_fast(padding):
    """Queries before the first key have empty sums, which nothing makes inexact."""
    query, key, log_value = inputs()
    key[:, :padding] = -np.inf
    assert chosen_tier(query, key, log_value) == 0
    key[:, padding:] += (10 * TOKENS)[padding:]
    assert chosen_tier(query, key, log_value) == 1


def test_log_zero_has_no_span():
    query, key, log_value = inputs()
    log_value[:, ::2] = -np.inf
    assert chosen_tier(query, key, log_value) == 0
    log_value[:] = -np.inf
    assert chosen_tier(query, key, log_value) == 0


@pytest.mark.parametrize("name", ["keys rise inside a chunk", "log-values span too much"])
def test_products_alone_fail_on_these_inputs(name):
    """If this fails, the exact tier is no longer needed."""
    arrays = inputs(**CHOICES[name][0])
    log_y = value(*arrays, ALWAYS_FIRST)
    expected, _ = in_float64(arrays)
    assert not np.allclose(log_y, expected, atol=1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ALWAYS_FIRST, id="first", marks=pytest.mark.nightly),
        pytest.param(ALWAYS_LAST, id="last"),
    ],
)
def test_every_tier_is_exact_on_moderate_inputs(options):
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, options)
    expected, expected_gradients = in_float64(arrays)
    assert_within(log_y, expected, 5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize("slope", [0.3, 0.6, 0.7, 0.8])
def test_products_are_exact_where_they_are_chosen(slope):
    """Exact up to the limit, including gradients: exponent_budget leaves enough margin."""
    arrays = inputs(key_slope=slope)
    assert chosen_tier(*arrays) == 0
    log_y, gradients = value_and_gradients(*arrays, DEFAULT)
    expected, expected_gradients = in_float64(arrays)
    assert_within(log_y, expected, 5e-6 * (1 + np.abs(expected)))
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 1e-5 * np.max(np.abs(want)))


def test_one_unsafe_block_leaves_the_others_to_products():
    """Tiers are chosen block by block, so that one outlier does not slow down a whole sequence."""
    query, key, log_value = inputs()
    key = key.copy()
    key[:, 100:] += 1e4
    log_y = value(query, key, log_value, Chunked(32, 64))
    fast = Chunked(chunk_size=32, block_size=64, exponent_budget=math.inf)
    fast_log_y = value(query, key, log_value, fast)
    np.testing.assert_array_equal(log_y[:, :64], fast_log_y[:, :64])
    expected, _ = in_float64((query, key, log_value))
    assert_within(log_y, expected, 5e-6 * 1e4)


def test_blocks_continue_from_the_states_before_them():
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, Chunked(32, 64))
    expected, expected_gradients = value_and_gradients(*arrays, DEFAULT)
    np.testing.assert_allclose(log_y, expected, atol=5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((20, 1000), "chunk_size must be a multiple of 16, got 20"),
        ((64, 64, None, 0.7, None, "float16"), "matmul_dtype must be .* got 'float16'"),
        ((64, 64, None, 0.7, None, jnp.bfloat16), 'matmul_dtype must be "bfloat16", "float32"'),
        ((0, 64), "chunk_size must be a multiple of 16, got 0"),
        ((64, 100), "block_size must be a multiple of chunk_size=64, got 100"),
        ((64, 0), "block_size must be a multiple of chunk_size=64, got 0"),
    ],
)
def test_invalid_sizes_raise(sizes, message):
    with pytest.raises(ValueError, match=message):
        Chunked(*sizes)


@partial(jax.jit, static_argnames="implementation")
def with_decay(query, key, log_value, log_decay, implementation):
    """log Y, and gradients with respect to all arrays."""

    def call(*arrays):
        *tokens, log_decay = arrays
        return log_attention(*tokens, log_decay=log_decay, implementation=implementation)

    log_y, pullback = jax.vjp(call, query, key, log_value, log_decay)
    return log_y, pullback(jnp.cos(log_y))


@pytest.mark.parametrize("rate", [0.1, 3.0], ids=["mild", "strong"])
def test_the_exact_tier_supports_decay_by_feature(rate):
    """Weak decay is split between the factors of a product; strong decay is added term by term."""
    query, key, log_value = inputs()
    decay = -rate * np.random.default_rng(1).exponential(size=key.shape).astype(np.float32)
    arrays = query, key, log_value, decay
    log_y, gradients = with_decay(*arrays, ALWAYS_LAST)
    with jax.enable_x64(True):
        expected, expected_gradients = with_decay(
            *(x.astype(np.float64) for x in arrays), "reference"
        )
    assert_within(log_y, expected, 2e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 2e-6 * np.max(np.abs(want)))


@pytest.mark.nightly
@pytest.mark.usefixtures("x64")
def test_float32_with_segments_stays_float32_beside_float64():
    arrays = [jnp.asarray(x) for x in inputs()]
    segment_ids = jnp.asarray(np.repeat([[0, 1]], 64, 1).repeat(2, 0))
    log_y, state = log_attention(
        *arrays, segment_ids=segment_ids, return_state=True, implementation="chunked"
    )
    assert {x.dtype for x in (log_y, state.log_s, state.log_z)} == {np.dtype(np.float32)}


@pytest.mark.nightly
def test_parallel_scans_equal_sequential_ones():
    """As on accelerators; `forms_test.py` has further tests."""
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, Chunked(16, 64, parallel_scan=True))
    expected, expected_gradients = value_and_gradients(*arrays, DEFAULT)
    assert_within(log_y, expected, 5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))
