from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops.linear_recurrence import (
    RecurrenceState,
    decay_to_end,
    linear_recurrence,
    log_linear_recurrence,
)

pytestmark = pytest.mark.usefixtures("as_users_compile")

INF = float("inf")

linear = jax.jit(linear_recurrence)
log_linear = jax.jit(log_linear_recurrence, static_argnames="axis")


def step_by_step(log_a, log_b, initial=None):
    """h_t = logaddexp(log a_t + h_{t-1}, log b_t), token by token."""
    h = np.full(log_b.shape[-1], -INF) if initial is None else initial.astype(np.float64)
    states = []
    for a, b in zip(log_a.astype(np.float64), log_b.astype(np.float64), strict=True):
        h = np.logaddexp(a + h, b)
        states.append(h)
    return np.stack(states)


@pytest.mark.usefixtures("x64")
def test_position_embedding_of_the_paper(golden):
    case = golden("embed_position")
    zeros = jnp.zeros((2, 6))
    h = log_linear(case["log_coeffs"], case["logits"], initial=zeros)
    np.testing.assert_allclose(h, case["pos_embs"], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_position_embedding_gradients_of_the_paper(golden):
    case = golden("embed_position")

    @jax.jit
    def embed(x, weight, bias):
        u, b = jnp.split(jnp.einsum("btd,ed->bte", x, weight) + bias[None, None], 2, -1)
        log_a = jax.nn.log_sigmoid(u)
        return x + log_linear(log_a, b, initial=jnp.zeros((2, 6)))

    out, pullback = jax.vjp(embed, *(jnp.asarray(case[name]) for name in ("x", "weight", "bias")))
    np.testing.assert_allclose(out, case["out"], rtol=0, atol=1e-10)
    for gradient, name in zip(pullback(jnp.asarray(case["cotangent"])), "xwb", strict=True):
        expected = {"x": "dx", "w": "dweight", "b": "dbias"}[name]
        np.testing.assert_allclose(gradient, case[expected], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("with_initial", [True, False])
def test_gradients_agree_with_autodiff_of_the_definition(with_initial):
    rng = np.random.default_rng(0)
    log_a, log_b, ct = rng.standard_normal((3, 7, 2))
    initial = rng.standard_normal(2)

    @jax.jit
    def definition(log_a, log_b, initial):
        h, states = (initial if with_initial else log_b[0] - 1e3), []
        for a, b in zip(log_a, log_b, strict=True):
            h = jnp.logaddexp(a + h, b)
            states.append(h)
        return jnp.stack(states)

    def tested(log_a, log_b, initial):
        return log_linear(log_a, log_b, initial=initial if with_initial else None)

    arguments = tuple(jnp.asarray(x) for x in (log_a, log_b, initial))
    expected, expected_pullback = jax.vjp(definition, *arguments)
    actual, pullback = jax.vjp(tested, *arguments)
    np.testing.assert_allclose(actual, expected, atol=1e-12)
    for have, want in zip(pullback(ct), expected_pullback(ct), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("decay", [0.0, -0.8, -50.0])
def test_float32_error_does_not_grow_with_length(scale, decay):
    """At T = 8192 at most 5e-6 times the size of the numbers; cumulative sums lose 7.5e-4."""
    rng = np.random.default_rng(1)
    log_a = (decay * rng.uniform(size=(8192, 4))).astype(np.float32)
    log_b = (scale * rng.standard_normal((8192, 4))).astype(np.float32)
    expected = step_by_step(log_a, log_b)
    actual = np.asarray(log_linear(log_a, log_b), np.float64)
    assert np.max(np.abs(actual - expected)) <= 5e-6 * max(scale, 1)


@pytest.mark.nightly
def test_float32_gradient_error_does_not_grow_with_length():
    rng = np.random.default_rng(1)
    arguments = [rng.standard_normal((2000, 4)).astype(np.float32) for _ in range(3)]
    arguments[0] = -np.abs(arguments[0])

    @jax.jit
    def gradients(log_a, log_b, ct):
        return jax.vjp(log_linear, log_a, log_b)[1](ct)

    actual = gradients(*arguments)
    with jax.enable_x64(True):
        expected = gradients(*(x.astype(np.float64) for x in arguments))
    for have, want in zip(map(np.asarray, actual), map(np.asarray, expected), strict=True):
        assert np.max(np.abs(have - want)) <= 5e-6 * np.max(np.abs(want))


@jax.jit
def state_and_gradients(log_a, log_b, initial):
    def total(log_a, log_b):
        h = log_linear(log_a, log_b, initial=initial)
        return jnp.sum(jnp.where(jnp.isneginf(h), 0, h)), h

    (_, h), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(log_a, log_b)
    return h, gradients


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans())
def test_log_zero_coefficients_and_inputs(seed, part, with_initial):
    rng = np.random.default_rng(seed)
    log_a, log_b = rng.standard_normal((2, 12, 3)).astype(np.float32)
    log_a[rng.uniform(size=log_a.shape) < part] = -INF
    log_b[rng.uniform(size=log_b.shape) < part] = -INF
    initial = rng.standard_normal(3).astype(np.float32) if with_initial else None

    h, gradients = state_and_gradients(log_a, log_b, initial)
    np.testing.assert_allclose(h, step_by_step(log_a, log_b, initial), atol=5e-6)
    for gradient, x in zip(gradients, (log_a, log_b), strict=True):
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(np.asarray(gradient)[np.isneginf(x)], 0)


def test_a_coefficient_of_log_zero_resets():
    log_a = np.zeros((6, 1), np.float32)
    log_a[3] = -INF
    log_b = np.arange(6, dtype=np.float32)[:, None]
    h = log_linear(log_a, log_b)
    np.testing.assert_allclose(h[3:], step_by_step(log_a[3:], log_b[3:]), atol=1e-6)
    gradient = jax.jit(jax.grad(lambda b: jnp.sum(log_linear(log_a, b)[3:])))(log_b)
    np.testing.assert_array_equal(gradient[:3], 0)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 9]))
