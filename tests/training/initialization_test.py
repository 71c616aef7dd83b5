"""New attention layers, fitted to a teacher's before the first update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.data import Batch
from heinsen_jax.models import Layers
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.initialization import RIDGE, fit_to_teacher
from tests.models.conversion_test import HEDGEHOG, config, model, of_layer

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
            np.testing.assert_allclose(output.kernel[...], best, atol=2e-4)
        x, _ = block(x, state=None, return_state=False, segment_ids=ids)
        wanted_x, _ = theirs(wanted_x, state=None, return_state=False, segment_ids=ids)
    before, after = (flatten_with_names(nnx.state(each, nnx.Param)) for each in (ours, have))
    changed = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert changed == {"blocks.1.attention.output.kernel.value"}


@pytest.mark.parametrize("segment_ids", [None, IDS])
@pytest.mark.parametrize("features", ["hedgehog", "identity"])
def test_tokens_outside_of_a_window_have_the_weight_of_the_teacher(features, segment_ids):
    """In the mean of the logarithms over queries, by head; here for the first layer."""
    grouped = Layers("gqa", options={"num_kv_heads": 1, "scale": 0.7})
    teacher = model(grouped, seed=1)
    options = {"num_kv_heads": 1, "window_size": 3, "features": features, "positions": "rotary"}
    ours = nnx.clone(model(Layers("log_window", options=options), seed=2))
    have = fitted(ours, teacher, segment_ids)
    ids = np.zeros_like(TOKENS) if segment_ids is None else segment_ids
    ids, place = ids[:, :-1], np.arange(24)
    far = (place[:, None] - place[None] >= 3) & (ids[:, :, None] == ids[:, None])
    block = of_layer(teacher, 0)
    inputs = of_layer(ours, 0).norm(ours.embedded(TOKENS[:, :-1], jnp.asarray(ids))[0])
    query, key, _ = block.attention.heads(inputs)
    query, key = (np.asarray(z, np.float64) for z in block.attention.with_positions(query, key, 0))
    wanted = 0.7 * np.einsum("btnk,bsk->bnts", query, key[:, :, 0])
    layer = of_layer(have, 0).attention
    positions = np.broadcast_to(place, (3, 24))  # scores depend on differences alone
    query, key, _ = layer.heads(inputs)
    pair = layer.log_features(*(layer.config.rotate(z, positions) for z in (query, key)))
    query, key = (np.asarray(z, np.float64) for z in pair)
    scores = np.log(np.einsum("btnf,bsf->bnts", np.exp(query), np.exp(key[:, :, 0])))
    scores += np.asarray(layer.log_weight_bias[...], np.float64)[:, None, None]
    sums = [np.sum(np.where(far[:, None], np.exp(z), 0), -1) for z in (wanted, scores)]
    counted = np.any(far, -1) & MASK
    for head in range(2):
        means = [np.mean(np.log(z[:, head][counted])) for z in sums]
        np.testing.assert_allclose(*means, atol=1e-4)


def test_layers_without_an_output_projection_stay():
    teacher, ours = model("softmax", seed=1), model("mla", seed=2)
    assert config("mla") == ours.config
    have = fitted(ours, teacher, None)
    names = {
        name
        for name, value in flatten_with_names(nnx.state(ours, nnx.Param)).items()
        if not np.array_equal(value, flatten_with_names(nnx.state(have, nnx.Param))[name])
    }
    assert names <= {"blocks.0.attention.output.kernel.value"}
