"""A timeout for the next batch."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from heinsen_jax.errors import UserError

T = TypeVar("T")

POLL = 0.2
"""Seconds between checks for a stop."""


@dataclass(frozen=True)
class Item(Generic[T]):
    """A batch, or the error raised in its place."""

    batch: T | None = None
    error: BaseException | None = None


def with_timeout(
    batches: Iterator[T],
    source: str | Path,
    *,
    timeout: float,
    warn: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """Iterate over batches, with a warning about a slow source and an error for a dead one.

    One thread reads the batches, one ahead, so that a step does not wait for it, and ends with the
    iterator.

    Args:
      batches: the batches.
      source: name of their source.
      timeout: seconds to wait for a batch; a warning is issued after a tenth of them.
      warn: called with a line of text.
      is_stopped: whether to end the iterator instead of waiting; called a few times a second.

    Raises:
      UserError: no batch came in time.
    """
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
    read: queue.SimpleQueue[Item[T]] = queue.SimpleQueue()

    def run() -> None:
        """Read a batch for every request, and end at the request False."""
        while wanted.get():
            try:
                read.put(Item(batch=next(batches)))
            except BaseException as error:  # any error is for the consumer
                read.put(Item(error=error))

    threading.Thread(target=run, daemon=True, name="batches").start()  # a dead source blocks it
    try:
        wanted.put(True)
        while True:
            taken = _wait(read, source, timeout, warn, is_stopped)
            if isinstance(taken.error, StopIteration):
                return
            if taken.error is not None:
                raise taken.error
            wanted.put(True)
            yield cast(T, taken.batch)
    finally:
        wanted.put(False)


def _wait(
    read: "queue.SimpleQueue[Item[T]]",
    source: str | Path,
    timeout: float,
    warn: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> Item[T]:
    start, is_warned = time.monotonic(), False
    while (waited := time.monotonic() - start) < timeout:
        try:
            return read.get(timeout=min(POLL, timeout / 10))
        except queue.Empty:
            if is_stopped():
                return Item(error=StopIteration())
        if waited > timeout / 10 and not is_warned:
            warn(f"warning: no batch came from {source} in {timeout / 10:g} s: still waiting")
            is_warned = True
    raise UserError(
        f"data: no batch arrived from {source} in {timeout:g} s; check its disk or network; "
        "training.data_timeout sets the limit"
    )
