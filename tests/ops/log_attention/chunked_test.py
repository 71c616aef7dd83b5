"""The choice between tiers, and what each of them can serve alone."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops.log_attention import (
    Chunked,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from heinsen_jax.ops.log_attention.chunked import _log_tiers, _mean_tiers
from heinsen_jax.ops.log_attention.one_level import Form
from heinsen_jax.ops.log_attention.tokens import Tokens
from tests.ops.log_attention.cases import assert_within

pytestmark = [pytest.mark.usefixtures("as_users_compile"), pytest.mark.slow]

DEFAULT = Chunked()
ALWAYS_FIRST = Chunked(safe_range=math.inf)
ALWAYS_LAST = Chunked(safe_range=-1.0)
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


def in_float64(arrays):
    with jax.enable_x64(True):
        return value_and_gradients(*(x.astype(np.float64) for x in arrays), "reference")


def chosen_tier(query, key, log_value, kind=_log_tiers, **keywords) -> int:
    tokens = Tokens(query.reshape(2, 128, 2, 2, 4), key, log_value, **keywords)
    state = LogAttentionState.empty((2,), 2, 4, 3)
    state = state if kind is _log_tiers else state.to_means()
    tiers = kind(DEFAULT, Form(64), block_size=128, recompute=False)
    return int(jax.jit(tiers.choose)(tokens, state)[0])


CHOICES = {
    "ordinary": ({}, 0),
    "keys rise a little": ({"key_slope": 0.8}, 0),
    "keys fall": ({"key_slope": -10}, 0),
    "keys rise inside a chunk": ({"key_slope": 10}, 1),
    "both, each alone within range": ({"key_slope": 0.8, "value_slope": 0.3}, 1),
    "log-values span too much": ({"value_slope": 10}, 2),
    "log-values span too much downward": ({"value_slope": -10}, 2),
    "both": ({"key_slope": 10, "value_slope": 10}, 2),
}


@pytest.mark.parametrize("name", [*CHOICES])
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
    assert chosen_tier(query, key, value, _mean_tiers) == 1
    assert chosen_tier(query, key, value / 1e30, _mean_tiers) == 0
    assert chosen_tier(query, key + 10 * TOKENS, value / 1e30, _mean_tiers) == 1


def test_decay_and_documents_count_for_the_choice():
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


def test_log_zero_spans_nothing():
    query, key, log_value = inputs()
    log_value[:, ::2] = -np.inf
    assert chosen_tier(query, key, log_value) == 0
    log_value[:] = -np.inf
    assert chosen_tier(query, key, log_value) == 0


@pytest.mark.parametrize("name", ["keys rise inside a chunk", "log-values span too much"])
def test_products_alone_fail_there(name):
    """If this no longer holds the other tiers can go."""
    arrays = inputs(**CHOICES[name][0])
    log_y, _ = value_and_gradients(*arrays, ALWAYS_FIRST)
    expected, _ = in_float64(arrays)
    assert not np.allclose(log_y, expected, atol=1)


@pytest.mark.parametrize("options", [ALWAYS_FIRST, ALWAYS_LAST], ids=["first", "last"])
def test_every_tier_serves_ordinary_inputs(options):
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, options)
    expected, expected_gradients = in_float64(arrays)
    assert_within(log_y, expected, 5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize("slope", [0.3, 0.6, 0.7, 0.8])
def test_products_serve_all_that_they_are_chosen_for(slope):
    """Right up to the limit, the gradient included: safe_range leaves enough margin."""
    arrays = inputs(key_slope=slope)
    assert chosen_tier(*arrays) == 0
    log_y, gradients = value_and_gradients(*arrays, DEFAULT)
    expected, expected_gradients = in_float64(arrays)
    assert_within(log_y, expected, 5e-6 * (1 + np.abs(expected)))
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 1e-5 * np.max(np.abs(want)))


@pytest.mark.parametrize(
    "options",
    [
        Chunked(16, 128),
        Chunked(32, 64),
        Chunked(32, 64, recompute=False),
        Chunked(16, 16, safe_range=-1),
        Chunked(side_by_side=True),
        Chunked(16, 64, side_by_side=True),
        Chunked(32, 128, recompute=False, side_by_side=True),
    ],
    ids=str,
)
def test_sizes_and_what_is_kept_do_not_change_the_result(options):
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, options)
    expected, expected_gradients = value_and_gradients(*arrays, DEFAULT)
    np.testing.assert_allclose(log_y, expected, atol=5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


def test_one_unsafe_block_leaves_the_others_to_products():
    """The choice is made block by block, so one outlier does not slow a whole sequence."""
    query, key, log_value = inputs()
    key = key.copy()
    key[:, 100:] += 1e4
    log_y, _ = value_and_gradients(query, key, log_value, Chunked(32, 64))
    fast = Chunked(chunk_size=32, block_size=64, safe_range=math.inf)
    fast_log_y, _ = value_and_gradients(query, key, log_value, fast)
    np.testing.assert_array_equal(log_y[:, :64], fast_log_y[:, :64])
    expected, _ = in_float64((query, key, log_value))
    assert_within(log_y, expected, 5e-6 * 1e4)


@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.parametrize("name", ["log_decay", "segment_ids", "both"])
@given(length=st.integers(1, 70), std=st.sampled_from([0.1, 1.0, 5.0]), seed=st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
def test_states_side_by_side_are_those_one_by_one(function, name, length, std, seed):
    """Padded to one length, so that examples share what is compiled."""
    keys = jax.random.split(jax.random.key(seed), 6)
    query, key, value = std * jax.random.normal(keys[0], (3, 1, 70, 2, 3))
    options: Any = {"key_value_seq_lengths": jnp.full((1,), length)}
    if name != "segment_ids":
        options["log_decay"] = -std * jax.random.exponential(keys[1], (1, 70, 2, 3))
    if name != "log_decay":
        options["segment_ids"] = jnp.cumsum(jax.random.bernoulli(keys[2], 0.1, (1, 70)), 1)
    log_z = jax.random.normal(keys[3], (1, 2, 3))
    state = LogAttentionState(log_z[..., None] + jax.random.normal(keys[4], (1, 2, 3, 3)), log_z)
    have, want = (
        with_pullback(function, implementation, query, key, value, state, options)
        for implementation in (Chunked(16, 80, side_by_side=True), Chunked(16, 80))
    )
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        a, b = (np.exp(x).real if np.iscomplexobj(x) else x for x in (a, b))
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        assert_within(a, b, 3e-5 * (1 + np.max(np.abs(b))))


@partial(jax.jit, static_argnums=(0, 1))
def with_pullback(function, implementation, query, key, value, state, options):
    """Output, state, and the gradient of something of both."""

    def loss(query, key, value, state, options):
        y, after = function(
            query,
            key,
            value,
            initial_state=state,
            return_state=True,
            implementation=implementation,
            **options,
        )
        seen = jnp.where(y == -jnp.inf, 0, jnp.sin(y))
        return jnp.sum(seen) + jnp.sum(jnp.tanh(after.log_z)), (y, after)

    arguments = query, key, value, state
    decay = {name: x for name, x in options.items() if name == "log_decay"}

    def of_floats(*arguments):
        *others, decay = arguments
        return loss(*others, {**options, **decay})

    argnums = tuple(range(5))
    return jax.value_and_grad(of_floats, argnums, has_aux=True)(*arguments, decay)


@pytest.mark.parametrize("keywords", [(), ("log_decay", "segment_ids")])
def test_an_accelerator_gets_few_large_operations(keywords, monkeypatch):
    """Nothing is done chunk by chunk but by the tiers for extreme inputs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arrays = [jax.ShapeDtypeStruct((1, 65_536, 24, 32), jnp.float32)] * 3
    places: Any = {"log_decay": ((1, 65_536, 24), jnp.float32), "segment_ids": ((1, 65_536), int)}
    options = {name: jax.ShapeDtypeStruct(*places[name]) for name in keywords}
    assert DEFAULT.form(Tokens(*[jnp.zeros((1, 1, 1, 128))] * 3)).chunk_size == 128

    def operations(implementation):
        def loss(*arrays, **options):
            return jnp.sum(log_attention(*arrays, implementation=implementation, **options))

        program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays, **options).jaxpr
        return operations_of_first_tier(program.jaxpr)

    assert "scan" not in operations(DEFAULT)
    assert "scan" in operations(Chunked(side_by_side=False))


