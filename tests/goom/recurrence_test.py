"""The dense recurrence equals its definition in extended precision, at any magnitude."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.goom.recurrence import CHUNK, DenseState, dense_recurrence

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
    states = []
    for step in np.moveaxis(inputs, -3, 0):
        state = state @ transition + step
        states.append(state)
    return np.stack(states, -3)


def normed(states: np.ndarray) -> np.ndarray:
    return np.exp(2) * states / np.abs(states).max(-1, keepdims=True)


@pytest.mark.parametrize("gain", [0.99, 1.9, 0.1])
@pytest.mark.parametrize("length", [1, 7, 3 * CHUNK + 5, pytest.param(700, id="far")])
def test_outputs_and_state(gain, length):
    """A gain of 1.9 leads to 1.9^700 = exp(449), beyond floats."""
    arrays = draw(length, gain)
    y, state = jax.jit(dense_recurrence, static_argnames="return_state")(*arrays, return_state=True)
    states = states_of(*arrays)
    np.testing.assert_allclose(y, normed(states), atol=1e-4)
    last = np.ldexp(np.asarray(state.mantissa, np.longdouble), state.exponent)
    np.testing.assert_allclose(normed(last), normed(states[:, -1]), atol=1e-4)
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


def test_gradients_with_constant_maxima():
    inputs, transition, initial = draw(2 * CHUNK + 3, 1.3)
    cotangent = np.random.default_rng(1).standard_normal(inputs.shape)
    scale = np.exp(2) / np.abs(states_of(inputs, transition, initial)).max(-1, keepdims=True)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(cotangent.astype(np.float32) * dense_recurrence(*arrays))

    def definition(*arrays: np.ndarray) -> np.longdouble:
        return np.sum(cotangent * scale * states_of(*arrays))

    arrays = inputs, transition, initial
    for i, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)):
        direction = np.random.default_rng(2).standard_normal(gradient.shape)
        values = [
            definition(*arrays[:i], arrays[i] + h * direction, *arrays[i + 1 :])
            for h in (1e-7, -1e-7)
        ]
        want = float((values[0] - values[1]) / 2e-7)
        np.testing.assert_allclose(np.sum(gradient * direction), want, rtol=1e-3)


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
