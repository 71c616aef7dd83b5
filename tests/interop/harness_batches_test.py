"""Windows of requests that are longer than the model's maximum length."""

import numpy as np
import pytest

from heinsen_jax.interop.harness_batches import batches, padded, padded_row, windows


@pytest.mark.parametrize(
    ("context", "continuation", "max_length", "expected"),
    [
        ([1, 2, 3], [4, 5], None, [([1, 2, 3], [4, 5])]),
        ([1, 2, 3, 4], [5, 6], 3, [([3, 4], [5, 6])]),  # 3, 4 and 5 are given
        ([1, 2], [3], 2, [([1, 2], [3])]),
        ([1], [2, 3, 4, 5], 2, [([1], [2, 3]), ([3], [4, 5])]),
        ([1, 2], [3, 4, 5], 2, [([2], [3, 4]), ([3, 4], [5])]),
    ],
)
def test_each_token_is_predicted_once_from_at_most_max_length(
    context, continuation, max_length, expected
):
    assert windows(context, continuation, max_length) == expected


def test_batches_are_padded_to_few_shapes():
    assert [[*x] for x in batches(2, [1, 2, 3])] == [[1, 2], [3]]
    np.testing.assert_array_equal(padded_row([4, 2], 3), [4, 2, 0])
    tokens = np.asarray(padded([[1, 2], [3]], 3, 4))
    assert tokens.shape == (3, 16)
    np.testing.assert_array_equal(tokens[:, :3], [[1, 2, 0], [3, 0, 0], [0, 0, 0]])
    assert padded([[1] * 17], 1).shape == (1, 32)
