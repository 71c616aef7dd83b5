"""Masked attention in chunks of queries; see also the tests of `log_attention_fn`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.log_attention.masked import SMALL, masked_attention
from tests.ops.log_attention.masks import (
    BATCH,
    DEPTH,
    HEADS,
    Arrays,
    arrays,
    average,
    cotangent_of,
)

pytestmark = pytest.mark.usefixtures("as_users_compile")


@pytest.mark.parametrize(
    ("of_heads", "std"),
    [
        (1, 1.0),
        (HEADS, 1000.0),
        pytest.param(1, 1000.0, marks=pytest.mark.nightly),
        pytest.param(HEADS, 1.0, marks=pytest.mark.nightly),
    ],
)
def test_chunks_of_queries(of_heads, std):
    """At a length that is not a multiple of the chunks."""
    length = 331
    assert BATCH * HEADS * DEPTH * length**2 > SMALL
    x = arrays(std, groups=2, length=length)
    mask = np.random.default_rng(1).uniform(size=(BATCH, of_heads, length, length)) < 0.1
    mask[:, :, 200:205] = False
    y, pullback = jax.vjp(lambda x: masked_attention(*x, mask), x)
    (grads,) = jax.jit(pullback)(cotangent_of(x))
    expected, expected_grads = average(x, mask, cotangent_of(x))
    unit = 5e-6 * (1 + std)
    np.testing.assert_allclose(y, expected, atol=unit)
    assert not np.any(y[:, 200:205])
    for name in Arrays._fields:
        have, want = getattr(grads, name), getattr(expected_grads, name)
        np.testing.assert_allclose(have, want, atol=unit * np.abs(want).max(), err_msg=name)


def test_float64(x64):
    x = Arrays(*(a.astype(np.float64) for a in arrays(30.0)))
    mask = np.random.default_rng(1).uniform(size=(BATCH, 1, 19, 19)) < 0.3
    np.testing.assert_allclose(masked_attention(*x, mask), average(x, mask)[0], atol=1e-12)


def test_terms_of_scores_are_never_stored():
    length, depth = 512, 32
    x = jax.ShapeDtypeStruct((1, length, 4, depth), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, length, length), jnp.bool_)
    grad = jax.grad(lambda x, mask: masked_attention(x, x, x, mask).sum())
    held = jax.jit(grad).lower(x, mask).compile().memory_analysis().temp_size_in_bytes
    scores = 4 * 4 * length**2
    assert held < 4 * scores < scores * depth / 4
