import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from heinsen_jax.ops import numerics

pytestmark = pytest.mark.usefixtures("as_users_compile")

INF = float("inf")
LOGS = st.one_of(st.just(-INF), st.floats(-1e4, 1e4, width=32))


def log_sum_exp_in_float64(x: np.ndarray, axis: int) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.logaddexp.reduce(x.astype(np.float64), axis=axis)


@partial(jax.jit, static_argnames="axis")
def log_sum_exp_and_its_gradient(x, axis):
    total, pullback = jax.vjp(lambda x: numerics.log_sum_exp(x, axis), x)
    return total, pullback(jnp.ones_like(total))[0]


log_add_exp_and_its_gradients = jax.jit(jax.value_and_grad(numerics.log_add_exp, (0, 1)))


@given(npst.arrays(np.float32, (3, 5), elements=LOGS), st.sampled_from([0, 1, -1, -2]))
def test_log_sum_exp_and_its_gradient_are_exact(x, axis):
    total, gradient = log_sum_exp_and_its_gradient(x, axis)
    expected = log_sum_exp_in_float64(x, axis)
    np.testing.assert_allclose(total, expected, rtol=3e-7, atol=3e-7)

    total = np.expand_dims(expected, axis)
    shares = np.exp(x - np.where(np.isneginf(total), INF, total))
    np.testing.assert_allclose(
        gradient, shares, rtol=0, atol=3e-7 * (1 + np.abs(x).max(where=np.isfinite(x), initial=0))
    )


@given(LOGS, LOGS)
def test_log_add_exp_agrees_with_log_sum_exp(x, y):
    x, y = np.float32(x), np.float32(y)
    total, gradients = log_add_exp_and_its_gradients(x, y)
    stacked, expected = log_sum_exp_and_its_gradient(np.stack([x, y]), 0)
    np.testing.assert_allclose(total, stacked, rtol=3e-7, atol=3e-7)
    size = max(abs(float(v)) for v in (x, y, 0) if np.isfinite(v))
    np.testing.assert_allclose(np.stack(gradients), expected, atol=3e-7 * (1 + size))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: numerics.log_sum_exp(x, 0)[None],
        lambda x: numerics.log_add_exp(x, x),
        lambda x: numerics.share(x, x),
    ],
    ids=["log_sum_exp", "log_add_exp", "share"],
)
def test_empty_sums_have_zero_gradients(function):
    nothing = jnp.full(3, -jnp.inf)
    output, pullback = jax.vjp(function, nothing)
    assert np.all(np.isneginf(output) | (np.asarray(output) == 0))
    np.testing.assert_array_equal(pullback(jnp.ones_like(output))[0], 0)


def test_library_functions_return_nan_there():
    """Reason for this module: if this fails, parts of it are no longer needed."""
    gradient = jax.grad(lambda x: jax.nn.logsumexp(x, 0))(jnp.full(3, -jnp.inf))
    assert np.isnan(gradient).all()


def test_log_sum_exp_of_an_empty_axis_is_log_zero():
    np.testing.assert_array_equal(numerics.log_sum_exp(jnp.zeros((2, 0)), -1), [-INF, -INF])


def test_second_derivative_is_the_covariance_of_a_softmax():
    x = jnp.asarray([0.3, -1.0, 2.0])
    p = jax.nn.softmax(x)
    hessian = jax.jit(jax.hessian(lambda x: numerics.log_sum_exp(x, 0)))(x)
    np.testing.assert_allclose(hessian, jnp.diag(p) - jnp.outer(p, p), atol=1e-6)


