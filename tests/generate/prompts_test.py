"""Prompts of different lengths in one batch equal single prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.generate import generate, stream
from tests.models.mechanisms_test import CAUSAL, build, few_or_nightly
from tests.models.small import apply, assert_greedy

SIZES = {"num_layers": 1, "block": "standard", "convolution_size": 2}
CHUNK = 32
LENGTHS = np.array([CHUNK + 5, 1, CHUNK])


def prompts(padding: str):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 17, (len(LENGTHS), CHUNK + 5))  # padding is random, too
    rows = []
    for row, length in zip(tokens, LENGTHS, strict=True):
        rows.append(row[:length] if padding == "right" else row[-length:])
    return tokens, rows


@few_or_nightly(CAUSAL, few=["log", "softmax"])
def test_rows_equal_single_prompts(name):
    model = build(name, **SIZES)
    for padding in ("right", "left"):
        tokens, rows = prompts(padding)
        new = generate(model, tokens, 6, top_k=1, lengths=LENGTHS, padding=padding)
        assert_greedy(model, rows, new)


@pytest.mark.parametrize("name", ["log", "softmax"])
def test_greedily_after_a_state(name):
    model = build(name, **SIZES)
    tokens, rows = prompts("right")
    before = np.array([[3, 1, 4, 1, 5]] * len(LENGTHS))
    _, state = apply(model, before, return_state=True)
    options = {"top_k": 1, "state": state, "return_state": True}
    together, after = generate(model, tokens, 6, lengths=LENGTHS, **options)
    more = generate(model, together[:, -1:], 6, top_k=1, state=after)
    whole = [np.concatenate([first, row]) for first, row in zip(before, rows, strict=True)]
    assert_greedy(model, whole, np.concatenate([together, more], 1))


@pytest.mark.parametrize("lengths", [pytest.param(LENGTHS, marks=pytest.mark.nightly), None])
def test_chunks_of_all_sizes(lengths, monkeypatch):
    monkeypatch.setattr("heinsen_jax.generate.engine.CHUNKS", (16, 4, 1))
    model = build("log", **SIZES | {"model_dim": 24})  # a shape that no other test compiles
    tokens, rows = prompts("right")
    rows = tokens if lengths is None else rows
    assert_greedy(model, rows, generate(model, tokens, 6, top_k=1, lengths=lengths))


def test_learned_positions():
    fields = {"positions": "learned", "max_length": 60, "convolution_size": None}
    model = build("softmax", **SIZES | fields)
    tokens, rows = prompts("left")
    assert_greedy(model, rows, generate(model, tokens, 6, top_k=1, lengths=LENGTHS, padding="left"))


@pytest.mark.nightly
def test_fewer_learned_positions_than_a_chunk_has_tokens():
    fields = {"positions": "learned", "max_length": 20, "convolution_size": None}
    model = build("softmax", **SIZES | fields)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    new = generate(model, tokens, 6, top_k=1)
    assert_greedy(model, tokens[None], new[None])
    streamed = stream(model, tokens, top_k=1)
    assert [int(next(streamed)) for _ in new] == new.tolist()


@few_or_nightly(CAUSAL, few=[])
def test_samples_equal_single_prompts(name):
    """Nightly: the short suite covers independent rows below, and greedy decoding above."""
    model = build(name, **SIZES)
    tokens, rows = prompts("right")
    keys = jax.random.split(jax.random.key(1), len(LENGTHS))
    together = generate(model, tokens, 6, key=keys, lengths=LENGTHS)
    for row, key, new in zip(rows, keys, together, strict=True):
        np.testing.assert_array_equal(generate(model, row, 6, key=key), new)


@pytest.mark.nightly
def test_rows_with_their_own_keys_are_independent():
    model = build("log", **SIZES)
    keys, tokens = jax.random.split(jax.random.key(0), 3), jnp.array([[3, 1], [3, 1], [4, 2]])
    new = generate(model, tokens, 30, key=keys, lengths=[2, 2, 1])
    assert np.any(new[0] != new[1])
    np.testing.assert_array_equal(generate(model, tokens[1], 30, key=keys[1]), new[1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [1, 2]}, r"lengths\[2\] must be \[B\].*\[3, 4\]"),
        ({"lengths": [1, 0, 2]}, r"lengths=\[1, 0, 2\] must be integers in 1 .. 4"),
        ({"lengths": [1, 5, 2]}, r"lengths=\[1, 5, 2\]"),
        ({"lengths": [1.0, 2.0, 2.0]}, "integers"),
        ({"lengths": [1, 2, 2], "padding": "both"}, "padding='both' must be 'right' or 'left'"),
    ],
)
def test_bad_lengths_are_named(change, message):
    with pytest.raises(UserError, match=message):
        generate(build("log", **SIZES), jnp.zeros((3, 4), int), 2, top_k=1, **change)


def test_a_model_refuses_a_state_of_rows_with_different_lengths():
    model, tokens = build("softmax", **SIZES), jnp.zeros((3, 4), int)
    new, state = generate(model, tokens, 2, top_k=1, lengths=[1, 2, 4], return_state=True)
    with pytest.raises(NotImplementedError, match="rows have different numbers of tokens"):
        model(new[:, -1:], state=state)
