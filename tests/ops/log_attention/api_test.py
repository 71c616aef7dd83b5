"""All implementations against the definition in float64, and properties of the public functions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops import (
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from tests.ops.log_attention.cases import (
    CASES,
    FAST,
    IMPLEMENTATIONS,
    SCAN_NIGHTLY,
    Case,
    Inputs,
    assert_as_exact,
    assert_gradients_within,
    assert_within,
    differentiate,
    differentiate_mean,
    mean_oracle,
    oracle,
    random_inputs,
)

SEEDS = st.integers(0, 2**32 - 1)
STDS = st.floats(0, 3).map(lambda exponent: 10.0**exponent)
CASE = Case(20, batch=(2,), num_heads=4, num_kv_heads=2)
MEAN_CASES = [CASES[i] for i in (1, 4, 7, 9)]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
but_scan = pytest.mark.parametrize("implementation", SCAN_NIGHTLY)
each_fast = pytest.mark.parametrize("implementation", FAST)


def with_case(case: Case, implementation: str) -> Any:
    marks = [] if case.length in (1, 65) else [pytest.mark.nightly]
    return pytest.param(case, implementation, marks=marks, id=f"T{case.length}-{implementation}")


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        *(with_case(case, "chunked") for case in CASES),
        *(with_case(case, "scan") for case in CASES[::3]),
    ],
)
@settings(max_examples=8)
@given(seed=SEEDS, std=STDS)
def test_agrees_with_the_definition(case, implementation, seed, std):
    inputs = random_inputs(case, seed, std)
    actual = differentiate(inputs, implementation, is_causal=case.is_causal)
    assert_as_exact(actual, oracle(inputs, is_causal=case.is_causal), std)


@pytest.mark.nightly
@each_fast
@pytest.mark.parametrize("case", MEAN_CASES, ids=lambda case: f"T{case.length}")
@settings(max_examples=8)
@given(seed=SEEDS, std=STDS)
def test_heinsen_attention_agrees_with_the_definition(case, implementation, seed, std):
    inputs = random_inputs(case, seed, std)
    value = random_inputs(case, seed + 1).value
    inputs = inputs._replace(value=value, state=None)
    output, gradients = differentiate_mean(inputs, implementation, is_causal=case.is_causal)
    expected, expected_gradients = mean_oracle(inputs, is_causal=case.is_causal)
    assert_within(output, expected, 5e-6 * (1 + std))
    assert_gradients_within(gradients, expected_gradients, 5e-6 * (1 + std))


@partial(jax.jit, static_argnames=("implementation", "function", "is_causal", "return_state"))
def call(inputs: Inputs, implementation=None, function=log_attention, **keywords) -> Any:
    *arrays, state = inputs
    return function(*arrays, initial_state=state, implementation=implementation, **keywords)


@each_implementation
def test_agrees_with_a_second_definition(implementation):
    """Check the oracle against eq. (1) step by step: exp, product, log, softmax, product."""
    query, key, log_value, _ = inputs = random_inputs(Case(6, num_heads=2), 0)
    scores = np.log(np.exp(query.swapaxes(0, 1)) @ np.exp(key[:, 0].T))
    weights = np.exp(scores) * np.tri(6)
    weights /= weights.sum(-1, keepdims=True)
    expected = (weights @ np.exp(log_value[:, 0])).swapaxes(0, 1)
    np.testing.assert_allclose(np.exp(call(inputs, implementation)), expected, rtol=2e-5)


@each_implementation
@pytest.mark.parametrize("std", [1.0, pytest.param(300.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("last", [0, 7, 18])
def test_the_past_has_no_gradient_to_the_future(implementation, std, last):
    inputs = random_inputs(CASE, 0, std)
    output = np.zeros((*inputs.query.shape[:-1], inputs.value.shape[-1]), np.float32)
    output[:, : last + 1] = 1
    state = LogAttentionState.empty(CASE.batch, 2, CASE.key_depth, CASE.value_depth)
    zeros = jax.tree.map(jnp.zeros_like, state)
    result = differentiate(inputs._replace(state=state), implementation, cotangents=(output, zeros))
    for gradient in result.gradients[:3]:
        np.testing.assert_array_equal(gradient[:, last + 1 :], 0)
    assert np.all(result.gradients.value[:, 0])


@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
def test_the_past_has_no_gradient_to_the_future_across_chunks(function):
    inputs = random_inputs(CASES[9], 0)._replace(state=None)

    @jax.jit
    def pullback(cotangent, *arrays):
        return jax.vjp(lambda *arrays: function(*arrays, implementation="chunked"), *arrays)[1](
            cotangent
        )

    for last in (0, 62, 63, 64, 127):
        cotangent = np.zeros((*inputs.query.shape[:-1], inputs.value.shape[-1]), np.float32)
        cotangent[: last + 1] = 1
        gradients = pullback(cotangent, *inputs[:3])
        for gradient in gradients:
            np.testing.assert_array_equal(gradient[last + 1 :], 0)
        assert np.all(gradients[2][0])


STREAM = Case(5, num_heads=2)


def streamed(step, inputs: Inputs, borders: list[int]):
    outputs, state = [], inputs.state
    for start, stop in zip([0, *borders], [*borders, len(inputs.key)], strict=True):
        output, state = step(Inputs(*(x[start:stop] for x in inputs[:3]), state=state))
        outputs.append(output)
    return np.concatenate(outputs), state


@pytest.mark.nightly
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@each_fast
def test_any_split_streams_to_the_same_result(function, implementation):
    step = partial(call, implementation=implementation, function=function, return_state=True)
    kind = LogAttentionState if function is log_attention else HeinsenAttentionState
    empty = kind.empty((), 1, STREAM.key_depth, STREAM.value_depth)

    @settings(max_examples=25)
    @given(SEEDS, st.lists(st.integers(0, STREAM.length), max_size=6).map(sorted))
    def check(seed, borders):
        inputs = random_inputs(STREAM, seed)._replace(state=empty)
        expected, expected_state = call(inputs, "reference", function, return_state=True)
        output, state = streamed(step, inputs, borders)
        assert_within(output, expected, 1e-5)
        for have, want in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
            assert_within(have, want, 1e-5)

    check()


@pytest.mark.parametrize(
    "borders", [pytest.param([64], marks=pytest.mark.nightly), [100, 131]], ids=str
)
def test_splits_inside_and_at_chunk_boundaries(borders):
    inputs = random_inputs(Case(200), 0)
    expected, expected_state = call(inputs, "scan", return_state=True)
    step = partial(call, implementation="chunked", return_state=True)
    output, state = streamed(step, inputs, borders)
    assert_within(output, expected, 1e-5)
    assert_within(state.log_s, expected_state.log_s, 1e-5)


@pytest.mark.parametrize("implementation", [None, *SCAN_NIGHTLY])
def test_jit_equals_eager(implementation):
    inputs = random_inputs(Case(3), 0)
    eager = log_attention(*inputs[:3], implementation=implementation)
    jitted = call(inputs, implementation)
    np.testing.assert_allclose(jitted, eager, rtol=1e-6, atol=1e-6)


@but_scan
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
def test_half_precision_inputs_and_outputs(function, implementation):
    inputs = random_inputs(CASE, 0)
    half = Inputs(*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]))
    output, state = call(half, implementation, function, return_state=True)
    assert output.dtype == jnp.bfloat16
    assert state.log_z.dtype == jnp.float32
    assert (state.log_s if function is log_attention else state.mean).dtype == jnp.float32

    same = Inputs(*(np.asarray(x, np.float32) for x in half[:3]))
    expected = np.asarray(call(same, implementation, function))
    rounding = 2**-8 * (np.max(np.abs(expected)) if implementation == "chunked" else 0)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected, rtol=2**-8, atol=rounding)
    exact = np.asarray(call(inputs, "reference", function))
    assert np.max(np.abs(np.asarray(output, np.float32) - exact)) < 0.05


@but_scan
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
def test_grouped_heads_equal_repeated_heads(function, implementation):
    inputs = random_inputs(CASE, 0)
    repeated = inputs._replace(
        key=np.repeat(inputs.key, 2, -2), value=np.repeat(inputs.value, 2, -2)
    )
    np.testing.assert_allclose(
        call(inputs, implementation, function), call(repeated, implementation, function), atol=2e-6
    )


@but_scan
@pytest.mark.parametrize("is_causal", [True, False])
def test_heinsen_attention_of_positive_values_is_exp_of_log_attention(implementation, is_causal):
    inputs = random_inputs(CASE, 0)
    log_y = call(inputs, implementation, is_causal=is_causal)
    positive = inputs._replace(value=np.exp(inputs.value))
    y = call(positive, implementation, heinsen_attention, is_causal=is_causal)
    np.testing.assert_allclose(y, np.exp(log_y), rtol=1e-5)


@partial(jax.jit, static_argnames=("implementation", "mapped"))
def value_and_gradients(query, key, log_value, implementation, mapped=False):
    def loss(*arrays):
        output = log_attention(*arrays, implementation=implementation)
        return jnp.sum(jnp.sin(output / 100)), output

    gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, output), gradients = (jax.vmap(gradient) if mapped else gradient)(query, key, log_value)
    return output, gradients


RISES = st.sampled_from([0.0, 1.0, 4.0, 4.8, 5.2, 20.0, 500.0])  # nats per token, of 20


@pytest.mark.nightly
@each_implementation
def test_vmap_adds_a_batch_axis(implementation):
    """Even where `vmap` converts the choice of a tier into a selection between both results."""

    @settings(max_examples=30)
    @given(SEEDS, STDS, RISES, RISES)
    def check(seed, std, key_rise, value_rise):
        query, key, log_value, _ = random_inputs(CASE, seed, std)
        tokens = np.arange(CASE.length, dtype=np.float32)[None, :, None, None]
        arrays = query, key + np.float32(key_rise) * tokens, log_value + value_rise * tokens
        arrays = tuple(np.float32(x) for x in arrays)
        output, gradients = value_and_gradients(*arrays, implementation)
        mapped_output, mapped_gradients = value_and_gradients(*arrays, implementation, mapped=True)
        unit = 5e-6 * max(1 + float(np.max(np.abs(x))) for x in arrays)
        assert_within(mapped_output, output, unit)
        for have, want in zip(mapped_gradients, gradients, strict=True):
            assert_within(have, want, unit)

    check()


@pytest.mark.nightly
@each_implementation
def test_checkpoint_has_no_effect(implementation):
    inputs = random_inputs(CASE, 0)

    def loss(*arrays):
        return jnp.sum(jnp.sin(log_attention(*arrays, implementation=implementation)))

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs[:3])
    actual = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*inputs[:3])
    for have, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5)


@each_implementation
@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
def test_no_sources(function, implementation):
    query = jnp.zeros((4, 2, 3))
    nothing = jnp.zeros((0, 2, 3))
    output = function(query, nothing, nothing, is_causal=False, implementation=implementation)
    expected = -np.inf if function is log_attention else 0
    np.testing.assert_array_equal(output, np.full((4, 2, 3), expected))
    empty = function(nothing, nothing, nothing, implementation=implementation)
    assert empty.shape == (0, 2, 3)
