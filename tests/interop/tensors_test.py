"""Layouts of tensors in transformers: the order of heads and of rotated features."""

import numpy as np
import pytest

from heinsen_jax.interop.tensors import INTERLEAVED, SEPARATE, THIRDS, Heads

HEADS = Heads(num_heads=2, num_kv_heads=1, depth=6, widths=(12, 6, 6), rotated=4)
EQUAL = Heads(num_heads=2, num_kv_heads=2, depth=2, widths=(4, 4, 4), rotated=0)


def test_rotated_features_become_adjacent():
    """Transformers rotates features 0 and 2, and 1 and 3; the rest stays."""
    np.testing.assert_array_equal(HEADS.order, [0, 2, 1, 3, 4, 5])


def test_heads_of_a_group_are_adjacent():
    query, key, value = np.arange(12), 100 + np.arange(6), 200 + np.arange(6)
    order = [0, 2, 1, 3, 4, 5]
    expected = [*order, *(6 + x for x in order), *(100 + x for x in order), *range(200, 206)]
    np.testing.assert_array_equal(HEADS.join(query, key, value), expected)
    for have, want in zip(HEADS.split(np.array(expected)), (query, key, value), strict=True):
        np.testing.assert_array_equal(have, want)


# Rows of q, k and v for two heads of two features, of one input.
Q, K, V = ([[10], [11], [12], [13]], [[20], [21], [22], [23]], [[30], [31], [32], [33]])
FUSED = [[10, 11, 20, 21, 30, 31, 12, 13, 22, 23, 32, 33]]  # by head, as in this package


@pytest.mark.parametrize(
    ("layout", "theirs"),
    [
        (SEPARATE, [Q, K, V]),
        (INTERLEAVED, [np.transpose(FUSED)]),  # GPT-NeoX
        (THIRDS, [np.transpose([*Q, *K, *V])]),  # GPT-2, not transposed
    ],
)
def test_layouts_are_those_of_transformers(layout, theirs):
    theirs = [np.array(x) for x in theirs]
    np.testing.assert_array_equal(layout.to_ours(theirs, EQUAL), FUSED)
    for have, want in zip(layout.to_theirs(np.array(FUSED), EQUAL), theirs, strict=True):
        np.testing.assert_array_equal(have, want)
