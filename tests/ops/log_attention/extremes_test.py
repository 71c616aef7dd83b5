"""All families of extreme inputs, with all implementations, against the definition in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import heinsen_attention, log_attention
from heinsen_jax.ops.linear_recurrence import log_linear_recurrence
from heinsen_jax.ops.numerics import log_add_exp
from tests.ops.log_attention.cases import (
    FAST,
    Inputs,
    assert_as_exact,
    assert_gradients_within,
    assert_within,
    differentiate,
    differentiate_mean,
    in_float64,
    mean_oracle,
    oracle,
)
from tests.ops.log_attention.families import FINITE, MASKED, VALUES, apart, largest, size_of

each_fast = pytest.mark.parametrize("implementation", FAST)


@each_fast
@pytest.mark.parametrize("name", [*FINITE])
def test_finite(name, implementation):
    inputs = FINITE[name]()
    actual = differentiate(inputs, implementation)
    for leaf in (actual.output, *jax.tree.leaves(actual.gradients)):
        assert np.isfinite(leaf).all()
    assert_as_exact(actual, oracle(inputs), size_of(inputs), unit=2e-6)


@each_fast
@pytest.mark.parametrize("name", [*MASKED])
def test_log_zero(name, implementation):
    inputs = MASKED[name]()
    actual = differentiate(inputs, implementation)
    assert_as_exact(actual, oracle(inputs), size_of(inputs), unit=5e-6)
    for gradient, x in zip(actual.gradients[:3], inputs[:3], strict=True):
        np.testing.assert_array_equal(gradient[np.isneginf(x)], 0)


@each_fast
@pytest.mark.parametrize("name", [*VALUES])
def test_values_of_any_sign_and_size(name, implementation):
    """Errors are relative to the same average of |values|, the size of the terms."""
    inputs = VALUES[name]()._replace(state=None)
    output, gradients = differentiate_mean(inputs, implementation)
    expected, expected_gradients = mean_oracle(inputs)
    magnitude, _ = mean_oracle(inputs._replace(value=np.abs(inputs.value)))
    relative = 2e-6 * (1 + largest(inputs.query, inputs.key))
    assert_within(output, expected, relative * magnitude + 1e-37)
    unit = np.max(np.abs(inputs.value)) or 1.0

    def in_units(gradients: Inputs) -> Inputs:
        return gradients._replace(query=gradients.query / unit, key=gradients.key / unit)

    assert_gradients_within(in_units(gradients), in_units(expected_gradients), relative)


@each_fast
@pytest.mark.parametrize(("nats", "size"), [(0, 1), (10, 1e37), (35, 1e30), (55, 1e20), (75, 1)])
def test_decay_by_feature_of_distant_features(nats, size, implementation):
    inputs = VALUES["keys rise"]()
    inputs = apart(inputs._replace(value=np.float32(size) * inputs.value, state=None), nats)
    decay = -np.random.default_rng(0).exponential(size=inputs.key.shape).astype(np.float32)

    def gradient(inputs, decay, implementation):
        def call(query, key, value, decay):
            y = heinsen_attention(query, key, value, log_decay=decay, implementation=implementation)
            return jnp.sum(y), y

        function = jax.jit(jax.grad(call, (0, 1, 2, 3), has_aux=True))
        return jax.tree.map(np.asarray, function(*inputs[:3], decay))

    gradients, y = gradient(inputs, decay, implementation)
    with jax.enable_x64(True):
        expected, expected_y = gradient(in_float64(inputs), in_float64(decay), "reference")
    relative = 2e-6 * (1 + largest(inputs.query, inputs.key))
    assert_within(y / size, expected_y / size, relative)
    units = size, size, 1, size
    for have, want, unit in zip(gradients, expected, units, strict=True):
        assert_within(have / unit, want / unit, relative * (1 + np.abs(want / unit)))


LEVELS = 1e4, 1e8, 1e30
"""Sizes of keys; log 2 is less than the spacing of floats at the last two."""
each_level = pytest.mark.parametrize("level", LEVELS)


def equal_keys(level: float, length: int = 37) -> tuple[np.ndarray, ...]:
    """Queries, keys of this level, and values."""
    rng = np.random.default_rng(0)
    query, value = rng.standard_normal((2, 1, length, 1, 3), np.float32)
    return query, np.full_like(query, level), value


@each_level
@pytest.mark.parametrize("implementation", [*FAST, "reference"])
def test_equal_keys_have_equal_weights(level, implementation):
    """Whatever their size: weights are not the exponentials of differences from a rounded sum."""
    query, key, value = equal_keys(level)
    counts = np.arange(1, key.shape[1] + 1)[:, None, None]
    for attend, mean in (
        (heinsen_attention, np.cumsum(value, 1) / counts),
        (log_attention, np.log(np.cumsum(np.exp(value), 1) / counts)),
    ):
        for is_causal, wanted in (True, mean), (False, np.broadcast_to(mean[:, -1:], mean.shape)):
            call = partial(attend, query, key, implementation=implementation, is_causal=is_causal)
            np.testing.assert_allclose(call(value), wanted, atol=2e-6)
            (weights,) = jax.vjp(call, value)[1](jnp.ones_like(value))
            assert np.sum(weights) == pytest.approx(value.size, rel=1e-5)


@pytest.mark.parametrize(
    ("attend", "level"),
    [*((heinsen_attention, x) for x in LEVELS), (log_attention, 1e4), (log_attention, 1e8)],
)
def test_streams_do_not_leave_the_range_of_their_values(attend, level):
    """A state has the sum of its keys as one number, whose spacing at 1e8 is more than the log of
    their number. Averages are still between the values; log_s has the same spacing."""
    query, key, value = equal_keys(level)
    value, state, outputs = value + 5, None, []
    for token in range(key.shape[1]):
        now = (x[:, token : token + 1] for x in (query, key, value))
        y, state = attend(*now, is_causal=True, initial_state=state, return_state=True)
        outputs.append(y)
    error = 1e-5 if attend is heinsen_attention else np.spacing(np.float32(level))
    assert np.min(value) - error <= np.min(outputs) <= np.max(outputs) <= np.max(value) + error


@each_level
def test_the_recurrence_has_gradients_of_equal_terms(level):
    """Each of n equal terms has 1/n."""
    steps = jnp.full((5, 1), level)
    gradient = jax.grad(lambda x: log_linear_recurrence(jnp.zeros_like(x), x)[-1, 0])(steps)
    np.testing.assert_allclose(gradient, np.full((5, 1), 0.2), rtol=1e-6)
    pair = jax.grad(lambda x, y: log_add_exp(x, y)[0], (0, 1))(steps[0], steps[1])
    np.testing.assert_allclose(pair, np.full((2, 1), 0.5), rtol=1e-6)
