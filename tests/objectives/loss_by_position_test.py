"""Loss by position: buckets, segments, evaluation, and the options of runs."""

import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import data, evaluate
from heinsen_jax.data import Batch, Induction
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel
from heinsen_jax.objectives.evaluation import make_evaluation_step
from heinsen_jax.objectives.loss_by_position import bucket_ends
from heinsen_jax.training import prepare_run, train
from heinsen_jax.training.settings import resolve_settings

ROWS, LENGTH = 3, 70


@pytest.mark.parametrize(
    ("length", "ends"), [(1, (1,)), (16, (16,)), (17, (16, 17)), (64, (16, 32, 64))]
)
def test_buckets_double_up_to_the_length(length, ends):
    assert bucket_ends(length) == ends


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_sums_are_those_of_each_token(small, is_packed):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 264, (ROWS, LENGTH + 1)).astype(np.int32)
    loss_mask = rng.uniform(size=(ROWS, LENGTH)) < 0.8
    ids = np.cumsum(rng.uniform(size=tokens.shape) < 0.05, 1).astype(np.int32)
    batch = Batch(tokens, loss_mask, ids if is_packed else None)
    graph, parameters = nnx.split(LanguageModel(small.model, rngs=nnx.Rngs(0)))
    step = make_evaluation_step(graph, by_position=True)
    total, correct, count = step(parameters, batch, 0)

    model = nnx.merge(graph, parameters)
    given = jnp.asarray(ids[:, :-1]) if is_packed else None
    logits = np.asarray(model(jnp.asarray(tokens[:, :-1]), segment_ids=given), np.float64)
    expected = np.zeros((3, 4))
    for row in range(ROWS):
        start = 0
        for place in range(LENGTH):
            if is_packed and place and ids[row, place] != ids[row, place - 1]:
                start = place
            if not loss_mask[row, place]:
                continue
            bucket = next(i for i, end in enumerate((16, 32, 64, 70)) if place - start < end)
            scores, target = logits[row, place], tokens[row, place + 1]
            loss = np.log(np.sum(np.exp(scores))) - scores[target]
            expected[:, bucket] += loss, np.argmax(scores) == target, 1
    np.testing.assert_allclose(total, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(correct, expected[1])
    np.testing.assert_array_equal(count, expected[2])
    plain = make_evaluation_step(graph)(parameters, batch, 0)
    for have, parts in zip(plain, (total, correct, count), strict=True):
        np.testing.assert_allclose(have, np.sum(parts), rtol=1e-5)


@pytest.mark.nightly
def test_a_run_and_its_evaluation_report_the_longest_sequences(
    small, tmp_path, monkeypatch, capsys
):
    training = replace(small.training, steps=6, evaluate_every=6, sample_tokens=0)
    long = replace(small, data=replace(small.data, test_lengths=(40,)))
    experiment = replace(long, training=replace(training, loss_by_position=True))
    dataset = data.load(experiment.data)
    (tmp_path / "run").mkdir()
    metrics = train(prepare_run(experiment, tmp_path / "run", dataset=dataset)).metrics
    names = ["loss_40_at_16", "loss_40_at_32", "loss_40_at_40"]
    assert [name for name in metrics if "_at_" in name] == names
    losses = [metrics[name] for name in names]
    assert np.dot(losses, [16, 16, 8]) / 40 == pytest.approx(metrics["loss_40"], rel=1e-5)
    assert len(set(losses)) == 3
    others = train(
        prepare_run(replace(long, training=training), tmp_path / "plain", dataset=dataset)
    ).metrics
    assert {name: metrics[name] for name in others} == pytest.approx(others, rel=1e-6)

    arguments = "--workdir", str(tmp_path / "run"), "--max-batches", "4"
    monkeypatch.setattr(sys, "argv", ["heinsen_jax.evaluate", *arguments])
    assert evaluate.main() == 0
    said = capsys.readouterr().out
    assert f"loss 40 at 40: {metrics['loss_40_at_40']:.4f}" in said


def test_only_causal_models_of_text_have_it(small):
    training = replace(small.training, loss_by_position=True, sample_tokens=0)
    experiment = replace(small, training=training)
    two_sided = replace(experiment, model=replace(small.model, is_causal=False, vocab_size=265))
    task = replace(experiment, data=Induction(num_letters=2))
    for wrong in (two_sided, task):
        with pytest.raises(UserError, match=r"loss_by_position is for causal models of text; set"):
            resolve_settings(wrong, data.load(wrong.data))
