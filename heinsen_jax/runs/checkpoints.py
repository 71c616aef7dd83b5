"""Reading the checkpoints of a run: the intact steps, the best one, and their arrays."""

import math
import time
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from heinsen_jax.errors import UserError, first_line, parse_json
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.checksums import find_damage, find_damaged_array
from heinsen_jax.runs.folder import RunFolder
from heinsen_jax.runs.record import LOSSES_FILE, SAVED_FILE, newest_saved
from heinsen_jax.runs.storage_errors import is_of_storage, reading_steps
from heinsen_jax.storage.buckets import AnyPath

REMOVED_WITHIN = 2.0
"""Seconds that a reader waits for the removal of a step by another process."""
ITEM, METRICS = "default", "metrics/metrics"
"""Names of Orbax in a step's folder: the folder of the state, and the file of metrics."""

Tree = TypeVar("Tree")


class CheckpointReader:
    """The checkpoints in a run's folder at the opening: one per step, of named arrays.

    No step is used before its files are compared with their recorded hashes. Older steps are
    checked on opening, except array data. Damaged steps are listed in `damaged`, and earlier ones
    are used. Nothing is changed; another process may write meanwhile.
    """

    def __init__(self, workdir: Path | RunFolder):
        self._open(workdir)
        self._steps = [step for step in self._finished() if not self._is_damaged(step)]
        self._verified: set[int] = set()

    def _open(self, workdir: Path | RunFolder) -> None:
        self._run = RunFolder(workdir) if isinstance(workdir, Path) else workdir
        self.folder = self._run.checkpoints
        self.damaged: dict[int, str] = {}
        self._saved_file = self._run.files.resolve() / SAVED_FILE
        self._changed_at = newest_saved(self._saved_file.with_name(LOSSES_FILE)) or -1

    def _finished(self) -> list[int]:
        """The finished steps."""
        with reading_steps(self.folder):
            folders = self.folder.iterdir() if self.folder.is_dir() else ()
            return sorted(int(path.name) for path in folders if is_finished(path))

    def _is_damaged(self, step: int, *, arrays: bool = False) -> bool:
        """Whether a reader finds a step, or its arrays, damaged or being removed."""
        folder = self.folder / str(step)
        with reading_steps(folder):
            reason = find_damaged_array(folder) if arrays else find_damage(folder)
        if reason and not _is_being_removed(folder):
            self.damaged[step] = reason
        return reason is not None

    def _first_intact(self, steps: list[int]) -> int | None:
        """The first of a reader's steps whose arrays are intact."""
        for step in steps:
            if step in self._verified or not self._is_damaged(step, arrays=True):
                self._verified.add(step)
                return step
            self._steps.remove(step)
        return None

    def _loss(self, step: int) -> float:
        """The validation loss of a step; infinity if it was not evaluated, or is not a number."""
        try:
            return -self._score(parse_json((self.folder / str(step) / METRICS).read_bytes()))
        except FileNotFoundError:  # another process is removing the step
            return math.inf

    def _score(self, metrics: dict[str, float]) -> float:
        """`score`; -inf if the loss was measured before the data changed."""
        return -math.inf if metrics.get("step", 0) <= self._changed_at else score(metrics)

    def check_lost(self, remedy: str, *, recorded: int = 0) -> None:
        """Check that a run without checkpoints never had any.

        Args:
          remedy: end of the message.
          recorded: last step of the run's metrics, which shows that it was trained if the record
            of its newest checkpoint is missing, too.

        Raises:
          UserError: it had some; the message says what happened, and ends with the remedy.
        """
        if self._newest() is not None:
            return
        reasons = [f"step {step} ({reason})" for step, reason in sorted(self.damaged.items())]
        earlier = [path.name for path in sorted(self.folder.glob("damaged-*"))]
        saved = newest_saved(self._saved_file)
        if not (reasons or earlier or saved or (saved is None and recorded)):
            return
        state = "is damaged: " + ", ".join(reasons or earlier) if reasons or earlier else "is gone"
        raise UserError(f"{self.folder}: every checkpoint of this run {state}; {remedy}")

    def warnings(self) -> list[str]:
        """Describe damaged checkpoints, and the newest one if it is missing."""
        lines = [
            f"{self.folder / str(step)} is damaged ({reason})"
            for step, reason in sorted(self.damaged.items())
        ]
        latest, newest = self._newest(), newest_saved(self._saved_file)
        if latest is not None and newest is not None and latest < newest not in self.damaged:
            path = self.folder / str(newest)
            if not path.exists():  # another process may have saved it since this was opened
                lines.append(f"{path} was saved, and is gone")
        return lines

    def _newest(self) -> int | None:
        """The newest step without known damage."""
        return max(self._steps, default=None)

    def latest_step(self) -> int | None:
        """Verify and return the newest step; None without any."""
        return self._first_intact(sorted(self._steps, reverse=True))

    def best_step(self) -> int | None:
        """Verify and return the step with the smallest validation loss; the newest step if none was
        evaluated."""
        return self._first_intact(sorted(self._steps, key=lambda step: (self._loss(step), -step)))

    def names(self, step: int) -> frozenset[str]:
        """The names of the arrays of a step.

        Raises:
          UserError: they cannot be read.
        """
        item = self.folder / str(step) / ITEM
        with reading_steps(item):
            return frozenset(ocp.PyTreeCheckpointHandler().metadata(epath.Path(item)).tree)

    def restore(self, step: int, abstract: Tree) -> Tree:
        """Restore a pytree like `abstract` (shapes, dtypes, shardings), or a part of the saved one.
        Arrays without a sharding are NumPy arrays.

        Raises:
          UserError: the step is damaged, has other arrays, or cannot be read; the message names it.
        """
        wanted, folder = flatten_with_names(abstract), self.folder / str(step)
        item = folder / ITEM
        arguments = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        try:
            handler = ocp.PyTreeCheckpointHandler()
            saved = handler.metadata(epath.Path(item)).tree
            if missing := wanted.keys() - saved.keys():
                raise UserError(
                    f"{folder} has no {min(missing)}: it was saved with another optimizer.name, "
                    "optimizer.ema_decay or distillation.trained; restore those settings, give "
                    "--restart, or begin in another folder with this run as training.start"
                )
            with ocp.Checkpointer(handler) as checkpointer:
                restored = checkpointer.restore(item, arguments)
        except (UserError, jax.errors.JaxRuntimeError):  # the latter: a device or process failed
            raise
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError)
            remedy = "check the disk or network, and give the command again"
            if is_missing or not is_of_storage(error):
                remedy = "move that folder away to resume from the step before"
            raise UserError(f"{folder} cannot be read ({first_line(error)}): {remedy}") from error
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in wanted])


def is_finished(folder: AnyPath) -> bool:
    """Whether a folder is a finished step. On a disk, Orbax has renamed it; in a bucket, it has its
    last object."""
    is_local = isinstance(folder, Path)
    return folder.name.isdecimal() and (is_local or (folder / "commit_success.txt").exists())


def _is_being_removed(folder: AnyPath) -> bool:
    """Whether the process that writes the run is removing this step."""
    deadline = time.monotonic() + REMOVED_WITHIN
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not folder.exists()


def score(metrics: dict[str, float]) -> float:
    """The negative loss, which is largest for the best step; -inf if the loss is NaN."""
    return -math.inf if math.isnan(metrics["loss"]) else -metrics["loss"]
