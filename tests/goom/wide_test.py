"""Matrix products at any magnitude equal exact rational arithmetic, in both tiers."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.goom import Goom, from_goom, matmul, to_goom
from heinsen_jax.goom.wide import Wide, _span, _tier, product


def exact(x: Wide) -> np.ndarray:
    """The numbers as fractions."""
    pairs = zip(np.ravel(x.mantissa), np.ravel(x.exponent), strict=True)
    numbers = [Fraction(float(m)) * Fraction(2) ** int(e) for m, e in pairs]
    return np.array(numbers, dtype=object).reshape(x.shape)


def random_wide(rng: np.random.Generator, shape: tuple[int, ...], spread: int) -> Wide:
    """Numbers of both signs, of which some are 0, over 2^-spread to 2^spread."""
    mantissa = rng.uniform(0.5, 1, shape) * rng.choice([-1, 0, 1], shape, p=[0.4, 0.2, 0.4])
    exponent = rng.integers(-spread, spread + 1, shape)
    return Wide(jnp.asarray(mantissa, jnp.float32), jnp.asarray(exponent, jnp.int32))


def tier(x: Wide, y: Wide) -> int:
    rows, columns = x.largest(-1), y.largest(-2)
    return int(_tier(x.scaled(rows), y.scaled(columns), _span(x, rows) + _span(y, columns)))


def worst_error(given: Wide, x: Wide, y: Wide) -> float:
    """Largest error, relative to the sum of the terms' magnitudes."""
    x, y = exact(x), exact(y)
    scale = np.abs(x) @ np.abs(y)
    errors = [
        float(abs(a - b) / s) if s else float(abs(a))
        for a, b, s in zip(np.ravel(exact(given)), np.ravel(x @ y), np.ravel(scale), strict=True)
    ]
    return max(errors)


@pytest.mark.parametrize("spread", [0, 40, 70, 100_000])
@pytest.mark.parametrize(
    "shape",
    [(3, 4, 5), *(pytest.param(x, marks=pytest.mark.nightly) for x in ((1, 7, 1), (17, 9, 2)))],
)
def test_products_are_exact(spread, shape):
    i, k, j = shape
    rng = np.random.default_rng(spread + k)
    x, y = random_wide(rng, (i, k), spread), random_wide(rng, (k, j), spread)
    assert worst_error(product(x, y), x, y) < 1e-6


def test_both_tiers_are_chosen():
    rng = np.random.default_rng(0)
    x, y = random_wide(rng, (5, 6), 10), random_wide(rng, (6, 7), 10)
    assert tier(x, y) == 0
    wide = random_wide(rng, (5, 6), 1000)
    assert tier(wide, random_wide(rng, (6, 7), 1000)) == 1
    # rows of any size are no reason: they are scaled
    rows = Wide(x.mantissa, x.exponent + jnp.arange(0, 5000, 1000)[:, None])
    assert tier(rows, y) == 0
    # the largest elements meet, others lose nothing that counts
    far = Wide(jnp.full((2, 2), 0.5), jnp.array([[0, -200], [0, -200]]))
    assert tier(far, Wide(jnp.full((2, 2), 0.5), jnp.zeros((2, 2), jnp.int32))) == 0
    # they do not meet
    assert tier(far, Wide(jnp.full((2, 2), 0.5), jnp.array([[-200, -200], [0, 0]]))) == 1


@pytest.mark.nightly
def test_one_choice_is_made_for_a_batch():
    rng = np.random.default_rng(0)
    x, y = random_wide(rng, (3, 4, 4), 500), random_wide(rng, (3, 4, 4), 500)
    together = jax.vmap(product)(x, y)
    for i in range(3):
        assert worst_error(together[i], x[i], y[i]) < 1e-6
    text = jax.jit(jax.vmap(product)).lower(x, y).as_text()
    assert "stablehlo.case" in text  # not both tiers, and a selection


def test_numbers_are_converted_between_logarithms_and_exponents():
    rng = np.random.default_rng(0)
    logs = np.concatenate([rng.uniform(-1e5, 1e5, 50), rng.uniform(-1, 1, 50), [0.0, -np.inf]])
    signs = np.where(np.isinf(logs), 0, rng.choice([-1, 1], 102))
    x = Goom(jnp.asarray(logs, jnp.float32), jnp.asarray(signs, jnp.int8))
    wide = Wide.of(x)
    assert np.all((np.abs(wide.mantissa) >= 0.5) | (wide.mantissa == 0))
    back = wide.goom()
    np.testing.assert_array_equal(back.sign, x.sign)
    np.testing.assert_allclose(back.log_abs, x.log_abs, rtol=3e-7, atol=1e-6)
    for m, e, log in zip(wide.mantissa, wide.exponent, np.asarray(x.log_abs, float), strict=True):
        if np.isfinite(log):
            error = math.log(abs(m)) + int(e) * math.log(2) - log
            assert abs(error) < 1e-6 + 6e-8 * abs(log)


