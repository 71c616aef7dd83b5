"""New attention layers, fitted to a teacher's before the first update."""

import jax
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.data import Batch
from heinsen_jax.models import Layers
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.initialization import RIDGE, fit_to_teacher
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
