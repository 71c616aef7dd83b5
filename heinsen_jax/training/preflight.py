"""Cost of a run, reported before it starts."""

import math
import time
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from heinsen_jax.data import DataConfig, Dataset, TextDataset
from heinsen_jax.data.dataset import DataSettings, MixedRows
from heinsen_jax.training.memory import memory_of
from heinsen_jax.training.settings import TrainingConfig
from heinsen_jax.training.state import TrainState
from heinsen_jax.typing import PyTree

TIMED = 3  # updates, of which the first does not count


def describe(
    mesh: Mesh,
    data: DataSettings,
    training: TrainingConfig,
    dataset: Dataset,
    parameters: int,
    compiled: jax.stages.Compiled,
) -> list[str]:
    """Describe a run: model, devices, memory per device, number of tokens, validation.

    Args:
      mesh, data, training, dataset: parts of the run.
      parameters: number of parameters.
      compiled: the update, `jax.stages.Compiled`.
    """
    device = jax.devices()[0].device_kind
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    update, available = tokens_per_update(data), dataset.train_tokens
    total = training.steps * update
    of_text = ""
    if available:
        epochs = (1 - _padding(data, dataset)) * total / available
        of_text = f": {epochs:.3g} epochs of {available:,} training tokens"
    rows = dataset.validation_rows(data)[""]
    splits = [*rows.sources.values()] if isinstance(rows, MixedRows) else [rows]
    sizes = [math.ceil(len(split) / data.batch_size) for split in splits]
    batches = sum(sizes)
    measured = sum(min(size, training.evaluation_batches or size) for size in sizes)
    return [
        f"{parameters:,} parameters on {mesh.size} {device} device(s) in {jax.process_count()} "
        f"process(es): {axes}",
        f"{memory(compiled)} of each device's memory",
        f"{data.batch_size:,} x {data.sequence_length:,} = {update:,} tokens an update, {total:,} "
        f"in all{of_text}",
        f"validation: the first {measured:,} of {batches:,} batches"
        if measured < batches
        else f"validation: {batches:,} batches",
    ]


def _padding(data: DataSettings, dataset: Dataset) -> float:
    if isinstance(data, DataConfig) and isinstance(dataset, TextDataset):
        return dataset.padding(data)
    return 0.0


def tokens_per_update(data: DataSettings) -> int:
    return data.batch_size * data.sequence_length


def memory(compiled: jax.stages.Compiled) -> str:
    """Memory per device of a compiled function."""
    return str(memory_of(compiled) or "an unknown amount")


def time_updates(
    update: jax.stages.Compiled,
    state: TrainState,
    others: Sequence[PyTree],
    steps: int,
) -> str:
    """Time a few updates with the same arguments besides the state, discard their results, and
    estimate the time of all."""
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
