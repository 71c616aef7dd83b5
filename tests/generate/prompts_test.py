"""Prompts of different lengths in one batch are continued as they would be alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.generate import generate
from heinsen_jax.generate.prompts import PIECE
from tests.models.mechanisms_test import CAUSAL, build, few_or_nightly

SIZES = {"num_layers": 1, "block": "standard", "convolution_size": 2}
LENGTHS = np.array([PIECE + 5, 1, PIECE])


def prompts(padding: str):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 17, (len(LENGTHS), PIECE + 5))  # what pads is random, too
    rows = []
    for row, length in zip(tokens, LENGTHS, strict=True):
        rows.append(row[:length] if padding == "right" else row[-length:])
    return tokens, rows


@few_or_nightly(CAUSAL, few=["softmax", "rmt"])
def test_as_alone(name):
    check(name, "right")


def test_as_alone_with_padding_on_the_left():
    check("log", "left")


def check(name, padding):
    model = build(name, **SIZES)
    tokens, rows = prompts(padding)
    keys = jax.random.split(jax.random.key(1), len(LENGTHS))
    together = generate(model, tokens, 6, key=keys, lengths=LENGTHS, padding=padding)
    for row, key, new in zip(rows, keys, together, strict=True):
        np.testing.assert_array_equal(generate(model, row, 6, key=key), new)


def test_greedily_after_a_state():
    model = build("log", **SIZES)
    tokens, rows = prompts("right")
    before = jnp.array([[3, 1, 4, 1, 5]] * len(LENGTHS))
    _, state = model(before, return_state=True)
    options = {"top_k": 1, "state": state}
    together, after = generate(model, tokens, 4, lengths=LENGTHS, return_state=True, **options)
    for i, row in enumerate(rows):
        whole = jnp.concatenate([before[i], row])
        np.testing.assert_array_equal(generate(model, whole, 4, top_k=1), together[i])
    more = generate(model, together[:, -1:], 3, top_k=1, state=after)
    further = generate(model, tokens, 7, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(jnp.concatenate([together, more], 1), further)


def test_positions_that_are_learned():
    model = build(
        "softmax", positions="learned", max_length=60, **SIZES | {"convolution_size": None}
    )
    tokens, rows = prompts("left")
    together = generate(model, tokens, 4, top_k=1, lengths=LENGTHS, padding="left")
    for row, new in zip(rows, together, strict=True):
        np.testing.assert_array_equal(generate(model, row, 4, top_k=1), new)


def test_rows_with_keys_of_their_own_do_not_depend_on_one_another():
    model = build("log", **SIZES)
    keys, tokens = jax.random.split(jax.random.key(0), 3), jnp.array([[3, 1], [3, 1], [4, 2]])
    new = generate(model, tokens, 30, key=keys)
    assert np.any(new[0] != new[1])
    np.testing.assert_array_equal(generate(model, tokens[1], 30, key=keys[1]), new[1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [1, 2]}, r"lengths\[2\] must be \[B\].*\[3, 4\]"),
        ({"lengths": [1, 0, 2]}, r"lengths=\[1, 0, 2\] must be whole numbers in 1 .. 4"),
        ({"lengths": [1, 5, 2]}, r"lengths=\[1, 5, 2\]"),
        ({"lengths": [1.0, 2.0, 2.0]}, "whole numbers"),
        ({"lengths": [1, 2, 2], "padding": "both"}, "padding='both' must be 'right' or 'left'"),
    ],
)
def test_bad_lengths_are_named(change, message):
    with pytest.raises(UserError, match=message):
        generate(build("log", **SIZES), jnp.zeros((3, 4), int), 2, top_k=1, **change)


def test_states_that_count_all_rows_together_are_refused():
    tokens = jnp.zeros((3, 4), int)
    with pytest.raises(NotImplementedError, match="count the tokens of all rows together"):
        generate(
            build("softmax", **SIZES), tokens, 2, top_k=1, lengths=[1, 2, 4], return_state=True
        )
