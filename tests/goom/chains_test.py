"""Chains of matrix products equal exact rational arithmetic, at any length and magnitude."""

import math
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.goom import Goom, Reset, chain_products, from_goom, to_goom

IMPLEMENTATIONS = "sequential", "parallel"


def log_of(x: Fraction) -> float:
    return math.log(abs(x.numerator)) - math.log(x.denominator) if x else -math.inf


def exact_chain(matrices: np.ndarray, initial: np.ndarray | None = None) -> list[np.ndarray]:
    fractions = np.vectorize(Fraction, otypes=[object])
    state = fractions(np.eye(matrices.shape[-1]) if initial is None else initial)
    states = []
    for matrix in matrices.astype(float):
        state = fractions(matrix) @ state
        states.append(state)
    return states


def check(given: Goom, wanted: list[np.ndarray], tolerance: float) -> None:
    logs = np.array([[[log_of(x) for x in row] for row in state] for state in wanted])
    signs = np.array([[[(x > 0) - (x < 0) for x in row] for row in state] for state in wanted])
    np.testing.assert_array_equal(given.sign, signs)
    scale = 1e-6 * np.abs(np.where(np.isinf(logs), 0, logs))
    np.testing.assert_array_equal(np.isinf(given.log_abs), np.isinf(logs))
    difference = np.abs(np.where(np.isinf(logs), 0, given.log_abs - logs))
    assert np.all(difference <= tolerance + scale), difference.max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "length", [100, *(pytest.param(x, marks=pytest.mark.nightly) for x in (1, 2, 31, 33))]
)
def test_chains_are_exact(implementation, length):
    rng = np.random.default_rng(length)
    matrices = rng.uniform(0.1, 3, (length, 3, 3)).astype(np.float32)
    matrices[:, 0, 2] = 0
    matrices[::2, 1] *= -1
    given = chain_products(matrices, implementation=implementation)
    check(given, exact_chain(matrices), 2e-3)
    last = chain_products(matrices, implementation=implementation, return_all=False)
    check(last[None], exact_chain(matrices)[-1:], 2e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_states_whose_elements_span_any_magnitudes_are_exact(implementation):
    """Upper triangular products, whose columns have numbers from 2^-2800 to 2^2800."""
    rng = np.random.default_rng(0)
    matrices = np.triu(rng.uniform(0.5, 2, (70, 3, 3))).astype(np.float32)
    matrices *= np.float32(2.0) ** np.array([40, 0, -40])[:, None].astype(np.float32)
    given = chain_products(matrices, implementation=implementation)
    check(given, exact_chain(matrices), 2e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matrices_beyond_floats_and_initial_states(implementation):
    rng = np.random.default_rng(0)
    matrices = rng.uniform(0.1, 3, (40, 3, 3)).astype(np.float32)
    initial = rng.uniform(0.1, 3, (3, 2)).astype(np.float32)
    large = to_goom(jnp.asarray(matrices))
    large = Goom(large.log_abs + 1000, large.sign)
    given = chain_products(large, initial=initial, implementation=implementation)
    moved = Goom(given.log_abs - 1000 * jnp.arange(1, 41.0)[:, None, None], given.sign)
    # at 40,000, float32 has steps of 0.004
    check(moved, exact_chain(matrices, initial), 0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_chains_lose_nothing_to_their_length(implementation):
    """Against float64 that is scaled after every product: at 2e4, steps are 0.002."""
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((10_000, 8, 8)).astype(np.float32)
    state, log_scale = np.eye(8), 0.0
    for matrix in matrices.astype(float):
        state = matrix @ state
        size = np.abs(state).max()
        state, log_scale = state / size, log_scale + math.log(size)
    last = chain_products(matrices, return_all=False, implementation=implementation)
    np.testing.assert_array_equal(last.sign, np.sign(state))
    np.testing.assert_allclose(last.log_abs, np.log(np.abs(state)) + log_scale, atol=0.01)


@pytest.mark.nightly
def test_a_product_of_zeros_is_zero():
    nilpotent = jnp.broadcast_to(jnp.array([[0.0, 1.0], [0.0, 0.0]]), (50, 2, 2))
    for implementation in IMPLEMENTATIONS:
        states = chain_products(nilpotent, implementation=implementation)
        assert np.all(states.sign[1:] == 0)
        assert states.sign[0].tolist() == [[0, 1], [0, 0]]


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_those_of_floats(implementation):
    rng = np.random.default_rng(0)
    matrices = jnp.asarray(rng.standard_normal((37, 3, 3)) / 2, jnp.float32)

    def loss(states):
        return jnp.sum(jnp.sin(states) * jnp.arange(37.0)[:, None, None])

    def with_floats(matrices):
        _, states = jax.lax.scan(lambda s, a: (a @ s,) * 2, jnp.eye(3), matrices)
        return loss(states)

    def with_logarithms(matrices):
        return loss(from_goom(chain_products(matrices, implementation=implementation)))

    given, wanted = (jax.jit(jax.grad(f))(matrices) for f in (with_logarithms, with_floats))
    np.testing.assert_allclose(given, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resets_keep_columns_apart(implementation):
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((300, 4, 4)).astype(np.float32)
    reset = Reset(cosine=0.99)
    states = chain_products(matrices, reset=reset, implementation=implementation)
    logs = states.log_abs - jnp.max(states.log_abs, -2, keepdims=True)
    columns = np.asarray(states.sign * jnp.exp(logs))
    columns = columns / np.linalg.norm(columns, axis=-2, keepdims=True)
    cosines = np.abs(np.swapaxes(columns, -1, -2) @ columns) - np.eye(4)[None]
    assert cosines.max() <= 0.9901
    last = chain_products(matrices, reset=reset, implementation=implementation, return_all=False)
    np.testing.assert_allclose(last.log_abs, states.log_abs[-1], atol=1e-4)
    free = chain_products(matrices, implementation=implementation)
    assert float(jnp.max(free.log_abs)) > 100 > float(jnp.max(states.log_abs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resets_keep_the_subspaces(implementation):
    """The first columns have the direction of the product's, before and after."""
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((60, 3, 3)).astype(np.float32)
    states = chain_products(matrices, reset=Reset(), implementation=implementation)
    free = chain_products(matrices, implementation="sequential")

    def directions(states: Goom) -> np.ndarray:
        first = states[:, :, 0]
        columns = np.asarray(first.sign * jnp.exp(first.log_abs - first.log_abs.max(-1)[:, None]))
        return columns / np.linalg.norm(columns, axis=-1, keepdims=True)

    cosines = np.abs(np.sum(directions(states) * directions(free), -1))
    np.testing.assert_allclose(cosines, 1, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_with_resets_are_finite_where_states_are_singular(implementation):
    singular = jnp.broadcast_to(jnp.array([[1.0, 0.0], [0.0, 0.0]]), (3, 2, 2))

    def corner(matrices):
        states = chain_products(matrices, reset=Reset(), implementation=implementation)
        return from_goom(states)[-1, 0, 0]

    np.testing.assert_allclose(jax.grad(corner)(singular)[:, 0, 0], 1, rtol=1e-5)


def test_numbers_beyond_the_exponents_are_infinite_or_0():
    def last(logs: list[float], implementation: Any) -> Goom:
        matrices = Goom(jnp.array(logs)[:, None, None], jnp.ones((len(logs), 1, 1), jnp.int8))
        return chain_products(matrices, return_all=False, implementation=implementation)

    up, down = [1e8] * 20, [-1e8] * 20
    for name in IMPLEMENTATIONS:
        assert np.isposinf(last(up, name).log_abs).all()
        assert (last(down, name).sign == 0).all()
        np.testing.assert_allclose(last(up[:3] + down[:3], name).log_abs, 0, atol=1)
    # it does not lead back; in parallel, chunks are 0 and infinite
    assert np.isposinf(last(up + down, "sequential").log_abs).all()
    assert (last(down + up, "sequential").sign == 0).all()
    assert np.isnan(last(down + up, "parallel").log_abs).all()


def test_a_backward_pass_stores_no_residuals_of_the_exact_tier():
    """They would need 30 MB more."""
    last = partial(chain_products, return_all=False, implementation="sequential")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(last(x).log_abs)))
    compiled = gradient.lower(jax.ShapeDtypeStruct((1024, 32, 32), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 40e6


def test_no_columns_and_no_chains():
    empty = chain_products(jnp.ones((3, 2, 2)), initial=jnp.ones((2, 0)), reset=Reset())
    assert empty.shape == (3, 2, 0)
    assert jax.vmap(chain_products)(jnp.ones((0, 3, 2, 2))).shape == (0, 3, 2, 2)


def test_matrices_near_the_largest_float_are_exact():
    matrices = np.full((4, 2, 2), 3e38, np.float32) * np.array([[1, -1], [0.5, 1]], np.float32)
    check(chain_products(matrices), exact_chain(matrices), tolerance=1e-5)


def test_other_dtypes_are_at_least_float32():
    matrices = 2 * jnp.ones((4, 1, 1), jnp.int32)
    for given in (matrices, matrices.astype(jnp.bfloat16)):
        last = chain_products(given, initial=jnp.ones((1, 2), jnp.bfloat16), return_all=False)
        assert last.dtype == jnp.float32
        np.testing.assert_allclose(from_goom(last), 16, rtol=1e-6)
    with pytest.raises(TypeError, match="numbers: complex64 is not real"):
        chain_products(1j * matrices)


def test_chains_of_one_batch_have_different_magnitudes():
    """One of them loses terms in floats, so that all are computed again."""
    rng = np.random.default_rng(0)
    plain = rng.integers(-3, 4, (20, 2, 2)).astype(np.float32)
    far = np.broadcast_to(np.diag([2.0**60, 2.0**-60]), plain.shape).astype(np.float32)
    chains = jax.vmap(chain_products)(jnp.stack([plain, far]))
    for i, matrices in enumerate((plain, far)):
        check(chains[i], exact_chain(matrices), tolerance=1e-4)


def test_other_shapes_are_refused():
    for matrices in (jnp.ones((3, 3)), jnp.ones((2, 3, 4)), jnp.ones((0, 3, 3))):
        with pytest.raises(ValueError, match=r"must be \[T, N, N\]"):
            chain_products(matrices)
    with pytest.raises(ValueError, match="implementation='scan' must be 'sequential'"):
        chain_products(jnp.ones((2, 3, 3)), implementation="scan")
    with pytest.raises(ValueError, match=r"must be \[N, M\], with N = 3"):
        chain_products(jnp.ones((2, 3, 3)), initial=jnp.ones((2, 3)))


@pytest.mark.nightly
def test_chains_are_compiled_and_vectorized():
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((2, 40, 3, 3)).astype(np.float32)
    last = partial(chain_products, return_all=False)
    together = jax.jit(jax.vmap(last))(matrices)
    for i in range(2):
        np.testing.assert_allclose(together.log_abs[i], last(matrices[i]).log_abs, rtol=1e-5)
