"""Comparison of a linearized model with its teacher: loss, divergence, recall, state, cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from heinsen_jax.data import Batch, DataConfig, start_ids
from heinsen_jax.data.pipeline import row_batches
from heinsen_jax.linearize.layers import features_of
from heinsen_jax.linearize.plan import TRANSFER, Stage
from heinsen_jax.models import LanguageModel
from heinsen_jax.models.readout import Readout
from heinsen_jax.objectives.cross_entropy import distilled_losses, token_losses
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.runs.folder import open_run
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runtime import distributed
from heinsen_jax.sharding import put, shard_batch, share_of_process
from heinsen_jax.training.preflight import tokens_per_update
from heinsen_jax.training.settings import Settings
from heinsen_jax.typing import Array, Features, Float, Integer

LENGTHS = 256, 1024, 4096
"""Lengths of sequences, in tokens, of the compared losses, besides the length of training."""
TOKENS = 8192
"""Number of tokens of validation text at each length."""
COPIED = 64, 256
"""Lengths of the random strings of `recall`, in tokens."""
STRINGS = 8
"""Number of strings of each length."""
CONTEXTS = 1024, 32_768
"""Contexts, in tokens, at which states are compared, unless learned positions are too few."""


@dataclass(frozen=True)
class Result:
    """A row of the table.

    Attributes:
      name: the teacher, a stage, or a baseline.
      loss: loss on validation text, in nats per token, by the length of sequences.
      divergence: mean KL(teacher || model) of the same predictions, in nats.
      recall: accuracy of `recall` by the length of the string; None for tasks.
      state_bytes: bytes of state of one sequence by its number of tokens.
      tokens: number of tokens of training.
      seconds: seconds of training, without compilation, evaluation and checkpoints.
    """

    name: str
    loss: dict[str, float]
    divergence: dict[str, float]
    recall: dict[str, float] | None
    state_bytes: dict[str, int]
    tokens: int
    seconds: float


class Comparison:
    """The text on which models are compared, with the features of the teacher.

    Args:
      teacher: folder of the teacher.
      settings: settings of a run on the text.
    """

    def __init__(self, teacher: str, settings: Settings) -> None:
        self.settings, self.mesh = settings, settings.mesh
        self.teacher = self._load(teacher, best=True)
        config = self.teacher.config
        self.data, _ = resolve_documents(settings.config.data, settings.dataset, config)
        self.longest = config.max_length or max(*LENGTHS, *CONTEXTS, self.data.sequence_length)
        lengths = {self.data.sequence_length}
        if isinstance(self.data, DataConfig):
            lengths |= {x for x in LENGTHS if x <= self.longest}
        with jax.set_mesh(self.mesh):
            self.batches = {x: batches for x in sorted(lengths) if (batches := self._batches(x))}

    def _load(self, folder: str, *, best: bool) -> LanguageModel:
        """The model of a run, on the devices of the mesh."""
        with distributed.together():
            model, _, _ = load_run(folder, best=best, on_host=True)
        graph, weights = nnx.split(model)
        return nnx.merge(graph, put(weights, self.mesh))

    def _batches(self, length: int) -> list[tuple[Batch, Array]]:
        """Batches of validation rows of a length, as many tokens as a microbatch of training, with
        the features of the teacher; none if the text is shorter than a row."""
        data, training = self.data, self.settings.config.training
        parts = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        tokens = data.batch_size // training.accumulation_steps * data.sequence_length
        batch_size = max(min(tokens, TOKENS) // length // parts, 1) * parts
        sizes = {"sequence_length": length, "batch_size": batch_size, "test_lengths": ()}
        if isinstance(data, DataConfig):
            data = replace(data, **sizes)
        rows = self.settings.dataset.held_out_rows(data)[""][: max(TOKENS // length, 1)]
        if length != self.data.sequence_length and np.mean(rows[0].loss_mask) < 0.5:  # padding
            return []
        process_index, process_count = share_of_process(self.mesh)
        batches = row_batches(rows, data, process_index=process_index, process_count=process_count)
        sharded = (shard_batch(batch, self.mesh) for batch in batches)
        return [(batch, features_of(self.teacher, batch)) for batch in sharded]

    def measure(
        self, name: str, folder: str, *, best: bool = True, tokens: int = 0, seconds: float = 0.0
    ) -> Result:
        """The results of the model in a folder, from its best or latest checkpoint."""
        model = self._load(folder, best=best)
        losses, divergences = {}, {}
        with jax.set_mesh(self.mesh):
            for length, batches in self.batches.items():
                sums = [_sums(model, self.teacher.readout, *batch) for batch in batches]
                loss, divergence, count = (float(sum(x)) for x in zip(*sums, strict=True))
                losses[str(length)] = loss / count
                divergences[str(length)] = divergence / count
            recalled = None
            if isinstance(self.data, DataConfig):
                fitting = [x for x in COPIED if 2 * x < self.longest]
                recalled = {str(x): recall(model, self.strings(x), x) for x in fitting}
        sizes = {str(x): model.state_size(x) for x in CONTEXTS if x <= self.longest}
        return Result(name, losses, divergences, recalled, sizes, tokens, seconds)

    def strings(self, length: int) -> np.ndarray:
        """Rows for `recall`: what documents start with, and two copies of a random string of the
        tokens of the text."""
        dataset = self.settings.dataset
        assert dataset.tokenizer is not None
        rows = dataset.held_out_rows(self.data)[""][:256]
        pool = np.concatenate([np.asarray(row.tokens)[1:][row.loss_mask] for row in rows])
        start = np.array(start_ids(dataset.tokenizer), pool.dtype)
        strings = np.random.default_rng(0).choice(pool[~np.isin(pool, start)], (STRINGS, length))
        return np.hstack([np.tile(start, (STRINGS, 1)), strings, strings])


def recall(model: LanguageModel, rows: np.ndarray, length: int) -> float:
    """Accuracy of predicting the second copy of strings, from its second token on.

    Args:
      model: the model.
      rows: `[rows, T]`, token ids, which end with two copies of a string.
      length: length of the strings.

    Returns:
      The accuracy, from 0 to 1.
    """
    return float(_accuracy(model, rows, length))


@partial(jax.jit, static_argnums=2)
def _accuracy(model: LanguageModel, rows: Array, length: int) -> Float[Array, ""]:
    features, _ = model.features(rows[:, :-1])
    _, is_right = token_losses(model.readout, features[:, 1 - length :], rows[:, 1 - length :])
    return jnp.mean(is_right)


@jax.jit
def _sums(
    model: LanguageModel, readout: Readout, batch: Batch, teacher_features: Features
) -> tuple[Float[Array, ""], Float[Array, ""], Integer[Array, ""]]:
    """Sums of the losses and of the divergences from the teacher, and their number."""
    features, mask = features_of(model, batch), jnp.asarray(batch.loss_mask)
    pair = features, readout, teacher_features, jnp.asarray(batch.targets)
    losses, divergences = (
        jnp.sum(distilled_losses(model.readout, *pair, divergence_weight=weight) * mask)
        for weight in (0.0, 1.0)
    )
    return losses, divergences, jnp.sum(mask)


def results_of(teacher: str, stages: Sequence[Stage], settings: Settings) -> list[Result]:
    """The rows of the table: the teacher, in a folder, and the models of all stages, on text of the
    given settings."""
    comparison = Comparison(teacher, settings)
    results, before = [comparison.measure("teacher", teacher)], (0, 0.0)
    for stage in stages:
        experiment = stage.experiment
        per_update = tokens_per_update(experiment.data)
        cost = experiment.training.steps * per_update, _seconds(stage.folder, per_update)
        is_first = stage.name == TRANSFER  # distillation starts from its latest checkpoint
        if experiment.distillation.start is not None:
            cost = cost[0] + before[0], cost[1] + before[1]
        tokens, seconds = before = cost
        results.append(
            comparison.measure(
                stage.name, stage.folder, best=not is_first, tokens=tokens, seconds=seconds
            )
        )
    return results


def _seconds(folder: str, per_update: int) -> float:
    """Seconds of the updates of a run, from its metrics."""
    seconds, before = 0.0, 0
    with open_run(folder) as run:
        for row in read_metrics(run.files):
            if rate := row.get("train/tokens_per_second"):
                seconds += (row["step"] - before) * per_update / rate
                before = row["step"]
    return seconds


def table(results: Sequence[Result]) -> Table:
    """The table of the results, for a terminal: a column for each."""
    drawn = Table("", *(row.name for row in results))
    first = results[0]

    def add(name: str, values: Iterable[float], style: str) -> None:
        drawn.add_row(name, *(format(x, style) for x in values))

    for length in first.loss:
        add(f"loss at {int(length):,} tokens", (row.loss[length] for row in results), ".3f")
    for length in first.divergence:
        divergences = (row.divergence[length] for row in results)
        add(f"KL from the teacher at {int(length):,}", divergences, ".3f")
    for length in first.recall or ():
        recalled = (row.recall[length] for row in results if row.recall is not None)
        add(f"recall of {length} tokens", recalled, ".2f")
    for length in first.state_bytes:
        sizes = (row.state_bytes[length] for row in results)
        add(f"bytes of state at {int(length):,}", sizes, ",")
    add("tokens of training", (row.tokens for row in results), ",")
    add("seconds of training", (row.seconds for row in results), ",.0f")
    return drawn
