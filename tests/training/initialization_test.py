"""New attention layers, fitted to a teacher's before the first update."""

import jax
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.data import Batch
from heinsen_jax.models import Layers
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.initialization import CANDIDATES, RIDGE, fit_to_teacher
from tests.models.conversion_test import HEDGEHOG, model, of_layer

TOKENS = np.random.default_rng(0).integers(0, 264, (3, 25))
MASK = np.arange(24)[None] < np.array([[24], [24], [11]])
IDS = np.arange(25)[None] // np.array([[25], [10], [7]])


def fitted(ours, teacher, segment_ids):
    have = nnx.clone(ours)
    batch = Batch(TOKENS, MASK, segment_ids)
    nnx.update(have, jax.jit(fit_to_teacher)(ours, teacher, batch))
    return have


@pytest.mark.parametrize("segment_ids", [None, IDS])
def test_output_projections_minimize_the_error(segment_ids):
    """In each layer, behind the fitted layers before it; other parameters stay."""
    teacher = model("softmax", seed=1, convolution_size=3)
    ours = model(("softmax", HEDGEHOG), seed=2, convolution_size=3)
    have = fitted(ours, teacher, segment_ids)
    ids = None if segment_ids is None else segment_ids[:, :-1]
    x, _ = have.embedded(TOKENS[:, :-1], ids)
    wanted_x, _ = teacher.embedded(TOKENS[:, :-1], ids)
    for layer in range(4):
        block, theirs = of_layer(have, layer), of_layer(teacher, layer)
        _, inputs, _ = theirs.attention_input(wanted_x, segment_ids=ids)
        wanted = theirs.attention(inputs, segment_ids=ids)
        if layer % 2:
            output, initial = block.attention.output, of_layer(ours, layer).attention.output
            _, inputs, _ = block.attention_input(x, segment_ids=ids)
            block.attention.output = lambda heads: heads
            heads = np.asarray(block.attention(inputs, segment_ids=ids), np.float64)[MASK]
            block.attention.output = output
            start = np.asarray(initial.kernel[...], np.float64)
            weight = np.sqrt(RIDGE * np.mean(np.sum(heads**2, 0)))
            rows = np.concatenate([heads, weight * np.eye(len(start))])
            target = np.concatenate([np.asarray(wanted, np.float64)[MASK], weight * start])
            best, *_ = np.linalg.lstsq(rows, target, rcond=None)
            np.testing.assert_allclose(output.kernel[...], best, atol=2e-5)
        x, _ = block(x, state=None, return_state=False, segment_ids=ids)
        wanted_x, _ = theirs(wanted_x, state=None, return_state=False, segment_ids=ids)
    before, after = (flatten_with_names(nnx.state(each, nnx.Param)) for each in (ours, have))
    changed = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert changed == {"blocks.1.attention.output.kernel.value"}


@pytest.mark.parametrize("features", ["hedgehog", "identity"])
def test_merged_layers_have_the_best_of_some_log_weights(features):
    """The log weight is chosen last, given the features."""
    options = {"window_size": 4, "features": features}
    teacher = model("softmax", seed=1)
    ours = model((Layers("log_window", options=options), "softmax"), seed=2)
    have = fitted(ours, teacher, None)
    before, after = (of_layer(each, 0).attention for each in (ours, have))
    x, wanted_x = (each.embedded(TOKENS[:, :-1], None)[0] for each in (have, teacher))
    _, inputs, _ = of_layer(have, 0).attention_input(x)
    theirs = of_layer(teacher, 0)
    wanted = np.asarray(theirs.attention(theirs.attention_input(wanted_x)[1]), np.float64)[MASK]
    start = np.asarray(before.output.kernel[...], np.float64)
    chosen = np.asarray(after.log_weight_bias[...])
    after.output, errors = (lambda heads: heads), []
    _, shifts = CANDIDATES["log_weight_bias"]
    for shift in shifts:
        after.log_weight_bias[...] = before.log_weight_bias[...] + shift
        heads = np.asarray(after(inputs), np.float64)[MASK]
        weight = np.sqrt(RIDGE * np.mean(np.sum(heads**2, 0)))
        rows = np.concatenate([heads, weight * np.eye(len(start))])
        target = np.concatenate([wanted, weight * start])
        best, *_ = np.linalg.lstsq(rows, target, rcond=None)
        errors.append(np.sum((heads @ best - wanted) ** 2))
    best = before.log_weight_bias[...] + shifts[np.argmin(errors)]
    np.testing.assert_allclose(chosen, best, rtol=1e-6)
    if features == "hedgehog":
        for name in ("query_features", "key_features"):
            first, then = (np.asarray(getattr(x, name)[...]) for x in (before, after))
            factor = np.max(then) / np.max(first)
            np.testing.assert_allclose(then, factor * first)
            assert factor in CANDIDATES[name][1]


def test_windows_of_all_tokens_leave_the_merge_as_it_is():
    """No token is beyond the window: all candidates have equal errors."""
    ours = model((Layers("log_window", options={"window_size": 64}), "softmax"), seed=2)
    have = fitted(ours, model("softmax", seed=1), None)
    for name in CANDIDATES:
        before, after = (getattr(of_layer(x, 0).attention, name)[...] for x in (ours, have))
        np.testing.assert_array_equal(before, after)


def test_layers_that_stay_are_not_fitted():
    """Also with low-rank additions."""
    teacher, additions = model("softmax", seed=1), {"lora_rank": 2}
    kept = Layers("softmax", options=additions)
    new = Layers("log", options=additions | {"features": "hedgehog"})
    ours = model((kept, new), seed=2)
    have = fitted(ours, teacher, None)
    before, after = (flatten_with_names(nnx.state(each, nnx.Param)) for each in (ours, have))
    changed = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert changed == {"blocks.1.attention.output.kernel.value"}
