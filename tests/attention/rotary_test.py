"""Frequencies of rotary positions."""

import numpy as np
import pytest

from heinsen_jax.attention.rotary import RotaryOptions

# Pairs of 4 features turn by 1 and 0.01 radians per token: in 1000 tokens 159 and 1.59 times.
BETWEEN = (1000 * 0.01 / (2 * np.pi) - 1) / (4 - 1)
# Of 32 pairs of the base 10000, 64 ln(4096 / (2 pi n)) / (2 ln 10000) has n turns in 4096 tokens:
# pair 10.47 has 32 turns, and pair 22.51 one; 10 and 23 as whole pairs.
RAMP = np.clip((np.arange(32) - 10) / 13, 0, 1)
YARN = {"rotary_factor": 4.0, "rotary_original_length": 4096, "rotary_high_turns": 32.0}
CASES = {
    "yarn": (
        YARN | {"rotary_interpolation": "pairs"},
        64,
        10000.0 ** (-np.arange(32) / 32) * (1 - RAMP + RAMP / 4),
    ),
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
