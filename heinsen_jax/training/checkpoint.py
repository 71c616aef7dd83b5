"""Writing the checkpoints of a run: asynchronous and atomic; the latest and the best are kept."""

import contextlib
import json
import math
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.checkpoints import CheckpointReader, is_finished
from heinsen_jax.runs.checksums import (
    add_last_checksums,
    find_damage,
    find_damaged_array,
    write_checksums,
)
from heinsen_jax.runs.folder import RunFolder
from heinsen_jax.runs.record import LOSSES_FILE
from heinsen_jax.runs.storage_errors import quiet_failed_saves, reading_steps, writing_steps
from heinsen_jax.runtime.distributed import gather, process_0_first, together
from heinsen_jax.storage.buckets import AnyPath, move
from heinsen_jax.storage.files import free_name, storage_errors, write_atomically
from heinsen_jax.typing import Array, PyTree


class Checkpoints(CheckpointReader):
    """The checkpoints of a run that this process trains.

    A save returns once the arrays are copied, and writes in the background. A step gets its final
    name only when it is complete, so a killed process leaves the previous one as the latest.
    Damaged steps are renamed on opening, and the newest intact one is verified.
    """

    def __init__(self, workdir: Path | RunFolder, *, keep: int = 2):
        self._open(workdir)
        quiet_failed_saves()
        with process_0_first() as is_first:
            if is_first:
                self._set_damaged_aside()
        self._verify_newest()
        best = BestN(get_metric_fn=self._score, n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            best_fn=self._score,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._complete),
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        )

    def _set_damaged_aside(self) -> None:
        """Rename the steps with damage other than in the content of their arrays."""
        for step in self._finished():
            folder = self.folder / str(step)
            with reading_steps(folder):
                add_last_checksums(folder)
                reason = find_damage(folder)
            if reason:
                self._set_aside(step, reason)

    def _verify_newest(self) -> None:
        """Verify the arrays of the newest step, each process a share of their files; while they are
        damaged, rename that step and verify the previous one."""
        index, count = jax.process_index(), jax.process_count()
        while newest := self._newest_of_process_0():
            folder = self.folder / newest
            with together(), reading_steps(folder):
                damage = find_damaged_array(folder, index, count)
            reason = next(filter(None, gather(damage or "")), None)
            if reason is None:
                return
            with together():
                if index == 0:
                    self._set_aside(int(newest), reason)

    def _newest_of_process_0(self) -> str:
        """The newest finished step that process 0 lists, "" without any. A collective."""
        newest = ""
        with together():
            if jax.process_index() == 0:
                newest = str(max(self._finished(), default=""))
        return gather(newest)[0]

    def _set_aside(self, step: int, reason: str) -> None:
        self.damaged[step] = reason
        folder = self.folder / str(step)
        move(folder, free_name(folder.with_name(f"damaged-{step}")))

    def _complete(self) -> None:
        """Callback of Orbax, when all files of a step are written, before it is final."""
        if jax.process_index() == 0:
            for folder in self.folder.iterdir():
                if _is_being_written(folder):
                    write_checksums(folder)
            self._run.publish()

    def record_newest(self, default: int | None = None) -> None:
        """Record the newest step, or `default` without any. (Orbax has no callback after a step
        gets its final name.)"""
        if jax.process_index() == 0:
            newest = max(self._finished(), default=default)
            if newest is not None:
                self._write_step(self._saved_file, newest)

    def forget_losses(self, step: int) -> None:
        """Choose the best step among later ones alone, since earlier losses are of other data."""
        self._changed_at = step
        if jax.process_index() == 0:
            self._write_step(self._saved_file.with_name(LOSSES_FILE), step)

    def _write_step(self, path: Path, step: int) -> None:
        with storage_errors(path.parent):
            write_atomically(path, json.dumps({"step": step}).encode())

    def _newest(self) -> int | None:
        return self.latest_step()

    def latest_step(self) -> int | None:
        """The newest step; None without any."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The step with the smallest validation loss; the newest step if none was evaluated."""
        best = self._manager.best_step()
        return self.latest_step() if best is None else best

    def save(self, step: int, state: PyTree[Array], *, loss: float | None = None) -> None:
        """Start to write a step; `loss` is its validation loss, if it was evaluated."""
        if step in self._manager.all_steps():
            return
        with writing_steps(self.folder):
            self._manager.save(
                step,
                args=ocp.args.PyTreeSave(flatten_with_names(state)),
                metrics={"loss": math.inf if loss is None else loss, "step": step},
                force=True,
            )
            self.record_newest()  # records an earlier step, since this one is still being written

    def wait(self) -> None:
        """Wait until all saves are written.

        Raises:
          UserError: a save failed; the checkpoints before it remain.
        """
        with writing_steps(self.folder):
            self._manager.wait_until_finished()
            self.record_newest()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all saves are written. An error inside the context takes precedence over
        errors of saves, which may have the same cause."""
        try:
            self.wait()
            if jax.process_index() == 0:
                with reading_steps(self.folder):
                    for step in self._finished():
                        add_last_checksums(self.folder / str(step))
        except Exception:
            if kind is None:
                raise
        finally:
            with contextlib.suppress(Exception):  # the error of a failed save, raised again
                self._manager.close()


def _is_being_written(folder: AnyPath) -> bool:
    if isinstance(folder, Path):
        return folder.name.endswith(".orbax-checkpoint-tmp")
    return folder.name.isdecimal() and not is_finished(folder)
