"""Generalized orders of magnitude that are split over devices."""

import pytest

from tests.multi_device.apart import run_apart


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.nightly)])
def test_products_are_split_like_their_factors(kind):
    result = run_apart("goom_run.py", kind)
    assert result["error"] < 1e-5
    assert "'data'" in result["spec"]