def test_floats_are_exact_down_to_the_smallest_normal_number():
    limits = np.finfo(np.float32)
    x = np.array([limits.smallest_normal, limits.max, 1.0, -0.75, 0.0], np.float32)
    assert [float(x) for x in exact(Wide.of(jnp.asarray(x)))] == x.tolist()


def test_gradients_do_not_depend_on_the_tier():
    """X D and D^-1 Y have the product of X and Y, and its gradients by logarithms."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 5)), rng.standard_normal((5, 3))
    x[0, 1] = 0
    shift = jnp.asarray(rng.uniform(-2000, 2000, 5).round(), jnp.float32)
    x, y = to_goom(jnp.asarray(x, jnp.float32)), to_goom(jnp.asarray(y, jnp.float32))

    def loss(shift, x_logs, y_logs):
        left = Goom(x_logs + shift[None], x.sign)
        right = Goom(y_logs - shift[:, None], y.sign)
        return jnp.sum(jnp.sin(from_goom(matmul(left, right))))

    assert tier(Wide.of(x), Wide.of(y)) == 0
    moved = Goom(x.log_abs + shift[None], x.sign), Goom(y.log_abs - shift[:, None], y.sign)
    assert tier(*map(Wide.of, moved)) == 1
    gradient = jax.jit(jax.grad(loss, (1, 2)))
    given = gradient(shift, x.log_abs, y.log_abs)
    wanted = gradient(jnp.zeros(5), x.log_abs, y.log_abs)
    is_zero = np.asarray(x.sign) == 0  # their gradient is in other units
    np.testing.assert_allclose(given[0][~is_zero], wanted[0][~is_zero], rtol=3e-3, atol=1e-3)
    np.testing.assert_allclose(given[1], wanted[1], rtol=3e-3, atol=1e-3)


@pytest.mark.parametrize("log", [1e9, -1e9, 1e37])
def test_rows_and_columns_have_any_magnitude(log):
    rng = np.random.default_rng(0)
    x, y = (to_goom(jnp.asarray(rng.standard_normal((3, 3)), jnp.float32)) for _ in range(2))
    shift = jnp.array([[0], [1], [-1]], jnp.float32) * log
    far = matmul(Goom(x.log_abs + shift, x.sign), y)
    np.testing.assert_array_equal(far.sign[0], matmul(x, y).sign[0])
    np.testing.assert_allclose(far.log_abs[1:], jnp.broadcast_to(shift[1:], (2, 3)), rtol=1e-6)


def test_numbers_of_one_row_may_differ_by_large_exponents():
    x = Goom(jnp.array([[1e8, -1e8]]), jnp.ones((1, 2), jnp.int8))
    y = Goom(jnp.array([[-1e8], [0.9e8]]), jnp.ones((2, 1), jnp.int8))
    assert float(matmul(x, y).log_abs[0, 0]) == pytest.approx(0, abs=20)


def test_batches_are_broadcast_and_other_shapes_refused():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 3, 4)), rng.standard_normal((5, 4, 2))
    z = matmul(to_goom(jnp.asarray(x, jnp.float32)), to_goom(jnp.asarray(y, jnp.float32)))
    np.testing.assert_allclose(from_goom(z), x @ y, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"x \(3,\)"):
        matmul(to_goom(jnp.ones(3)), to_goom(jnp.ones((3, 3))))
    with pytest.raises(ValueError, match=r"\[\.\.\., I, K\]"):
        matmul(to_goom(jnp.ones((3, 2))), to_goom(jnp.ones((3, 3))))


@pytest.mark.nightly
def test_a_backward_pass_stores_no_terms():
    """2048 x 64 x 64 terms need 34 MB."""

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(matmul(x, y).log_abs)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    compiled = gradient.lower(jnp.ones((2048, 64)), jnp.ones((64, 64))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 30e6


def test_products_over_empty_axes_are_0():
    assert (matmul(jnp.ones((2, 0)), jnp.ones((0, 3))).sign == 0).all()
    assert matmul(jnp.ones((0, 2)), jnp.ones((2, 3))).shape == (0, 3)


def test_float64(x64):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((6, 6))) for _ in range(2))
    np.testing.assert_allclose(from_goom(matmul(to_goom(x), to_goom(y))), x @ y, rtol=1e-12)
