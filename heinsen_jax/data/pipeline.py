"""Input pipeline: every training batch is a pure function of (seed, step)."""

import math
from collections.abc import Iterator, Sequence
from typing import overload

import grain
import jax
import numpy as np

from heinsen_jax.data.config import AnyDataConfig, DataConfig
from heinsen_jax.data.dataset import Batch, Dataset, DataSettings, Settings
from heinsen_jax.data.mixture import TextDataset, load_mixture
from heinsen_jax.data.tasks import AnyTask, Task, TaskDataset
from heinsen_jax.data.text import load_text
from heinsen_jax.errors import UserError

ENDLESS = 1 << 60  # sequences


@overload
def load(config: DataConfig) -> TextDataset: ...


@overload
def load(config: AnyTask) -> TaskDataset: ...


def load(config: AnyDataConfig) -> TextDataset | TaskDataset:
    """Load a data set; text is prepared first if needed."""
    if isinstance(config, Task):
        return TaskDataset(config)
    return load_text(config) if config.mixture is None else load_mixture(config)


def train_batches(
    dataset: Dataset[Settings],
    config: Settings,
    *,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Iterate over training batches, without end, of batch_size / process_count rows.

    Args:
      dataset: the data set.
      config: its configuration, with the global batch size.
      seed: random seed; a batch depends only on the seed and the step.
      start_step: step of the first batch.
      process_index: index of this process's part of every batch. A step has the same sequences in
        the same rows for any number of processes.
      process_count: number of parts.
    """
    local_batch = _local_batch(config, process_count)
    row = dataset.train_row(config, seed)

    def local_row(index: int) -> Batch:
        step, place = divmod(index, local_batch)
        return row(step * config.batch_size + process_index * local_batch + place)

    batches = grain.MapDataset.range(ENDLESS).map(local_row).batch(local_batch)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches[start_step:].to_iter_dataset(options))


def validation_batches(
    dataset: Dataset[Settings],
    config: Settings,
    *,
    name: str = "",
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Iterate once, in order, over batches of the data set's `held_out_rows` of validation.

    All batches have the full shape, and all processes yield the same number; the last batch has
    masked padding. `max_batches` limits the number.
    """
    return row_batches(
        dataset.held_out_rows(config)[name],
        config,
        max_batches=max_batches,
        process_index=process_index,
        process_count=process_count,
    )


def row_batches(
    rows: Sequence[Batch],
    config: DataSettings,
    *,
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """`validation_batches` of given rows."""
    local_batch = _local_batch(config, process_count)
    padding = jax.tree.map(np.zeros_like, rows[0])
    count = math.ceil(len(rows) / config.batch_size)
    for step in range(count if max_batches is None else min(count, max_batches)):
        first = step * config.batch_size + process_index * local_batch
        indices = range(first, first + local_batch)
        batch = [rows[i] if i < len(rows) else padding for i in indices]
        yield jax.tree.map(lambda *x: np.stack(x), *batch)


def _local_batch(config: DataSettings, process_count: int) -> int:
    if config.batch_size % process_count:
        raise UserError(
            f"batch_size={config.batch_size} cannot be shared by {process_count} processes; "
            f"make it a multiple of {process_count}"
        )
    return config.batch_size // process_count
