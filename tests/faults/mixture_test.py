"""Validation of a mixture follows its weights, not the sizes of its sources."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import data
from heinsen_jax.data import DataConfig
from heinsen_jax.objectives.evaluation import evaluate
from heinsen_jax.objectives.loss_by_position import bucket_ends
from heinsen_jax.sharding import MeshConfig, make_mesh

LOSSES = {"a": 1.0, "b": 4.0, "c": 7.0}
WEIGHTS = {"a": 3.0, "b": 1.0}


def measured(parameters, batch, index):
    """The loss of a text depends on its letter, as if a model had been trained."""
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.loss_mask)
    losses = np.select([tokens[:, :-1] == ord(x) for x in LOSSES], [*LOSSES.values()])
    return (losses * mask).sum(), (mask & (tokens[:, :-1] == ord("a"))).sum(), mask.sum()


def by_position(parameters, batch, index):
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.loss_mask)
    losses = np.select([tokens[:, :-1] == ord(x) for x in LOSSES], [*LOSSES.values()]) * mask
    ends = bucket_ends(mask.shape[1])
    split = [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
    return tuple(np.array([x[:, s].sum() for s in split]) for x in (losses, mask & False, mask))


@pytest.fixture
def config(tmp_path):
    for name, size in (("a", 1500), ("b", 30_000), ("c", 4000)):
        (tmp_path / name).write_text(name * size)
    mixture = {str(tmp_path / name): weight for name, weight in WEIGHTS.items()}
    return DataConfig(
        mixture=mixture, cache=str(tmp_path / "cache"), sequence_length=32, batch_size=4
    )


def metrics(config, **options):
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    return evaluate(measured, nnx.State({}), data.load(config), config, mesh, **options)


@pytest.mark.parametrize(
    ("stages", "max_batches", "wanted"),
    [
        ((), None, 0.75 * 1 + 0.25 * 4),
        ((), 1, 0.75 * 1 + 0.25 * 4),  # the first batches of each source
        (({"b": 1.0},), None, 4.0),  # the last stage's weights, also before it
        (({"b": 1.0}, {"a": 1.0, "b": 0.0, "c": 1.0}), None, (1 + 7) / 2),
    ],
)
def test_the_loss_is_the_mean_of_the_sources_by_weight(
    config, tmp_path, stages, max_batches, wanted
):
    steps = (
        (step + 5, {str(tmp_path / x): w for x, w in y.items()}) for step, y in enumerate(stages)
    )
    found = metrics(replace(config, mixture_stages=tuple(steps)), max_batches=max_batches)
    assert found["loss"] == pytest.approx(wanted)
    assert found["perplexity"] == pytest.approx(math.exp(wanted))
    assert found["bits_per_byte"] == pytest.approx(wanted / math.log(2))
    sources = {x.removeprefix("loss_"): y for x, y in found.items() if x.startswith("loss_")}
    assert sources == pytest.approx({name: LOSSES[name] for name in sources})
    assert {"a", "b"} <= sources.keys()


def test_other_lengths_accuracies_and_positions_follow_the_weights(config):
    found = metrics(replace(config, test_lengths=(64,)), step_by_position=by_position)
    wanted = 0.75 * 1 + 0.25 * 4
    for name in ("loss", "loss_64", "loss_64_at_16", "loss_64_at_32", "loss_64_at_64"):
        assert found[name] == pytest.approx(wanted), name
    assert found["accuracy"] == pytest.approx(0.75)


def test_bytes_per_token_are_the_mean_by_weight(config, monkeypatch):
    dataset = data.load(config)
    for name, source in dataset.sources.items():
        split = source.manifest.splits["validation"]
        size = split.model_copy(update={"bytes": split.tokens * {"a": 2, "b": 6}[name]})
        monkeypatch.setitem(source.manifest.splits, "validation", size)
    assert dataset.bytes_per_token(config) == pytest.approx(0.75 * 2 + 0.25 * 6)
