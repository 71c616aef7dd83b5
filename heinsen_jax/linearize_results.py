"""Comparison of a linearized model with its teacher: loss, recall, state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from heinsen_jax import distributed
from heinsen_jax.config import ExperimentConfig
from heinsen_jax.data import DataConfig, Dataset, start_ids
from heinsen_jax.evaluate import evaluate_model
from heinsen_jax.models import LanguageModel
from heinsen_jax.sharding import make_mesh, put
from heinsen_jax.training.checkpoint import load_run
from heinsen_jax.training.cross_entropy import token_losses
from heinsen_jax.training.preflight import tokens_per_update
from heinsen_jax.training.settings import with_documents
from heinsen_jax.typing import Array

CONTEXTS = 1024, 32_768
"""Contexts, in tokens, at which states are compared, unless learned positions are too few."""


class Stage(NamedTuple):
    """A stage of a linearization, a run in a folder."""

    name: str
    folder: str
    experiment: ExperimentConfig


def recall(model: LanguageModel, dataset: Dataset, experiment: ExperimentConfig) -> float:
    """Accuracy of predicting the second copy of a random string of the text's tokens, from its
    second token on; the string has half the length of a training sequence, at most 512 tokens.
    The tokens that documents start with precede the first copy.

    Returns:
      The accuracy over 32 strings, from 0 to 1.
    """
    length = min(experiment.data.sequence_length // 2, 512)
    rows = dataset.validation_rows(experiment.data)[""]
    pool = np.concatenate([np.asarray(row.tokens)[1:][row.loss_mask] for row in rows[:256]])
    assert dataset.tokenizer is not None
    start = np.array(start_ids(dataset.tokenizer), pool.dtype)
    strings = np.random.default_rng(0).choice(pool[~np.isin(pool, start)], (32, length))
    tokens = np.hstack([np.tile(start, (32, 1)), strings, strings])
    second = len(start) + length

    @jax.jit
    def correct(model: LanguageModel, tokens: Array) -> Array:
        features, _ = model.features(tokens[:, :-1])
        _, found = token_losses(model.readout, features[:, second:], tokens[:, second + 1 :])
        return jnp.mean(found)

    return float(correct(model, tokens))


@dataclass(frozen=True)
class Result:
    """A row of the table.

    Attributes:
      name: the teacher, or a stage.
      loss: loss on the validation text, in nats per token.
      recall: see `recall`; None for tasks.
      state_bytes: bytes of state of one sequence by its number of tokens.
      tokens: number of tokens of training so far.
    """

    name: str
    loss: float
    recall: float | None
    state_bytes: dict[str, int]
    tokens: int


def _result(
    name: str,
    folder: str,
    dataset: Dataset,
    experiment: ExperimentConfig,
    tokens: int = 0,
    best: bool = True,
) -> Result:
    with distributed.together():
        model, _, _ = load_run(folder, best=best, on_host=True)
    settings, _ = with_documents(experiment.data, dataset, model.config)
    experiment = replace(experiment, model=model.config, data=settings)
    mesh, (graph, weights) = make_mesh(experiment.mesh), nnx.split(model)
    model = nnx.merge(graph, put(weights, mesh))
    batches = experiment.training.evaluation_batches
    metrics = evaluate_model(model, dataset, experiment, batches, mesh)
    with jax.set_mesh(mesh):
        recalled = recall(model, dataset, experiment) if isinstance(settings, DataConfig) else None
    longest = model.config.max_length or max(CONTEXTS)
    sizes = {str(x): model.state_size(x) for x in CONTEXTS if x <= longest}
    return Result(name, metrics["loss"], recalled, sizes, tokens)


def results_of(teacher: str, stages: Sequence[Stage], dataset: Dataset) -> list[Result]:
    """The rows of the table: of the teacher, in a folder, and after each stage."""
    last = stages[-1].experiment
    results, tokens = [_result("teacher", teacher, dataset, last)], 0
    for name, folder, experiment in stages:
        tokens += experiment.training.steps * tokens_per_update(experiment.data)
        best = experiment is last  # stage 2 starts from the latest checkpoint of stage 1
        results.append(_result(f"after {name}", folder, dataset, last, tokens, best))
    return results


def table(results: Sequence[Result]) -> Table:
    """The table of the results, for a terminal."""
    contexts = map(int, results[0].state_bytes)
    found = Table("", "loss", "recall", *(f"bytes at {x:,}" for x in contexts), "tokens")
    for row in results:
        recalled = "" if row.recall is None else f"{row.recall:.3f}"
        sizes = (f"{size:,}" for size in row.state_bytes.values())
        found.add_row(row.name, f"{row.loss:.4f}", recalled, *sizes, f"{row.tokens:,}")
    return found
