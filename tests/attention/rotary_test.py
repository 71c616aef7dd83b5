"""Frequencies of rotary positions."""

import numpy as np
import pytest

from heinsen_jax.attention.rotary import RotaryOptions

# Pairs of 4 features turn by 1 and 0.01 radians per token: in 1000 tokens 159 and 1.59 times.
BETWEEN = (1000 * 0.01 / (2 * np.pi) - 1) / (4 - 1)
CASES = {
    "linear": ({"rotary_factor": 2.0}, 4, [0.5, 0.005]),
    "first half": ({"rotary_fraction": 0.5}, 8, [1, 0.01]),
    "few turns": ({"rotary_factor": 8.0, "rotary_original_length": 100}, 4, [1, 0.01 / 8]),
    "between": (
        {"rotary_factor": 8.0, "rotary_original_length": 1000},
        4,
        [1, 0.01 * (BETWEEN + (1 - BETWEEN) / 8)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies(name):
    options, key_depth, expected = CASES[name]
    np.testing.assert_allclose(RotaryOptions(**options).frequencies(key_depth), expected)
