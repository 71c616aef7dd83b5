"""A timeout for the next batch."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from heinsen_jax.errors import UserError
from heinsen_jax.runtime.worker import Worker

T = TypeVar("T")

POLL = 0.2
"""Seconds between checks for a stop."""


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
    worker = Worker("batches")
    try:
        ahead = worker.submit(lambda: next(batches, None))
        while (batch := _wait(ahead, source, timeout, warn, is_stopped)) is not None:
            ahead = worker.submit(lambda: next(batches, None))
            yield batch
    finally:
        worker.end()


def _wait(
    ahead: Future[T | None],
    source: str | Path,
    timeout: float,
    warn: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> T | None:
    """The next batch; None after the last one, or if the iterator is stopped."""
    start, is_warned = time.monotonic(), False
    while (waited := time.monotonic() - start) < timeout:
        if wait([ahead], min(POLL, timeout / 10)).done:
            return ahead.result()
        if is_stopped():
            return None
        if waited > timeout / 10 and not is_warned:
            warn(f"warning: no batch came from {source} in {timeout / 10:g} s: still waiting")
            is_warned = True
    raise UserError(
        f"data: no batch arrived from {source} in {timeout:g} s; check its disk or network; "
        "training.data_timeout sets the limit"
    )
