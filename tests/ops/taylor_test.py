"""Taylor attention against the dense truncated series."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import dot_product_attention, taylor_attention, taylor_features

BATCH, LENGTH, HEADS, GROUPS, VALUE_DEPTH = 2, 70, 4, 2, 3


def draw(depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    query = rng.standard_normal((BATCH, LENGTH, HEADS, depth))
    key = rng.standard_normal((BATCH, LENGTH, GROUPS, depth))
    return query, key, rng.standard_normal((BATCH, LENGTH, GROUPS, VALUE_DEPTH))


def dense(query, key, value, num_terms: int, scale: float, is_causal: bool):
    """sum_s W_ts v_s / sum_s W_ts, W = sum_p (scale q . k)^p / p!"""
    key, value = (jnp.repeat(x, HEADS // GROUPS, 2) for x in (key, value))
    scores = scale * jnp.einsum("btnk,bsnk->bnts", query, key)
    weights = sum(scores**p / math.factorial(p) for p in range(num_terms))
    if is_causal:
        weights = weights * np.tri(LENGTH)[None, None]
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


@pytest.mark.parametrize(
    ("depth", "num_terms", "scale", "is_causal"),
    [(4, 3, None, True), (16, 3, None, False), (3, 5, 0.2, True), (8, 1, None, True)],
)
@pytest.mark.usefixtures("x64")
def test_values_and_gradients_equal_the_series(depth, num_terms, scale, is_causal):
    arrays = draw(depth)
    options = {"num_terms": num_terms, "is_causal": is_causal}

    def ours(*arrays):
        return taylor_attention(*arrays, scale=scale, **options)

    def series(*arrays):
        return dense(*arrays, scale=depth**-0.5 if scale is None else scale, **options)

    def differentiate(function, *arrays):
        y, pullback = jax.vjp(function, *arrays)
        return y, pullback(jnp.sin(y))

    results = (jax.jit(partial(differentiate, function))(*arrays) for function in (ours, series))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_an_even_number_of_terms_must_be_allowed():
    arrays = draw(2)
    with pytest.raises(ValueError, match="num_terms=4 is even"):
        taylor_attention(*arrays, num_terms=4)
    y = taylor_attention(*arrays, num_terms=4, scale=0.1, allow_negative_weights=True)
    np.testing.assert_allclose(y, dense(*arrays, 4, 0.1, True), atol=1e-10)
    with pytest.raises(ValueError, match="num_terms must be at least 1"):
        taylor_attention(*arrays, num_terms=0)
    with pytest.raises(ValueError, match="scale must be positive"):
        taylor_attention(*arrays, scale=-0.5)


@pytest.mark.parametrize(("depth", "num_terms"), [(4, 3), (16, 3), (5, 4)])
def test_the_number_of_features(depth, num_terms):
    expected = sum(math.comb(depth + p - 1, p) for p in range(num_terms))
    assert taylor_features(jnp.ones(depth), num_terms).shape == (expected,)


@pytest.mark.nightly
def test_many_terms_approach_softmax_attention():
    query, key, value = (np.float32(0.5 * x) for x in draw(2))
    y = taylor_attention(query, key, value, num_terms=9)
    expected = dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(y, expected, atol=2e-5)
