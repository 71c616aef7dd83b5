"""Rules of masks, and the tiles of keys that they make visible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops import masks, tiled
from heinsen_jax.ops.masks import Mask

SIZES = st.integers(0, 40)
RULES = st.recursive(
    st.one_of(
        st.just(masks.Everything()),
        st.just(masks.Causal()),
        st.builds(masks.Window, SIZES, SIZES),
        st.builds(masks.Strided, st.integers(1, 9)),
        st.builds(masks.SameBlock, st.integers(1, 50)),
        st.builds(lambda size: masks.BlockEnds(size + 2, size // 2 + 1), SIZES),
        st.builds(
            lambda start, size, only: masks.Global(((start, start + size + 1), (99, 102)), only),
            SIZES,
            SIZES,
            st.booleans(),
        ),
    ),
    lambda rules: st.one_of(
        st.builds(lambda x, y: x & y, rules, rules), st.builds(lambda x, y: x | y, rules, rules)
    ),
    max_leaves=4,
)


def problem_of(mask: Mask, columns: int, keys: int) -> tiled.Problem:
    return tiled.Problem(mask, queries=keys, keys=keys, offset=0, columns=columns)


@given(RULES, st.integers(0, 150), SIZES, st.sampled_from([1, 3, 16, 64]), st.integers(1, 150))
@settings(max_examples=200, deadline=None)
def test_visible_tiles_have_a_visible_key(mask, first, more, columns, keys):
    last = first + more
    visible = np.any(mask(np.arange(first, last + 1)[:, None], np.arange(keys)[None]), 0)
    wanted = np.unique(np.flatnonzero(visible) // columns)
    given_tiles = tiled._visible_to(first, last, problem_of(mask, columns, keys))
    np.testing.assert_array_equal(given_tiles, wanted)


def test_windows_are_not_compared_key_by_key(monkeypatch):
    """Otherwise, the time to trace a call would grow with the square of the tokens."""
    monkeypatch.setattr(masks.Window, "__call__", None)
    tiles = tiled._visible_to(2**20, 2**20 + 127, problem_of(masks.Window(63), 128, 2**21))
    np.testing.assert_array_equal(tiles, [8191, 8192])


def test_a_window_may_be_an_integer_of_numpy():
    assert masks.reach(np.int64(3), is_causal=True) == masks.reach(3, is_causal=True) == (2, 0)


@pytest.mark.parametrize("pair", [(0.5, 0), (1, True), (-1, 0), (1, 2, 3)])
def test_pairs_are_two_integers(pair):
    assert masks.reach((np.int64(3), 1), is_causal=False) == (3, 1)
    with pytest.raises(ValueError, match="local_window_size must be a pair of integers >= 0"):
        masks.reach(pair, is_causal=False)
