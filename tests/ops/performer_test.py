from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.performer import orthogonal_features, performer_attention

OPTIONS = ("kernel", "is_causal", "epsilon", "return_state", "implementation")
jitted = jax.jit(performer_attention, static_argnames=OPTIONS)

M, K = 7, 3


def draw(length, batch=(), heads=2, groups=1, depth=K, value_depth=2, sources=None, std=1.0):
    """query, key, value, projection"""
    rng = np.random.default_rng(length)
    sources = length if sources is None else sources
    shapes = (length, heads, depth), (sources, groups, depth), (sources, groups, value_depth)
    arrays = [std * rng.standard_normal((*batch, *shape)) for shape in shapes]
    return [*arrays, rng.standard_normal((M, depth))]


def single(arrays):
    return [x.astype(np.float32) for x in arrays]


def log_phi(x, projection, epsilon):
    """Definition, vector by vector."""
    result = np.zeros((*x.shape[:-1], len(projection)))
    for index in np.ndindex(*x.shape[:-1]):
        x_prime = x[index] / x.shape[-1] ** 0.25
        for m, row in enumerate(projection):
            result[(*index, m)] = row @ x_prime - x_prime @ x_prime / 2
    with np.errstate(divide="ignore"):
        return np.logaddexp(result, np.log(epsilon)) - np.log(len(projection)) / 2


