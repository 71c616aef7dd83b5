"""The layout of log-attention: padding of tokens."""

import jax.numpy as jnp
import numpy as np

from heinsen_jax.ops.log_attention.inputs import Inputs, pad_tokens

SHAPES = {"query": (2, 3, 1, 2, 4), "key": (2, 3, 1, 4), "value": (2, 3, 1, 5)}
RNG = np.random.default_rng(0)
INPUTS = Inputs(**{name: jnp.asarray(RNG.standard_normal(x)) for name, x in SHAPES.items()})


def test_appended_tokens_have_no_weight_and_extend_no_range_of_values():
    padded = pad_tokens(INPUTS, 5)
    assert padded.length == padded.query.shape[1] == 5
    for name in SHAPES:
        np.testing.assert_array_equal(getattr(padded, name)[:, :3], getattr(INPUTS, name))
    np.testing.assert_array_equal(padded.key[:, 3:], np.full((2, 2, 1, 4), -np.inf))
    np.testing.assert_array_equal(padded.value[:, 3:], np.repeat(INPUTS.value[:, 2:], 2, 1))
    assert (padded.log_decay, padded.starts) == (None, None)


def test_appended_tokens_have_no_decay_and_start_no_segment():
    starts = np.array([[False, True, False], [True, False, True]])
    decay = -np.ones((2, 3, 1, 1), np.float32)
    given = Inputs(INPUTS.query, INPUTS.key, INPUTS.value, jnp.asarray(decay), jnp.asarray(starts))
    padded = pad_tokens(given, 5).decay_and_starts
    assert padded is not None
    decay[starts] = -np.inf
    np.testing.assert_array_equal(padded, np.pad(decay, [(0, 0), (0, 2), (0, 0), (0, 0)]))


def test_tokens_that_need_no_padding_are_not_copied():
    assert pad_tokens(INPUTS, 3) is INPUTS
