"""All families of extreme inputs, with all implementations, against the definition in float64."""

import jax
import numpy as np
import pytest

from tests.ops.log_attention.cases import (
    FAST,
    Inputs,
    assert_as_exact,
    assert_gradients_within,
    assert_within,
    differentiate,
    differentiate_mean,
    mean_oracle,
    oracle,
)
from tests.ops.log_attention.families import FINITE, MASKED, VALUES, largest, size_of

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