def oracle(query, key, value, projection, *, is_causal, epsilon=0.0):
    """Y of one batch entry, with weights as logarithms: exact for any input."""
    query, key, value, projection = (np.float64(x) for x in (query, key, value, projection))
    log_query, log_key = (log_phi(x, projection, epsilon) for x in (query, key))
    share = query.shape[1] // key.shape[1]
    y = np.zeros((*query.shape[:-1], value.shape[-1]))
    for t, n in np.ndindex(*query.shape[:-1]):
        visible = np.s_[: t + 1] if is_causal else np.s_[:]
        keys, values = (x[visible, n // share] for x in (log_key, value))
        weights = np.logaddexp.reduce(log_query[t, n] + keys, axis=-1)
        weights = np.exp(weights - np.max(weights))
        y[t, n] = weights @ values / np.sum(weights)
    return y


@pytest.fixture
def case(golden):
    arrays = golden("favor")
    moved = {name: np.swapaxes(x, 1, 2) for name, x in arrays.items() if x.ndim == 4}
    return moved | {name: x for name, x in arrays.items() if x.ndim == 2}


def inputs_of(case):
    return [case[name] for name in ("q", "k", "v", "projection")]


@pytest.mark.usefixtures("x64")
def test_published_values(case):
    for is_causal, name in ((False, "out"), (True, "out_causal")):
        y = jitted(*inputs_of(case), is_causal=is_causal, implementation="published")
        np.testing.assert_allclose(y, case[name], rtol=0, atol=1e-10)
    y = jitted(*inputs_of(case), is_causal=False, kernel="relu")
    np.testing.assert_allclose(y, case["relu_out"], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_published_form_without_epsilon_is_the_other(case):
    options = {"is_causal": False, "epsilon": 0.0}
    expected = jitted(*inputs_of(case), **options)
    actual = jitted(*inputs_of(case), implementation="published", **options)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    with_epsilon = jitted(*inputs_of(case), is_causal=False, implementation="published")
    assert np.max(np.abs(with_epsilon - expected)) > 1e-6


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("length", "is_causal", "epsilon"),
    [pytest.param(1, True, 0.0, marks=pytest.mark.nightly), (63, True, 0.1), (100, False, 0.0)],
)
def test_values_by_the_definition(length, is_causal, epsilon):
    arrays = draw(length, heads=4, groups=2)
    options = {"is_causal": is_causal, "epsilon": epsilon}
    expected = oracle(*arrays, **options)
    np.testing.assert_allclose(jitted(*arrays, **options), expected, rtol=0, atol=1e-11)
    in_float32 = jitted(*single(arrays), **options)
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kernel", "is_causal", "epsilon"),
    [
        ("softmax", True, 0.1),
        ("relu", True, 0.1),
        pytest.param("softmax", False, 0.0, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_those_of_the_quadratic_form(kernel, is_causal, epsilon):
    arrays = draw(13, batch=(2,), value_depth=3, sources=None if is_causal else 5)
    options = {"kernel": kernel, "is_causal": is_causal, "epsilon": epsilon}

    def quadratic(query, key, value, projection):
        def phi(x):
            projected = jnp.einsum("...k,mk->...m", x, projection) / K**0.25
            norm = jnp.sum(x * x, -1, keepdims=True) / K**0.5 / 2
            features = (
                jnp.exp(projected - norm) if kernel == "softmax" else jnp.maximum(projected, 0)
            )
            return features + epsilon

        weights = jnp.einsum("btnm,bsm->bnts", phi(query), phi(key)[:, :, 0])
        weights = jnp.tril(weights) if is_causal else weights
        total = jnp.sum(weights, -1, keepdims=True)
        return jnp.einsum("bnts,bsv->btnv", weights / total, value[:, :, 0])

    def of(function):
        return jax.grad(lambda x: jnp.sum(jnp.sin(function(*x))))

    actual, expected = (jax.jit(of(f))(arrays) for f in (partial(jitted, **options), quadratic))
    for have, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-11 * max(1, np.max(np.abs(want))))


@pytest.mark.parametrize(
    ("std", "is_causal"), [(1000.0, True), pytest.param(1000.0, False, marks=pytest.mark.nightly)]
)
def test_extreme_inputs(std, is_causal):
    """Features that exceed linear space: one key outweighs all others by thousands of nats."""
    arrays = single(draw(63, std=std))
    arrays[2] = arrays[2] / std
    y, pullback = jax.vjp(partial(jitted, is_causal=is_causal), *arrays)
    # Exponents of 1e6 have an error of 0.1 in float32, which is the relative error of weights.
    expected = oracle(*arrays, is_causal=is_causal)
    np.testing.assert_allclose(y, expected, atol=1e-5 + 1e-7 * std**2)
    for gradient in pullback(jnp.ones_like(y)):
        assert np.isfinite(gradient).all()


def test_equal_tokens_are_averaged():
    query, key, value, projection = single(draw(9))
    key[:] = key[:1]
    y = jitted(query, key, value, projection, is_causal=False)
    average = np.broadcast_to(np.mean(value, 0), y.shape)
    np.testing.assert_allclose(y, average, atol=1e-6)


@pytest.mark.parametrize(
    ("num_features", "depth"),
    [
        (20, 8),
        (3, 5),
        pytest.param(8, 8, marks=pytest.mark.nightly),
        pytest.param(4, 1, marks=pytest.mark.nightly),
    ],
)
def test_features_are_orthogonal_in_blocks(num_features, depth):
    for scaling in (0, 1):
        w = orthogonal_features(jax.random.key(0), num_features, depth, scaling=scaling)
        assert w.shape == (num_features, depth)
        for start in range(0, num_features, depth):
            block = w[start : start + depth]
            gram = np.array(block @ block.T)
            if scaling == 1:
                np.testing.assert_allclose(np.diag(gram), depth, rtol=1e-5)
            np.fill_diagonal(gram, 0)
            np.testing.assert_allclose(gram, 0, atol=1e-5 * depth)
    other = orthogonal_features(jax.random.key(1), num_features, depth)
    assert np.max(np.abs(other - w)) > 0.1


def test_features_are_those_of_normal_vectors_and_weights_unbiased():
    """Over 20000 draws: means are within 5 standard errors of the exact expectations."""
    draws = 20000
    keys = jax.random.split(jax.random.key(2), draws)
    w = np.float64(jax.jit(jax.vmap(lambda key: orthogonal_features(key, 6, 4)))(keys))

    def assert_mean(x, expected):
        error = np.std(x, axis=0) / np.sqrt(draws)
        assert (np.abs(np.mean(x, axis=0) - expected) <= 5 * error + 1e-12).all()

    assert_mean(w, 0)
    assert_mean(np.einsum("dmk,dml->dmkl", w, w), np.eye(4)[None])
    assert_mean(np.sum(w * w, -1) ** 2, 4 * 6)  # second moment of chi squared with 4 degrees

    q, k = np.random.default_rng(0).standard_normal((2, 4)) / 2
    phi = [np.exp(w @ x / 4**0.25 - x @ x / 4**0.5 / 2) / 6**0.5 for x in (q, k)]
    assert_mean(np.sum(phi[0] * phi[1], -1), np.exp(q @ k / 4**0.5))


def test_error_against_softmax_attention_falls_with_the_number_of_features():
    query, key, value, _ = single(draw(40, heads=1, depth=8))
    query, key = query / 2, key / 2  # the variance of larger ones is too high for few draws
    scores = np.exp(query[:, 0] @ key[:, 0].T / 8**0.5)
    exact = scores @ value[:, 0] / scores.sum(-1, keepdims=True)

    def error(num_features):
        def one(seed):
            w = orthogonal_features(seed, num_features, 8)
            return performer_attention(query, key, value, w, is_causal=False)[:, 0] - exact

        errors = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 8))
        return float(np.sqrt(np.mean(np.square(errors))))

    few, many = error(32), error(2048)
    assert many < few / 4  # 8 times less, in expectation
    assert many < 0.06


X, W = np.ones((2, 6, 2, K), np.float32), np.ones((M, K), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ((X, X[:, :5], X[:, :5], W), {}, ValueError, "as many queries as keys"),
        ((X, X, X, W[0]), {}, ValueError, "projection must be"),
        ((X, X, X, W[:, :2]), {}, ValueError, r"projection must have shape \(7, 3\)"),
        ((X, X, X, W), {"kernel": "cosine"}, ValueError, "kernel must be"),
        ((X, X, X, W), {"epsilon": -1.0}, ValueError, "epsilon must not be negative"),
        ((X, X, X, W), {"implementation": "fast"}, ValueError, "implementation must be"),
        (
            (X, X, X, W),
            {"implementation": "published", "return_state": True},
            NotImplementedError,
            "published.* has no return_state",
        ),
        (
            (X, X, X, W),
            {"implementation": "log_space", "kernel": "relu"},
            NotImplementedError,
            "relu",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arrays, options, error, message):
    with pytest.raises(error, match=message):
        performer_attention(*arrays, **options)


@pytest.mark.usefixtures("unchecked")
def test_invalid_features_raise():
    with pytest.raises(ValueError, match="num_features and depth must be >= 1"):
        orthogonal_features(jax.random.key(0), 0, 3)
    with pytest.raises(ValueError, match="scaling must be 0 or 1"):
        orthogonal_features(jax.random.key(0), 4, 3, scaling=2)  # pyright: ignore


def test_features_in_bfloat16():
    rows = orthogonal_features(jax.random.key(0), 4, 2, dtype=jnp.bfloat16)
    assert (rows.shape, rows.dtype) == ((4, 2), jnp.bfloat16)
