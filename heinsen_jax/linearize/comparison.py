"""Comparison of a linearized model with its teacher: loss, recall, state."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from heinsen_jax.data import DataConfig, Dataset, start_ids
from heinsen_jax.linearize.plan import Stage
from heinsen_jax.models import LanguageModel
from heinsen_jax.objectives.cross_entropy import token_losses
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.runs.load import load_run
from heinsen_jax.runtime import distributed
from heinsen_jax.sharding import put
from heinsen_jax.training.preflight import tokens_per_update
from heinsen_jax.training.settings import Settings
from heinsen_jax.typing import Array

CONTEXTS = 1024, 32_768
"""Contexts, in tokens, at which states are compared, unless learned positions are too few."""


def recall(model: LanguageModel, dataset: Dataset, data: DataConfig) -> float:
    """Accuracy of predicting the second copy of a random string of the text's tokens, from its
    second token on; the string has half the length of a training sequence, at most 512 tokens.
    The tokens that documents start with precede the first copy.

    Returns:
      The accuracy over 32 strings, from 0 to 1.
    """
    length = min(data.sequence_length // 2, 512)
    rows = dataset.validation_rows(data)[""]
    pool = np.concatenate([np.asarray(row.tokens)[1:][row.loss_mask] for row in rows[:256]])
    assert dataset.tokenizer is not None
    start = np.array(start_ids(dataset.tokenizer), pool.dtype)
    strings = np.random.default_rng(0).choice(pool[~np.isin(pool, start)], (32, length))
    tokens = np.hstack([np.tile(start, (32, 1)), strings, strings])
    second = len(start) + length

    @jax.jit
    def correct(model: LanguageModel, tokens: Array) -> Array:
        features, _ = model.features(tokens[:, :-1])
        _, is_right = token_losses(model.readout, features[:, second:], tokens[:, second + 1 :])
        return jnp.mean(is_right)

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
    name: str, folder: str, settings: Settings, tokens: int = 0, best: bool = True
) -> Result:
    with distributed.together():
        model, _, _ = load_run(folder, best=best, on_host=True)
    config, dataset = settings.config, settings.dataset
    data, _ = resolve_documents(config.data, dataset, model.config)
    graph, weights = nnx.split(model)
    model = nnx.merge(graph, put(weights, settings.mesh))
    metrics = evaluate_model(
        model,
        dataset,
        data,
        settings.mesh,
        masked_fraction=config.training.masked_fraction,
        loss_by_position=config.training.loss_by_position,
        max_batches=config.training.evaluation_batches,
    )
    with jax.set_mesh(settings.mesh):
        recalled = recall(model, dataset, data) if isinstance(data, DataConfig) else None
    longest = model.config.max_length or max(CONTEXTS)
    sizes = {str(x): model.state_size(x) for x in CONTEXTS if x <= longest}
    return Result(name, metrics["loss"], recalled, sizes, tokens)


def results_of(teacher: str, stages: Sequence[Stage], settings: Settings) -> list[Result]:
    """The rows of the table: the teacher, in a folder, and the model after each stage, evaluated
    with the settings of the last one."""
    results, tokens = [_result("teacher", teacher, settings)], 0
    for stage in stages:
        training, data = stage.experiment.training, stage.experiment.data
        tokens += training.steps * tokens_per_update(data)
        best = stage is stages[-1]  # stage 2 starts from the latest checkpoint of stage 1
        results.append(_result(f"after {stage.name}", stage.folder, settings, tokens, best))
    return results


def table(results: Sequence[Result]) -> Table:
    """The table of the results, for a terminal."""
    contexts = map(int, results[0].state_bytes)
    drawn = Table("", "loss", "recall", *(f"bytes at {x:,}" for x in contexts), "tokens")
    for row in results:
        recalled = "" if row.recall is None else f"{row.recall:.3f}"
        sizes = (f"{size:,}" for size in row.state_bytes.values())
        drawn.add_row(row.name, f"{row.loss:.4f}", recalled, *sizes, f"{row.tokens:,}")
    return drawn
