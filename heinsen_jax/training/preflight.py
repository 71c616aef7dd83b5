"""Cost of a run, reported before it starts."""

import math
import time
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from heinsen_jax.data import DataConfig, Dataset, TextDataset
from heinsen_jax.data.dataset import DataSettings, MixedRows
from heinsen_jax.data.mixture import MixedDataset
from heinsen_jax.training.config import TrainingConfig
from heinsen_jax.training.memory import memory_of
from heinsen_jax.training.state import TrainState
from heinsen_jax.typing import PyTree

MANY_EPOCHS = 4
THE_DATA = "the data"
_REPEATED = (
    "{epochs:.3g} epochs of {name}: beyond 4, repeated data improve a model less and less "
    "(Muennighoff et al., 2023, arXiv:2305.16264); use more data or fewer steps, or watch the "
    "validation loss"
)
TIMED = 3  # updates; the first does not count


def describe(
    mesh: Mesh,
    data: DataSettings,
    training: TrainingConfig,
    dataset: Dataset,
    parameters: int,
    compiled: jax.stages.Compiled,
) -> list[str]:
    """Describe a run: model, devices, memory per device, number of tokens, many epochs,
    validation.

    Args:
      mesh, data, training, dataset: parts of the run.
      parameters: number of parameters.
      compiled: the update, `jax.stages.Compiled`.
    """
    device = jax.devices()[0].device_kind
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    update, available = tokens_per_update(data), dataset.train_tokens
    total = training.steps * update
    epochs = _epochs(data, training, dataset)
    epochs_text = ""
    if available:
        epochs_text = f": {epochs[THE_DATA]:.3g} epochs of {available:,} training tokens"
    rows = dataset.held_out_rows(data)[""]
    splits = [*rows.sources.values()] if isinstance(rows, MixedRows) else [rows]
    sizes = [math.ceil(len(split) / data.batch_size) for split in splits]
    batches = sum(sizes)
    measured = sum(min(size, training.evaluation_batches or size) for size in sizes)
    return [
        f"{parameters:,} parameters on {mesh.size} {device} device(s) in {jax.process_count()} "
        f"process(es): {axes}",
        f"{memory_of(compiled) or 'an unknown amount'} of each device's memory",
        f"{data.batch_size:,} x {data.sequence_length:,} = {update:,} tokens an update, {total:,} "
        f"in all{epochs_text}",
        *(_REPEATED.format(epochs=x, name=n) for n, x in epochs.items() if x > MANY_EPOCHS),
        f"validation: the first {measured:,} of {batches:,} batches"
        if measured < batches
        else f"validation: {batches:,} batches",
    ]


def _epochs(data: DataSettings, training: TrainingConfig, dataset: Dataset) -> dict[str, float]:
    """Number of epochs of each part of the data, by its name."""
    is_text = isinstance(data, DataConfig)
    if is_text and isinstance(dataset, MixedDataset):
        return dataset.epochs(data, training.steps)
    if not dataset.train_tokens:
        return {}
    padding = dataset.padding(data) if is_text and isinstance(dataset, TextDataset) else 0.0
    total = training.steps * tokens_per_update(data)
    return {THE_DATA: (1 - padding) * total / dataset.train_tokens}


def tokens_per_update(data: DataSettings) -> int:
    return data.batch_size * data.sequence_length


def time_updates(
    update: jax.stages.Compiled,
    state: TrainState,
    others: Sequence[PyTree],
    steps: int,
) -> str:
    """Time a few updates with the same batch, discard their results, and estimate the total
    time."""
    seconds = 0.0
    for turn in range(TIMED):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(update(state, *others))
        if turn:
            seconds += (time.perf_counter() - start) / (TIMED - 1)
    return f"an update needs {seconds:.3g} s: {_duration(steps * seconds)} for {steps:,} updates"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
