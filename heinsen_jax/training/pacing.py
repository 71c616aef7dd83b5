"""Pace of the loop: updates in flight, signals, and checkpoints by time."""

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import jax
from jax.sharding import Mesh

from heinsen_jax.runtime.distributed import DelayedMax
from heinsen_jax.runtime.signals import Signals

Metrics = TypeVar("Metrics")

FIRST_CHECKPOINT = 60.0
"""Maximum number of seconds before the first checkpoint by time."""


class InFlight(Generic[Metrics]):
    """Updates that are dispatched and not complete: at most two, so that the device never waits for
    the host, and a stop waits for few updates; one if updates need more than `SLOW` seconds. (JAX
    lets about 32 updates run ahead on a CPU.)

    Args:
      completed: called with the step and the metrics of each complete update, in order.
    """

    MOST = 2
    SLOW = 0.5

    def __init__(self, completed: Callable[[int, Metrics], None]):
        self._completed = completed
        self._updates: deque[tuple[int, Metrics]] = deque()
        self._added_at = time.monotonic()

    def add(self, step: int, metrics: Metrics) -> None:
        """Add a dispatched update, and wait for earlier ones; if updates are slow, also for this
        one."""
        now = time.monotonic()
        is_slow, self._added_at = now - self._added_at > self.SLOW, now
        self._updates.append((step, metrics))
        while len(self._updates) > (0 if is_slow else self.MOST - 1):
            self._wait()

    def drain(self) -> None:
        """Wait for all updates."""
        while self._updates:
            self._wait()

    def _wait(self) -> None:
        step, metrics = self._updates.popleft()
        self._completed(step, jax.block_until_ready(metrics))


class Requests:
    """Signals and checkpoints that are due by time, on which all processes agree.

    Args:
      mesh: the mesh of the run.
      signals: the signals of this process.
      minutes: time between checkpoints; None disables checkpoints by time.
    """

    def __init__(self, mesh: Mesh, signals: Signals, minutes: float | None):
        self._agreed, self._signals = DelayedMax(mesh), signals
        self._seconds = None if minutes is None else 60 * minutes
        self.restart(FIRST_CHECKPOINT)

    def restart(self, limit: float = float("inf")) -> None:
        """Measure the time from now on, after a checkpoint.

        Args:
          limit: maximum number of seconds until the next one, if any is due by time.
        """
        self._is_asked = self._seconds is None or jax.process_index() != 0
        self._due = time.monotonic() + min(limit, self._seconds or limit)

    def __call__(self) -> tuple[int, bool]:
        """The number of the first signal in any process, or 0; and whether a checkpoint is due. A
        collective, to be called after each update."""
        is_due = not self._is_asked and time.monotonic() >= self._due
        self._is_asked = self._is_asked or is_due
        agreed = self._agreed(2 * self._signals.first + is_due)
        return agreed // 2, agreed % 2 == 1
