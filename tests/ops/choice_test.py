"""The first implementation that can handle the inputs is chosen, one for a whole batch."""

import jax
import jax.numpy as jnp
import pytest

from heinsen_jax.ops.choice import first_safe


@pytest.mark.parametrize(
    ("excess", "choice"),
    [([-1, -2], 0), ([0, -2], 0), ([1, -2], 1), ([2, 1], 2), ([jnp.nan, -1], 1)],
)
def test_the_first_that_is_in_range(excess, choice):
    assert int(first_safe(jnp.array(excess, float))) == choice


def test_a_batch_has_the_choice_of_its_most_extreme_row():
    rows = jnp.array([[-1.0, -2.0], [1.0, -2.0], [-3.0, -4.0]])
    assert jax.vmap(first_safe)(rows).tolist() == [1, 1, 1]
