"""Objectives: masks, and the tokens that count in the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.data import Batch
from heinsen_jax.objectives.objective import MaskedTokens, next_token

OBJECTIVE = MaskedTokens(fraction=0.15, num_tokens=50)


class Echo:
    """Model that predicts its input: logits are high for that token."""

    readout = jax.tree_util.Partial(jnp.multiply, 5.0)

    def features(self, tokens, segment_ids=None):
        self.given, self.segment_ids = tokens, segment_ids
        return jax.nn.one_hot(tokens, 51), None


def text(rows=400, length=101):
    return jax.random.randint(jax.random.key(1), (rows, length), 0, 50)


def test_each_row_has_the_same_number_of_masked_tokens():
    tokens = text()
    given, drawn = OBJECTIVE.mask(tokens, jax.random.key(0))
    np.testing.assert_array_equal(drawn.sum(1), 15)
    np.testing.assert_array_equal(given[~drawn], tokens[~drawn])
    rates = drawn.mean(0)  # at each position: 15 / 101 within 5 standard deviations
    assert np.all(np.abs(rates - 15 / 101) < 5 * np.sqrt(0.15 * 0.85 / 400))


def test_most_drawn_tokens_are_replaced_by_the_mask():
    tokens = text()
    given, drawn = (np.asarray(x) for x in OBJECTIVE.mask(tokens, jax.random.key(0)))
    chosen, truth = given[drawn], np.asarray(tokens)[drawn]
    others = (chosen != 50) & (chosen != truth)
    assert np.mean(chosen == 50) == pytest.approx(0.8, abs=0.03)
    assert np.mean(chosen == truth) == pytest.approx(0.1 + 0.1 / 50, abs=0.02)
    assert len(set(chosen[others])) == 50


@pytest.mark.parametrize(("length", "count"), [(1, 1), (3, 1), (10, 2), (20, 3)])
def test_at_least_one_is_masked(length, count):
    _, drawn = OBJECTIVE.mask(text(8, length), jax.random.key(0))
    np.testing.assert_array_equal(drawn.sum(1), count)


def test_masks_depend_on_the_key():
    one, same, other = (OBJECTIVE.mask(text(), jax.random.key(seed))[1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.any(one != other)


@pytest.mark.usefixtures("unchecked")  # for a stand-in of a model
def test_only_valid_masked_tokens_count():
    tokens, model = text(4, 33), Echo()
    valid = np.broadcast_to(np.arange(32) < 20, (4, 32))
    said = OBJECTIVE(model, Batch(tokens, valid), jax.random.key(0))
    given, drawn = OBJECTIVE.mask(tokens[:, 1:], jax.random.key(0))
    np.testing.assert_array_equal(said.loss_mask, drawn & valid)
    np.testing.assert_array_equal(model.given, np.where(valid, given, 50))
    right, loss_mask = np.asarray(model.given) == tokens[:, 1:], np.asarray(drawn & valid)
    expected = (np.log(50 + np.exp(5)) - 5 * right) * loss_mask
    loss, correct = said.sums()
    np.testing.assert_allclose(loss, expected.sum(), rtol=1e-5)
    assert correct == np.sum(right & loss_mask)


@pytest.mark.usefixtures("unchecked")  # for a stand-in of a model
def test_next_tokens_are_predicted_from_those_before():
    tokens, model = text(4, 33), Echo()
    said = next_token(model, Batch(tokens, jnp.ones((4, 32), bool)), jax.random.key(0))
    np.testing.assert_array_equal(model.given, tokens[:, :-1])
    assert np.all(said.loss_mask)
    right = 5 * (np.asarray(tokens[:, :-1]) == tokens[:, 1:])
    expected = np.log(50 + np.exp(5)) - right
    np.testing.assert_allclose(said.sums()[0], expected.sum(), rtol=1e-5)


@pytest.mark.usefixtures("unchecked")  # for a stand-in of a model
def test_segments_are_those_of_the_given_tokens():
    tokens, model = text(4, 33), Echo()
    ids = np.broadcast_to(np.arange(33) // 7, (4, 33))
    within = ids[:, 1:] == ids[:, :-1]
    said = next_token(model, Batch(tokens, within, ids), jax.random.key(0))
    np.testing.assert_array_equal(model.segment_ids, ids[:, :-1])
    np.testing.assert_array_equal(said.loss_mask, within)
    said = OBJECTIVE(model, Batch(tokens, within, ids), jax.random.key(0))
    given, drawn = OBJECTIVE.mask(tokens[:, 1:], jax.random.key(0))
    np.testing.assert_array_equal(model.segment_ids, ids[:, 1:])
    np.testing.assert_array_equal(model.given, given)  # also first tokens, which do not count
    np.testing.assert_array_equal(said.loss_mask, drawn & within)


@pytest.mark.usefixtures("unchecked")  # for a stand-in of a model
def test_labels_replace_the_next_tokens():
    tokens, model = text(4, 33), Echo()
    labels = jnp.where(jnp.arange(32) % 3 == 0, tokens[:, :-1], 50)  # a third repeats the input
    batch = Batch(tokens, jnp.ones((4, 32), bool), labels=labels)
    said = next_token(model, batch, jax.random.key(0))
    np.testing.assert_array_equal(model.given, tokens[:, :-1])
    assert said.sums()[1] == 4 * 11
    with pytest.raises(ValueError, match="labels: masked tokens have none"):
        OBJECTIVE(model, batch, jax.random.key(0))
