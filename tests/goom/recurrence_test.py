"""The dense recurrence equals its definition in extended precision, at any magnitude."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import export, symbolic_shape

from heinsen_jax.goom.recurrence import DenseState, dense_recurrence

HEADS, SIZE = 2, 5


def draw(length: int, gain: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Inputs `[2, T, N, K]`, a transition with eigenvalues near `gain`, and initial vectors."""
    rng = np.random.default_rng(seed)
    shapes = (2, length, HEADS, SIZE), (SIZE, SIZE), (HEADS, SIZE)
    inputs, transition, initial = (rng.standard_normal(x).astype(np.float32) for x in shapes)
    return inputs, np.linalg.qr(transition)[0] * np.float32(gain), initial


def states_of(inputs: np.ndarray, transition: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """x `[*B, T, N, K]` in extended precision, whose exponents have 15 bits."""
    inputs, transition, state = (x.astype(np.longdouble) for x in (inputs, transition, initial))
    states = np.empty_like(inputs)
    for t in range(inputs.shape[-3]):
        state = state @ transition + inputs[..., t, :, :]
        states[..., t, :, :] = state
    return states


def normed(states: np.ndarray) -> np.ndarray:
    return np.exp(2) * states / np.abs(states).max(-1, keepdims=True)


@pytest.mark.parametrize("gain", [0.99, 1.9, 0.1])
@pytest.mark.parametrize("length", [0, 1, 7, pytest.param(700, id="far")])
def test_outputs_and_state(gain, length):
    """A gain of 1.9 leads to 1.9^700 = exp(449), beyond floats."""
    arrays = draw(length, gain)
    y, state = jax.jit(dense_recurrence, static_argnames="return_state")(*arrays, return_state=True)
    states = states_of(*arrays)
    np.testing.assert_allclose(y, normed(states), atol=5e-5)
    states = states if length else np.broadcast_to(arrays[-1], (2, 1, HEADS, SIZE))
    last = np.ldexp(np.asarray(state.mantissa, np.longdouble), state.exponent)
    np.testing.assert_allclose(normed(last), normed(states[:, -1]), atol=5e-5)
    logs = [np.log(np.abs(x).max(-1)) for x in (last, states[:, -1])]
    np.testing.assert_allclose(*map(np.float64, logs), rtol=1e-6, atol=1e-5)


def test_directions_that_vanish_beside_others_return():
    """The first direction shrinks to 2^-900 of the second one before that is taken away."""
    transition = np.diag([0.5, 4.0]).astype(np.float32)
    steps = np.zeros((300, 1, 2), np.float32)
    steps[150:, 0, 0] = 2.0**-100
    shrunk, grown = np.ones((1, 2), np.float32), np.diag([4.0, 0.125]).astype(np.float32)
    _, state = dense_recurrence(steps, transition, shrunk, return_state=True)
    assert abs(int(state.exponent[0, 0] - state.exponent[0, 1])) > 600
    y = dense_recurrence(steps, grown, shrunk, initial_state=state)
    first = states_of(steps, transition, shrunk)[-1]
    np.testing.assert_allclose(y, normed(states_of(steps, grown, first)), rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(("length", "gain", "factor"), [(35, 1.3, 1), (150, 0.5, 0)])
def test_gradients_with_constant_maxima(length, gain, factor):
    """Without inputs, a gain of 0.5 leads to states of 2^-150, beyond floats."""
    inputs, transition, initial = draw(length, gain)
    arrays = factor * inputs, transition, initial
    cotangent = np.random.default_rng(1).standard_normal(inputs.shape)
    scale = np.exp(2) / np.abs(states_of(*arrays)).max(-1, keepdims=True)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(cotangent.astype(np.float32) * dense_recurrence(*arrays))

    def definition(*arrays: np.ndarray) -> np.longdouble:
        return np.sum(cotangent * scale * states_of(*arrays))

    for i, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)):
        if i == 0 and not factor:
            continue  # beyond floats itself
        direction = np.random.default_rng(2).standard_normal(gradient.shape)
        values = [
            definition(*arrays[:i], arrays[i] + h * direction, *arrays[i + 1 :])
            for h in (1e-7, -1e-7)
        ]
        want = float((values[0] - values[1]) / 2e-7)
        np.testing.assert_allclose(np.sum(gradient * direction), want, rtol=1e-4)


def test_vectors_of_zeros_have_finite_gradients():
    inputs, transition, initial = draw(20, 0.5)
    inputs, initial = 0 * inputs, 0 * initial

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(dense_recurrence(*arrays) ** 2)

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(inputs, transition, initial)
    assert value == 0
    assert all(np.all(np.isfinite(x)) for x in gradients)


def test_segments_begin_with_the_initial_vectors():
    inputs, transition, initial = draw(50, 0.9)
    ids = np.repeat([[3, 3, 1, 7, 7]], 10, 1).reshape(1, 50).repeat(2, 0)
    y, state = dense_recurrence(inputs, transition, initial, segment_ids=ids, return_state=True)
    parts = [dense_recurrence(x, transition, initial) for x in np.split(inputs, [20, 30], 1)]
    np.testing.assert_allclose(y, np.concatenate(parts, 1), atol=1e-5)
    _, last = dense_recurrence(inputs[:, 30:], transition, initial, return_state=True)
    assert isinstance(last, DenseState)
    np.testing.assert_allclose(
        np.ldexp(state.mantissa, state.exponent), np.ldexp(last.mantissa, last.exponent), rtol=1e-4
    )


def test_a_state_is_of_the_first_segment():
    inputs, transition, initial = draw(30, 0.9)
    ids = np.repeat([[0, 1]], 15, 1).repeat(2, 0)
    _, state = dense_recurrence(inputs, transition, initial, return_state=True)
    y = dense_recurrence(inputs, transition, initial, segment_ids=ids, initial_state=state)
    first = dense_recurrence(inputs[:, :15], transition, initial, initial_state=state)
    second = dense_recurrence(inputs[:, 15:], transition, initial)
    np.testing.assert_allclose(y, np.concatenate([first, second], 1), atol=1e-5)


def test_half_precision_is_computed_in_float32():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in draw(20, 0.9)]
    y = dense_recurrence(*arrays)
    assert y.dtype == jnp.bfloat16
    wanted = dense_recurrence(*(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(y.astype(np.float32), wanted, atol=0.02)
    mixed = dense_recurrence(arrays[0], arrays[1].astype(jnp.float32), arrays[2])
    np.testing.assert_array_equal(mixed, y)


def test_vectors_beyond_the_exponents_are_nan():
    inputs, transition = np.ones((3, 1, 2), np.float32), np.diag([1e38, 1.0]).astype(np.float32)
    large = DenseState(jnp.full((1, 2), 0.5), jnp.full((1, 2), (1 << 29) - 10))
    y = dense_recurrence(inputs, transition, inputs[0], initial_state=large)
    assert np.isnan(y).all()


def test_a_symbolic_batch_is_exported():
    (batch,) = symbolic_shape("b")
    arrays = draw(20, 0.9)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    shapes[0] = jax.ShapeDtypeStruct((batch, *arrays[0].shape[1:]), np.float32)
    exported = export(jax.jit(dense_recurrence))(*shapes)
    np.testing.assert_allclose(exported.call(*arrays), dense_recurrence(*arrays), atol=1e-6)
