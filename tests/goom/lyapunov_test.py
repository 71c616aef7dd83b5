"""Lyapunov exponents have the published values, and equal a sequence of QR decompositions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.goom import largest_lyapunov_exponent, lyapunov_exponents


def runge_kutta(velocity, dt):
    def step(x):
        a = velocity(x)
        b = velocity(x + dt / 2 * a)
        c = velocity(x + dt / 2 * b)
        d = velocity(x + dt * c)
        return x + dt / 6 * (a + 2 * b + 2 * c + d)

    return step


def lorenz(p):
    x, y, z = p
    return jnp.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def roessler(p):
    x, y, z = p
    return jnp.array([-y - z, x + 0.2 * y, 0.2 + z * (x - 5.7)])


def henon(p):
    x, y = p
    return jnp.array([1 - 1.4 * x**2 + y, 0.3 * x])


def lozi(p):
    x, y = p
    return jnp.array([1 - 1.7 * jnp.abs(x) + 0.5 * y, x])


def jacobians(step, start, length):
    start = jax.lax.fori_loop(0, 2000, lambda _, x: step(x), jnp.array(start))
    _, points = jax.lax.scan(lambda x, _: (step(x), x), start, None, length=length)
    return jax.vmap(jax.jacfwd(step))(points)


SYSTEMS = {
    # Viswanath (1998); Sprott (2003), Chaos and Time-Series Analysis
    "Lorenz": (runge_kutta(lorenz, 0.01), (1.0, 1.0, 20.0), 0.01, (0.9056, 0, -14.5723), 0.015),
    "Roessler": (runge_kutta(roessler, 0.02), (1.0, 1.0, 0.0), 0.02, (0.0714, 0, -5.3943), 0.01),
    "Henon": (henon, (0.1, 0.1), 1.0, (0.41922, -1.62319), 0.004),
    "Lozi": (lozi, (0.1, 0.1), 1.0, (0.47023, -1.16338), 0.004),
    "logistic": (lambda x: 4 * x * (1 - x), (0.3,), 1.0, (math.log(2),), 1e-3),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exponents_have_the_published_values(x64, name, dtype):
    step, start, dt, published, tolerance = SYSTEMS[name]
    matrices = jax.jit(lambda: jacobians(step, start, 100_000))().astype(dtype)
    given = jax.jit(lyapunov_exponents)(matrices, dt=dt)
    assert given.dtype == dtype
    np.testing.assert_allclose(given, published, atol=tolerance)
    largest = jax.jit(largest_lyapunov_exponent)(matrices, dt=dt)
    assert float(largest) == pytest.approx(published[0], abs=tolerance)


@pytest.mark.parametrize(
    "length", [100, *(pytest.param(x, marks=pytest.mark.nightly) for x in (1, 2, 5, 1009))]
)
def test_exponents_are_those_of_a_sequence_of_decompositions(length):
    """For random matrices, whose directions shrink by different factors in every step."""
    rng = np.random.default_rng(length)
    matrices = rng.standard_normal((length, 5, 5)) * np.array([4, 1, 0.3, 0.05, 1e-3])
    basis, growth = np.eye(5), np.zeros(5)
    for matrix in matrices:
        basis, triangle = np.linalg.qr(matrix @ basis)
        growth += np.log(np.abs(np.diagonal(triangle)))
    given = lyapunov_exponents(jnp.asarray(matrices, jnp.float32))
    np.testing.assert_allclose(given, growth / length, atol=2e-3)


def test_exponents_are_sorted_and_the_largest_is_of_a_random_vector():
    ordered = lyapunov_exponents(jnp.broadcast_to(jnp.diag(jnp.array([1.0, 2.0])), (50, 2, 2)))
    np.testing.assert_allclose(ordered, [math.log(2), 0], atol=1e-5)
    coupled = jnp.broadcast_to(jnp.array([[1.5, -0.5], [-0.5, 1.5]]), (200, 2, 2))
    assert float(largest_lyapunov_exponent(coupled)) == pytest.approx(math.log(2), abs=0.02)


def test_other_shapes_are_refused():
    for function in (lyapunov_exponents, largest_lyapunov_exponent):
        with pytest.raises(ValueError, match=r"jacobians \(3, 3\) must be"):
            function(jnp.ones((3, 3)))
