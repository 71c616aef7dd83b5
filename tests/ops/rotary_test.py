"""Rotary embedding: by definition and as published."""

import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.rotary import rotary


@pytest.mark.usefixtures("x64")
def test_published_angles(golden):
    case = golden("mla")
    ones = np.tile(np.array([1.0, 0.0], np.float32), (8, 1, 2))
    turned = rotary(ones, np.arange(8))
    assert turned.dtype == jnp.float32
    np.testing.assert_allclose(turned[:, 0, ::2], case["freqs_cos"], rtol=0, atol=2e-7)
    np.testing.assert_allclose(turned[:, 0, 1::2], case["freqs_sin"], rtol=0, atol=2e-7)


@pytest.mark.usefixtures("x64")
def test_by_the_definition():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 6))
    for positions in (np.arange(5), np.random.default_rng(1).integers(0, 1000, (2, 5))):
        actual = rotary(x, positions, base=100.0)
        for b, t, n, i in np.ndindex(2, 5, 3, 3):
            position = np.broadcast_to(positions, (2, 5))[b, t]
            turn = np.exp(1j * position * 100.0 ** (-2 * i / 6))
            expected = (x[b, t, n, 2 * i] + 1j * x[b, t, n, 2 * i + 1]) * turn
            have = actual[b, t, n, 2 * i] + 1j * actual[b, t, n, 2 * i + 1]
            np.testing.assert_allclose(have, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_given_frequencies_rotate_the_first_pairs():
    x, positions = np.random.default_rng(0).standard_normal((5, 3, 8)), np.arange(5)
    frequencies = 100.0 ** (-np.arange(0, 6, 2) / 6)
    actual = rotary(x, positions, frequencies=frequencies)
    np.testing.assert_allclose(actual[..., :6], rotary(x[..., :6], positions, base=100.0))
    np.testing.assert_array_equal(actual[..., 6:], x[..., 6:])
    with pytest.raises(ValueError, match="frequencies of 3 pairs, but x has 4 features"):
        rotary(x[..., :4], positions, frequencies=frequencies)


@pytest.mark.usefixtures("x64")
def test_products_depend_on_the_distance_only():
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 8))

    def product(t, s):
        turned = rotary(query[None], np.array([t])), rotary(key[None], np.array([s]))
        return np.sum(turned[0] * turned[1])

    np.testing.assert_allclose(product(7, 3), product(1007, 1003), atol=1e-10)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


@pytest.mark.parametrize(
    ("x", "positions", "message"),
    [
        (np.zeros((6, 1, 5)), np.arange(6), "an even number of features"),
        (np.zeros((6, 1, 4)).astype(int), np.arange(6), "floating point"),
        (np.zeros((6, 1, 4)), np.arange(5), "positions must have shape"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(x, positions, message):
    with pytest.raises(ValueError, match=message):
        rotary(x, positions)
