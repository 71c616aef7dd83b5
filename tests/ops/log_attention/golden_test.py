"""Against results of the original PyTorch implementation, whose layout is [B, H, n, d]."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import LogAttentionState, heinsen_attention, log_attention
from tests.ops.log_attention.cases import (
    FAST,
    IMPLEMENTATIONS,
    SCAN_NIGHTLY,
    Inputs,
    assert_gradients_within,
    assert_within,
    differentiate,
)

SCALES = (1, 10, 50, 200)
each_scale = pytest.mark.parametrize("scale", SCALES)
but_scan = pytest.mark.parametrize("implementation", SCAN_NIGHTLY)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture
def case(golden, scale):
    arrays = golden("log_attention")
    prefix = f"s{scale}/"
    shared = {name: x for name, x in arrays.items() if name.startswith("cotangent")}
    return shared | {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def ours(x: np.ndarray) -> np.ndarray:
    """[..., H, n, d] -> [..., n, H, d]"""
    return np.swapaxes(x, -2, -3)


def inputs_of(case, query: str = "Q") -> Inputs:
    groups, key_depth, value_depth = 2, 4, 5
    empty = LogAttentionState.empty((2,), groups, key_depth, value_depth, jnp.result_type(float))
    return Inputs(ours(case[query]), ours(case["K"]), ours(case["log_V"]), empty)


def gradients_of(case, kind: str) -> Inputs:
    return Inputs(*(ours(case[f"{kind}/d{name}"]) for name in ("Q", "K", "log_V")), state=None)


def run(case, kind: str, implementation: str, dtype: type = np.float64):
    is_causal = kind == "causal"
    inputs = inputs_of(case, "Q" if is_causal else "Q_nc")
    zeros = jax.tree.map(jnp.zeros_like, inputs.state)
    result = differentiate(
        jax.tree.map(lambda x: x.astype(dtype), inputs),
        implementation,
        is_causal=is_causal,
        cotangents=(ours(case[f"cotangent_{kind}"]), zeros),
    )
    return result._replace(gradients=result.gradients._replace(state=None))


@pytest.mark.usefixtures("x64")
@each_scale
@but_scan
@pytest.mark.parametrize("kind", ["causal", "noncausal"])
def test_values_and_gradients(case, kind, implementation):
    result = run(case, kind, implementation)
    assert_within(result.output, ours(case[f"{kind}/log_Y"]), 1e-10, "log Y")
    assert_gradients_within(result.gradients, gradients_of(case, kind), 1e-10)


@pytest.mark.usefixtures("x64")
@each_scale
@each_implementation
def test_causal_values_in_80_bits_and_end_state(case, implementation):
    result = run(case, "causal", implementation)
    assert_within(result.output, ours(case["causal/log_Y_ref80"]), 1e-10, "log Y")
    assert_within(result.state.log_s, case["causal/H_S_end"][:, :, 0], 1e-10, "H_S")
    assert_within(result.state.log_z, case["causal/H_Z_end"][:, :, 0, :, 0], 1e-10, "H_Z")


@pytest.mark.nightly
@each_scale
@each_implementation
@pytest.mark.parametrize("kind", ["causal", "noncausal"])
def test_values_and_gradients_in_float32(case, kind, implementation):
    result = run(case, kind, implementation, np.float32)
    expected = ours(case[f"{kind}/log_Y"])
    assert_within(result.output, expected, 5e-6 * (1 + np.abs(expected) + scale_of(case)), "log Y")
    assert_gradients_within(result.gradients, gradients_of(case, kind), 5e-6 * (1 + scale_of(case)))


def scale_of(case) -> float:
    return float(np.std(case["K"]))


@partial(jax.jit, static_argnames=("implementation", "function", "is_causal"))
def step(inputs: Inputs, implementation, function=log_attention, is_causal=True):
    return function(
        *inputs[:3],
        initial_state=inputs.state,
        is_causal=is_causal,
        return_state=True,
        implementation=implementation,
    )


def part(inputs: Inputs, tokens: slice, state: LogAttentionState | None) -> Inputs:
    return Inputs(*(x[:, tokens] for x in inputs[:3]), state=state)


@pytest.mark.usefixtures("x64")
@each_scale
@pytest.mark.parametrize(
    ("implementation", "name", "size"),
    [
        ("chunked", "stream3", 3),
        ("scan", "stream1", 1),
        *(
            pytest.param(implementation, name, size, marks=pytest.mark.nightly)
            for implementation, name, size in [
                ("reference", "stream3", 3),
                ("scan", "stream3", 3),
                ("reference", "stream1", 1),
                ("chunked", "stream1", 1),
            ]
        ),
    ],
)
def test_streams_and_their_states(case, implementation, name, size):
    inputs, outputs, state = inputs_of(case), [], None
    for index, start in enumerate(range(0, 10, size)):
        tokens = slice(start, min(start + size, 10))
        log_y, state = step(part(inputs, tokens, state), implementation)
        outputs.append(log_y)
        assert_within(state.log_s, case[f"causal/{name}/H_S"][index, :, :, 0], 1e-10, "H_S")
        assert_within(state.log_z, case[f"causal/{name}/H_Z"][index, :, :, 0, :, 0], 1e-10, "H_Z")
    assert_within(np.concatenate(outputs, 1), ours(case[f"causal/{name}/log_Y"]), 1e-10, "log Y")


@pytest.mark.nightly
@pytest.mark.usefixtures("x64")
@each_scale
@pytest.mark.parametrize("implementation", FAST)
def test_backpropagation_truncated_at_the_state(case, implementation):
    inputs = inputs_of(case)._replace(state=None)

    def second_outputs(inputs: Inputs):
        _, state = step(part(inputs, slice(0, 6), None), implementation)
        state = jax.lax.stop_gradient(state)
        return step(part(inputs, slice(6, 10), state), implementation)[0]

    _, pullback = jax.vjp(second_outputs, jax.tree.map(jnp.asarray, inputs))
    (gradients,) = pullback(jnp.asarray(ours(case["cotangent_causal"])[:, 6:]))
    assert_gradients_within(gradients, gradients_of(case, "causal/tbptt6"), 1e-10)
    np.testing.assert_array_equal(gradients.key[:, :6], 0)


@pytest.mark.usefixtures("x64")
@each_scale
def test_tokens_added_one_by_one_with_all_queries(case):
    inputs = inputs_of(case, "Q_nc")
    by_call = LogAttentionState.empty((2,), 2, 4, 5, jnp.float64)
    state = by_call
    for index, expected in enumerate(case["noncausal/add_token/log_Y"]):
        token = slice(index, index + 1)
        key, log_value = jnp.asarray(inputs.key[:, token]), jnp.asarray(inputs.value[:, token])
        state = state.absorb(key, log_value)
        assert_within(state.attend(jnp.asarray(inputs.query)), ours(expected), 1e-10)
        addition = Inputs(inputs.query, key, log_value, by_call)
        log_y, by_call = step(addition, "chunked", is_causal=False)
        assert_within(log_y, ours(expected), 1e-10)


@pytest.fixture
def toy(golden):
    return golden("log_attention_toy")


def toy_inputs(toy, key: str = "K") -> Inputs:
    query, key, log_value = (toy[name][:, None] for name in ("Q", key, "log_V"))
    return Inputs(
        query, key, log_value, LogAttentionState.empty((), 1, 4, 4, jnp.result_type(float))
    )


@pytest.mark.usefixtures("x64")
@each_implementation
def test_small_example(toy, implementation):
    log_y, _ = step(toy_inputs(toy), implementation)
    assert_within(log_y[:, 0], toy["log_Y"], 1e-10)
    np.testing.assert_allclose(jnp.exp(log_y[:, 0]), toy["Y_quadratic"], rtol=1e-10)
    inputs = toy_inputs(toy)
    inputs = inputs._replace(value=np.exp(inputs.value), state=None)
    y, _ = step(inputs, implementation, heinsen_attention)
    np.testing.assert_allclose(y[:, 0], toy["Y_quadratic"], rtol=1e-10)


@pytest.mark.usefixtures("x64")
@each_implementation
def test_small_example_with_masked_keys(toy, implementation):
    """Queries 0 and 1 have no visible keys: NaN in the original, log 0 with zero gradients here."""
    expected = toy["masked/log_Y"]
    assert np.isnan(expected[:2]).all()
    result = differentiate(toy_inputs(toy, "masked/K"), implementation)
    np.testing.assert_array_equal(result.output[:2], -np.inf)
    assert_within(result.output[2:, 0], expected[2:], 1e-10)
    for gradient in jax.tree.leaves(result.gradients):
        assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(result.gradients.query[:2], 0)
    for token in (0, 1, 5):
        np.testing.assert_array_equal(result.gradients.key[token], 0)
        np.testing.assert_array_equal(result.gradients.value[token], 0)


@pytest.mark.usefixtures("x64")
@each_implementation
def test_empty_state_is_log_zero_not_zero(toy, implementation):
    log_y, _ = step(toy_inputs(toy), implementation)
    np.testing.assert_allclose(log_y[0, 0], toy["log_V"][0], atol=1e-12)
    wrong = toy["wrong_H0_zero/log_Y"]
    assert np.max(np.abs(log_y[0, 0] - wrong[0])) > 0.1
    zeros = jax.tree.map(jnp.zeros_like, toy_inputs(toy).state)
    as_if, _ = step(toy_inputs(toy)._replace(state=zeros), implementation)
    assert_within(as_if[:, 0], wrong, 1e-10, "eq. (7) read literally")
