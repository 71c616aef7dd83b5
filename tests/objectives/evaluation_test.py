"""Metrics of an evaluation: means over all predictions, whatever the batches."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.data import Batch
from heinsen_jax.objectives.evaluation import evaluate
from heinsen_jax.sharding import MeshConfig, make_mesh

CONFIG = SimpleNamespace(batch_size=2)
BYTES_PER_TOKEN = 2.5


def rows(number: int, length: int) -> list[Batch]:
    """Rows with a different number of predictions in each."""
    tokens = np.random.default_rng(length).integers(1, 9, (number, length + 1)).astype(np.int32)
    counted = np.arange(length)[None] <= np.arange(number)[:, None]
    return [Batch(*row) for row in zip(tokens, counted, strict=True)]


ROWS = {"": rows(5, 6), "9": rows(3, 9)}
DATASET = SimpleNamespace(
    held_out_rows=lambda config, split: ROWS, bytes_per_token=lambda config, split: BYTES_PER_TOKEN
)


def measure(parameters, batch: Batch, index: int):
    """The loss of a prediction is its target; even ones are correct."""
    targets, counted = np.asarray(batch.targets), np.asarray(batch.loss_mask)
    return (targets * counted).sum(), ((targets % 2 == 0) & counted).sum(), counted.sum()


def counted_targets(some: list[Batch]) -> np.ndarray:
    return np.concatenate([row.targets[row.loss_mask] for row in some])


@pytest.mark.usefixtures("unchecked")  # for stand-ins of data sets
@pytest.mark.parametrize("max_batches", [None, 1])
def test_metrics_are_means_over_predictions(max_batches):
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    found = evaluate(measure, None, DATASET, CONFIG, mesh, max_batches=max_batches)
    limit = None if max_batches is None else max_batches * CONFIG.batch_size
    targets, others = (counted_targets(some[:limit]) for some in ROWS.values())
    loss = targets.mean()
    assert found == pytest.approx(
        {
            "loss": loss,
            "perplexity": math.exp(loss),
            "accuracy": np.mean(targets % 2 == 0),
            "bits_per_byte": loss / math.log(2) / BYTES_PER_TOKEN,
            "loss_9": others.mean(),
            "accuracy_9": np.mean(others % 2 == 0),
        }
    )


@pytest.mark.usefixtures("unchecked")
def test_sums_over_many_batches_are_exact():
    """float32 has no 2^24 + 1."""
    large = 2.0**24

    def step(parameters, batch: Batch, index: int):
        added = large if index == 0 else 1.0
        return jnp.float32(3 * added), jnp.float32(added), jnp.float32(added)

    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    metrics = evaluate(step, None, DATASET, CONFIG, mesh)
    assert metrics["accuracy"] == 1.0
    assert metrics["loss"] == 3.0
