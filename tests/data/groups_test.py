"""Tables of finite groups have the properties of groups."""

import math

import numpy as np
import pytest

from heinsen_jax.data.groups import cyclic_group, symmetric_group

GROUPS = {
    "cyclic, 2": (cyclic_group(2), 2),
    "cyclic, 7": (cyclic_group(7), 7),
    "symmetric, 2": (symmetric_group(2), 2),
    "symmetric, 5": (symmetric_group(5), math.factorial(5)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_products_are_those_of_a_group(name):
    (products, generators), order = GROUPS[name]
    table, numbers = np.array(products), np.arange(order)
    assert table.shape == (order, order)
    np.testing.assert_array_equal(table[0], numbers)  # 0 is the identity
    np.testing.assert_array_equal(table[:, 0], numbers)
    np.testing.assert_array_equal(np.sort(table), np.broadcast_to(numbers, table.shape))  # inverses
    a, b, c = np.random.default_rng(0).integers(order, size=(3, 500))
    np.testing.assert_array_equal(table[table[a, b], c], table[a, table[b, c]])
    reached = {0}
    for _ in range(order):
        reached |= {products[element][x] for element in reached for x in generators}
    assert reached == set(range(order))


def test_permutations_do_not_commute():
    products, (swap, cycle) = symmetric_group(5)
    assert products[swap][cycle] != products[cycle][swap]