def test_a_carried_state_continues_the_recurrence(seed, split):
    log_a, log_b = np.random.default_rng(seed).standard_normal((2, 10, 3)).astype(np.float32)
    whole = log_linear(log_a, log_b)
    first = log_linear(log_a[:split], log_b[:split])
    second = log_linear(log_a[split:], log_b[split:], initial=first[-1])
    np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=3e-6)


def test_coefficients_may_be_broadcast_over_features():
    log_b = np.random.default_rng(0).standard_normal((2, 10, 3)).astype(np.float32)
    log_a = -np.ones((1, 10, 1), np.float32)
    np.testing.assert_allclose(
        log_linear(log_a, log_b),
        log_linear(np.broadcast_to(log_a, log_b.shape), log_b),
        atol=1e-6,
    )


def test_time_may_be_any_axis():
    log_a, log_b = np.random.default_rng(0).standard_normal((2, 4, 10, 3)).astype(np.float32)
    expected = log_linear(log_a, log_b)
    moved = partial(jnp.moveaxis, source=1, destination=0)
    actual = log_linear(moved(log_a), moved(log_b), axis=0)
    np.testing.assert_allclose(actual, moved(expected), atol=1e-6)


@pytest.mark.parametrize("with_initial", [True, False])
def test_log_form_is_the_log_of_the_linear_form(with_initial):
    a, b = np.random.default_rng(0).uniform(0.1, 1, (2, 20, 3)).astype(np.float32)
    initial = np.asarray([0.5, 1, 2], np.float32) if with_initial else None
    x = linear(a, b, initial=initial)
    log_initial = None if initial is None else np.log(initial)
    h = log_linear(np.log(a), np.log(b), initial=log_initial)
    np.testing.assert_allclose(jnp.exp(h), x, rtol=1e-5)


def test_linear_recurrence_step_by_step():
    a, b = np.random.default_rng(0).standard_normal((2, 20, 3)).astype(np.float32)
    x, expected = np.asarray([1.0, -2.0, 0.0], np.float32), []
    for a_t, b_t in zip(a, b, strict=True):
        x = a_t * x + b_t
        expected.append(x)
    actual = linear(a, b, initial=jnp.asarray([1.0, -2.0, 0.0]))
    np.testing.assert_allclose(actual, np.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_decay_to_the_end_is_that_of_later_tokens():
    decay = jnp.array([[-1.0], [-2.0], [-INF], [-4.0]])
    np.testing.assert_array_equal(decay_to_end(decay, 0).ravel(), [-INF, -INF, -4, 0])


def test_states_of_consecutive_tokens_merge():
    log_a, log_b = (jax.random.normal(jax.random.key(i), (7, 3)) for i in range(2))
    log_a = -jnp.abs(log_a)
    whole = log_linear(log_a, log_b)
    states = [RecurrenceState.of(log_a[part], log_b[part]) for part in (slice(3), slice(3, None))]
    np.testing.assert_allclose(states[0].h, whole[2], rtol=1e-5)
    merged = RecurrenceState.empty((3,)).merge(states[0]).merge(states[1])
    np.testing.assert_allclose(merged.h, whole[-1], rtol=1e-5)
    np.testing.assert_allclose(merged.log_decay, jnp.sum(log_a, 0), rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_coefficients_of_fewer_axes_are_broadcast(batch):
    rng = np.random.default_rng(0)
    log_a = -rng.random((4, 5)).astype(np.float32)
    log_b = rng.standard_normal((batch, 4, 5)).astype(np.float32)
    expected = np.stack([step_by_step(log_a, row) for row in log_b])
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(log_linear_recurrence(log_a, log_b), expected, atol=1e-6)
        actual = linear_recurrence(np.exp(log_a), np.exp(log_b))
    np.testing.assert_allclose(actual, np.exp(expected), rtol=1e-5)


def test_coefficients_and_inputs_of_other_dtypes_are_promoted():
    log_a, log_b = np.full((4, 1), -0.5, np.float32), jnp.ones((4, 2), jnp.bfloat16)
    h = log_linear_recurrence(log_a, log_b)
    assert h.dtype == jnp.float32
    np.testing.assert_allclose(h[:, 0], step_by_step(log_a, np.ones((4, 1)))[:, 0], atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 1), (9, 3), (1, 9, 1), (1,)])
@pytest.mark.parametrize("function", [linear_recurrence, log_linear_recurrence])
@pytest.mark.usefixtures("unchecked")
def test_coefficients_that_do_not_fit_are_refused(function, shape):
    name = "log_coefficients" if function is log_linear_recurrence else "coefficients"
    with pytest.raises(ValueError, match=rf"^{name} must be broadcastable to shape \(9, 2\)"):
        function(jnp.zeros(shape), jnp.zeros((9, 2)))


def test_short_sequences_without_jit():
    with jax.disable_jit():
        for length in (1, 2, 5):
            x = jnp.full((length, 2), -0.5)
            expected = step_by_step(np.asarray(x), np.asarray(x))
            np.testing.assert_allclose(log_linear_recurrence(x, x), expected, atol=1e-6)
        gradient = jax.grad(lambda x: log_linear_recurrence(x, x).sum())(x[:1])
        assert np.isfinite(gradient).all()
