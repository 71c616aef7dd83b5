"""Trackers: copies of a run's metrics in experiment trackers, such as Weights & Biases."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from heinsen_jax.errors import UserError, explain, parse_json
from heinsen_jax.runtime.environment import Environment
from heinsen_jax.runtime.worker import Worker
from heinsen_jax.storage.files import storage_errors, write_atomically
from heinsen_jax.typing import JSON

TRACKER_FILE = "tracker.json"
"""File with the run's id in each tracker: tracker name -> run id."""
START_SECONDS = 120
FINISH_SECONDS = 30

Status: TypeAlias = Literal["finished", "stopped", "failed"]

FIXES = {
    "wandb": "run `wandb login`, check the network, or set WANDB_MODE=offline",
    "trackio": "check TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and the network",
    "mlflow": "check MLFLOW_TRACKING_URI, such as sqlite:///mlflow.db, and the network",
}


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for its trackers.

    Attributes:
      name: name of the run's folder.
      project: `training.project`.
      workdir: the run's folder.
      config: all fields of the configuration as plain values, by section.
      environment: hardware, versions and commit.
      step: the step from which the run starts or resumes.
      id: result of the tracker's earlier `start` for this folder; None for a new run.
    """

    name: str
    project: str
    workdir: Path
    config: Mapping[str, JSON]
    environment: Environment
    step: int = 0
    id: str | None = None


@runtime_checkable
class Tracker(Protocol):
    """A service that records the metrics of a run. All calls are in one separate thread."""

    @property
    def name(self) -> str:
        """Name of the tracker in messages and in tracker.json."""
        ...

    def start(self, run: TrackedRun) -> str:
        """Start a run, or resume it if `run.id` is given, and return its id."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a row of metrics, with names such as train/loss."""
        ...

    def finish(self, status: Status) -> None:
        """Record the end of this call of `train`."""
        ...


class Tracking:
    """Context manager that passes metrics to trackers, each in a separate thread.

    A tracker that cannot start ends the run before its first step. Later, one that is slow or fails
    causes a warning, and never delays or ends training.

    Args:
      trackers: the trackers.
      warn: called with a line of text.

    Raises:
      UserError: two trackers have the same name.
    """

    def __init__(self, trackers: Sequence[Tracker], warn: Callable[[str], None]):
        names = [tracker.name for tracker in trackers]
        if len({*names}) < len(names):
            raise UserError(f"training.trackers: {names} has a name twice; give each tracker once")
        self._trackers, self._warn = trackers, warn
        self._started: list[_Started] = []

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.finish("failed")

    def start(self, run: TrackedRun) -> None:
        """Start the trackers; trackers in tracker.json resume the same tracked run.

        Raises:
          UserError: a tracker cannot start, or tracker.json is damaged.
        """
        if not self._trackers:
            return
        ids = _recorded_ids(run.workdir / TRACKER_FILE)
        for tracker in self._trackers:
            started = _Started(tracker, self._warn)
            ids[tracker.name] = started.start(replace(run, id=ids.get(tracker.name)))
            self._started.append(started)
            with storage_errors(run.workdir):
                content = json.dumps(ids, indent=2) + "\n"
                write_atomically(run.workdir / TRACKER_FILE, content.encode())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass a row of metrics to the trackers that have started."""
        for tracker in self._started:
            tracker.log(step, metrics)

    def finish(self, status: Status) -> None:
        """End the tracked runs, and wait for their trackers for `FINISH_SECONDS` at most."""
        end = time.monotonic() + FINISH_SECONDS
        started, self._started = self._started, []
        for tracker in started:
            tracker.finish(status)
        for tracker in started:
            tracker.wait(end)


class _Started:
    """A tracker and its thread."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]):
        self._tracker, self._warn, self._has_failed = tracker, warn, False
        self._worker = Worker(tracker.name)

    def start(self, run: TrackedRun) -> str:
        try:
            return self._worker.submit(self._tracker.start, run).result(START_SECONDS)
        except UserError:
            raise
        except Exception as error:
            name, late = self._tracker.name, f"no answer in {START_SECONDS} s"
            reason = explain(error) or (late if isinstance(error, TimeoutError) else repr(error))
            raise UserError(
                f"training.trackers: {name} cannot start ({reason}); "
                f"{FIXES.get(name, 'fix the tracker')}, or leave {name} out"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._worker.submit(self._tracker.log, step, metrics).add_done_callback(self._check)

    def finish(self, status: Status) -> None:
        self._worker.submit(self._tracker.finish, status).add_done_callback(self._check)
        self._worker.end()

    def wait(self, end: float) -> None:
        if not self._worker.join(max(0.0, end - time.monotonic())):
            self._say(f"not all metrics were sent in {FINISH_SECONDS} s")

    def _check(self, call: Future[None]) -> None:
        error = call.exception()
        if isinstance(error, Exception) and not self._has_failed:
            self._has_failed = True
            self._say(f"{explain(error) or repr(error)}; training continues")

    def _say(self, problem: str) -> None:
        self._warn(
            f"warning: tracker {self._tracker.name}: {problem}; metrics.jsonl has all metrics"
        )


def _recorded_ids(path: Path) -> dict[str, str]:
    try:
        ids = parse_json(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError) as error:
        ids, reason = None, explain(error)
    else:
        reason = "it is not an object of strings"
    if isinstance(ids, dict) and all(isinstance(id, str) for id in ids.values()):
        return ids
    raise UserError(f"{path} cannot be read ({reason}); remove it to start a new tracked run")
