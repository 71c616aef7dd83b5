"""Fits of power laws."""

import numpy as np
import pytest

from studies.power_law import fit_power_law


def test_exponents_are_those_of_the_data():
    x = np.repeat(np.geomspace(1e5, 3e6, 6), 2)
    noise = np.tile([1.002, 0.998], 6)
    fit = fit_power_law(x.tolist(), (5 * x**-0.08 * noise).tolist())
    assert fit is not None
    low, high = fit.interval
    assert low < 0.08 < high
    assert 2e-3 < high - low < 3e-3
    assert fit(1e6) == pytest.approx(5 * 1e6**-0.08, rel=2e-3)


def test_intervals_have_their_level():
    rng = np.random.default_rng(0)
    x = np.geomspace(1.0, 100.0, 5)
    inside = 0
    for _ in range(400):
        y = x**-0.5 * np.exp(0.05 * rng.standard_normal(5))
        fit = fit_power_law(x.tolist(), y.tolist())
        assert fit is not None
        inside += fit.interval[0] < 0.5 < fit.interval[1]
    assert 0.92 < inside / 400 < 0.98


@pytest.mark.parametrize("x", [[1.0, 2.0], [3.0, 3.0, 3.0]])
def test_too_few_points_have_no_fit(x):
    assert fit_power_law(x, [1.0] * len(x)) is None
