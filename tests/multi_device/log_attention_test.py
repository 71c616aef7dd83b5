"""Log-attention inside `jax.shard_map`, on eight virtual devices."""

import random

import pytest

from tests.multi_device.apart import run_apart


@pytest.mark.parametrize(
    "names",
    [
        ["all, from a state to a state"],
        pytest.param(
            ["by query heads", "by rows", "segments", "both ways"], marks=pytest.mark.nightly
        ),
    ],
    ids=", ".join,
)
def test_sharded_results_equal_those_of_one_device(names):
    """Compare outputs, states and gradients, with and without segments and states."""
    seed = random.randrange(1 << 30)
    errors = run_apart("log_attention_run.py", str(seed), *names)["errors"]
    assert {*errors} == {*names}
    for name, of_arrays in errors.items():
        assert len(of_arrays) >= 4, name
        assert all(error < 1e-5 for error in of_arrays), (name, of_arrays, seed)  # nor NaN