def operations_of_first_tier(program: Any) -> set[str]:
    """Names of all primitives, but of the first branch of conditions only."""
    found = set()
    for equation in program.eqns:
        found.add(equation.primitive.name)
        inner = dict(equation.params)
        if "branches" in inner:
            inner["branches"] = inner["branches"][0]
        programs = (getattr(x, "jaxpr", x) for x in inner.values())
        found = found.union(*(operations_of_first_tier(x) for x in programs if hasattr(x, "eqns")))
    return found


@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_half_precision_rounds_factors_alone(function, side_by_side):
    """By bfloat16's 0.4%, some more in gradients, which are differences; states stay float32."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    implementation = Chunked(32, side_by_side=side_by_side)

    @partial(jax.jit, static_argnums=1)
    def outputs(arrays, implementation):
        def loss(*arrays):
            y, state = function(*arrays, implementation=implementation, return_state=True)
            return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32)))), (y, state)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    (_, (y, state)), gradients = outputs(arrays, implementation)
    assert state.log_z.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arrays]
        (_, (want, want_state)), want_gradients = jax.device_get(outputs(wide, "reference"))
    pairs = zip((y, *gradients), (want, *want_gradients), strict=True)
    for have, expected in pairs:
        error = np.linalg.norm(np.asarray(have, np.float64) - expected)
        assert 1e-5 < error / np.linalg.norm(expected) < 3e-2
    for have, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_allclose(np.exp(np.asarray(have)), np.exp(expected), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((20, 1000), "chunk_size must be a multiple of 16, is 20"),
        ((0, 64), "chunk_size must be a multiple of 16, is 0"),
        ((64, 100), "block_size must be a multiple of chunk_size=64, is 100"),
        ((64, 0), "block_size must be a multiple of chunk_size=64, is 0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        Chunked(*sizes)