def test_share_of_an_empty_total_is_zero():
    np.testing.assert_array_equal(
        numerics.share(jnp.asarray([-INF, -INF, 0.0]), jnp.asarray([-INF, 3.0, 0.0])), [0, 0, 1]
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_share_is_the_exponential_of_the_difference_bit_for_bit(dtype):
    with jax.enable_x64(dtype == "float64"):
        limits = jnp.finfo(dtype)
        x = jnp.linspace(-3 * jnp.log(limits.max), 3 * jnp.log(limits.max), 2001).astype(dtype)
        x = jnp.concatenate([x, jnp.asarray([-INF, limits.min, limits.max, INF, jnp.nan], dtype)])
        compared = jax.jit(lambda x: (numerics.share(x, jnp.zeros_like(x)), jnp.exp(x)))
        have, want = (np.asarray(y) for y in compared(x))
        assert have.tobytes() == want.tobytes()
        assert have.dtype == dtype
        assert 0 in have
        assert np.inf in have


def test_reciprocal_of_zero_and_its_derivatives_are_zero():
    x = jnp.asarray([0.0, -0.0, 4.0, -0.5, INF])
    first = jax.vmap(jax.grad(numerics.reciprocal))
    second = jax.vmap(jax.hessian(numerics.reciprocal))
    np.testing.assert_array_equal(numerics.reciprocal(x), [0, 0, 0.25, -2, 0])
    np.testing.assert_allclose(first(x), [0, 0, -1 / 16, -4, 0])
    np.testing.assert_allclose(second(x), [0, 0, 1 / 32, -16, 0])
    _, tangent = jax.jvp(numerics.reciprocal, (jnp.float32(1e-30),), (jnp.float32(0),))
    assert tangent == 0


def test_where_empty_replaces_only_log_zero():
    x = jnp.asarray([-INF, 1.0, INF])
    np.testing.assert_array_equal(numerics.where_empty(x, 7.0), [7.0, 1.0, INF])


def test_a_pair_of_any_size_has_weights_that_sum_to_1():
    x = jnp.asarray([0.0, 1e8, -INF, 5.0, -INF, -3e38])
    y = jnp.asarray([-20.0, 1e8, 5.0, -INF, -INF, 3e38])
    both = numerics.softmax_pair(x, y)
    small = math.exp(-20)
    expected = [1 / (1 + small), 0.5, 0, 1, 0, 0], [small / (1 + small), 0.5, 1, 0, 0, 1]
    np.testing.assert_allclose(both.weights, expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(jnp.stack(both.log_weights)), expected, rtol=1e-6)
    np.testing.assert_allclose(both.log_z, [math.log1p(small), 1e8, 5, 5, -INF, 3e38], rtol=1e-6)
    value, gradient = jax.value_and_grad(numerics.log_add_exp)(x[0], y[0])
    assert value == pytest.approx(math.log1p(small), rel=1e-6)
    assert gradient == pytest.approx(1 / (1 + small), rel=1e-6)


def log_scores_in_float64(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return log_sum_exp_in_float64(x.astype(np.float64)[..., :, None, :] + y[..., None, :, :], -1)


@jax.jit
def log_scores_and_its_gradient(x, y):
    total, pullback = jax.vjp(numerics.log_scores, x, y)
    return total, pullback(jnp.ones_like(total))


@pytest.mark.parametrize("size", [2, 8], ids=["few terms", "many"])
@given(data=st.data(), largest=st.sampled_from([3, 60, 1e4]))
def test_log_scores_and_its_gradient_are_exact(size, data, largest):
    """Small sizes are computed term by term, others by a product if exact."""
    logs = st.one_of(st.just(-INF), st.floats(-largest, largest, width=32))
    x, y = (data.draw(npst.arrays(np.float32, (2, size, 4), elements=logs)) for _ in range(2))
    total, gradients = log_scores_and_its_gradient(x, y)
    expected = log_scores_in_float64(x, y)
    scale = 1 + max(np.abs(a).max(where=np.isfinite(a), initial=0) for a in (x, y))
    np.testing.assert_allclose(total, expected, rtol=0, atol=4e-7 * scale)

    terms = x.astype(np.float64)[..., :, None, :] + y[..., None, :, :]
    shares = np.exp(terms - np.where(np.isneginf(expected), INF, expected)[..., None])
    np.testing.assert_allclose(gradients[0], shares.sum(-2), rtol=0, atol=2e-6 * scale)
    np.testing.assert_allclose(gradients[1], shares.sum(-3), rtol=0, atol=2e-6 * scale)


def test_log_scores_without_a_common_scale():
    """Rows and columns have their largest entries at different k, by more than the range of exp:
    the product underflows to 0 although the sum is not 0."""
    x = jnp.tile(jnp.asarray([0.0, 200.0]), (8, 1))
    y = jnp.tile(jnp.asarray([0.0, -500.0]), (8, 1))
    assert jnp.max(jnp.exp(x - 200) @ jnp.exp(y).T) == 0
    total, (d_x, d_y) = log_scores_and_its_gradient(x, y)
    np.testing.assert_array_equal(total, np.zeros((8, 8)))
    np.testing.assert_array_equal(d_x, np.tile([8.0, 0.0], (8, 1)))
    np.testing.assert_array_equal(d_y, np.tile([8.0, 0.0], (8, 1)))


@pytest.mark.parametrize(
    ("number", "held"),
    [(5, 1), *(pytest.param(*x, marks=pytest.mark.nightly) for x in ((6, 2), (2, 2)))],
)
def test_terms_of_a_large_batch_are_computed_in_parts(monkeypatch, number, held):
    x, y = np.random.default_rng(0).normal(0, 200, (2, number, 8, 4)).astype(np.float32)
    rows, columns = (np.exp(a - a.max(-1, keepdims=True)) for a in (x, y))
    assert np.min(rows @ columns.swapaxes(1, 2)) == 0  # so that sums are computed term by term
    total, gradients = log_scores_and_its_gradient(x, y)
    monkeypatch.setattr(numerics, "TERMS", 2 * 8 * 8 * 4)
    monkeypatch.setattr(numerics, "TERMS_ELSEWHERE", numerics.TERMS)
    in_parts, pullback = jax.vjp(numerics.log_scores, x, y)
    np.testing.assert_array_equal(in_parts, total)
    for part, whole in zip(pullback(jnp.ones_like(total)), gradients, strict=True):
        np.testing.assert_allclose(part, whole, rtol=1e-6, atol=1e-30)
    program = str(jax.make_jaxpr(pullback)(jnp.ones_like(total)))
    assert {int(n) for n in re.findall(r"f32\[(\d+),8,4,8\]", program)} == {held}


def test_scaled_sum_over_an_axis():
    x = jnp.asarray([[1e4, 1e4], [-INF, -1e4], [-INF, -INF]])
    total = numerics.Scaled.exp(x, -1).sum(-1).log()
    np.testing.assert_allclose(total, [1e4 + np.log(2), -1e4, -INF], rtol=1e-6)
