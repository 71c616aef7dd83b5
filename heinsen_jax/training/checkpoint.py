"""Checkpoints of a run: asynchronous and atomic; the latest and the best are kept."""

import contextlib
import json
import math
import shlex
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import NotRequired, TypedDict, TypeVar, cast

import jax
import orbax.checkpoint as ocp
import pydantic
from etils import epath
from flax import nnx
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from heinsen_jax.buckets import AnyPath, move
from heinsen_jax.data import Tokenizer, load_tokenizer
from heinsen_jax.data.files import free_name, write_atomically, writing
from heinsen_jax.distributed import gather, process_0_first, together
from heinsen_jax.errors import UserError, explain, first_line, parse_json
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.layers import with_layers
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.run_folder import RunFolder, opened
from heinsen_jax.training.checksums import (
    add_last_checksums,
    find_damage,
    find_damaged_array,
    write_checksums,
)
from heinsen_jax.training.storage_errors import is_of_storage, quiet_failed_saves, reading_steps
from heinsen_jax.training.weights import has_weights, load_weights
from heinsen_jax.typing import JSON, Array, PyTree

CONFIG_FILE = "config.json"

SAVED_FILE = "last_checkpoint.json"
"""Records the newest step that was saved, 0 before the first, so that lost checkpoints are
noticed."""

REMOVED_WITHIN = 2.0
"""Seconds that a reader waits for the removal of a step by another process."""

ITEM, METRICS = "default", "metrics/metrics"
"""Names of Orbax in a step's folder: the folder of the state, and the file of metrics."""


Tree = TypeVar("Tree")


class SavedConfig(TypedDict):
    """Content of a run's `config.json`: the fields of its `ExperimentConfig`, by section."""

    seed: int
    model: dict[str, JSON]
    data: dict[str, JSON]
    optimizer: dict[str, JSON]
    training: dict[str, JSON]
    mesh: dict[str, JSON]
    distillation: NotRequired[dict[str, JSON]]  # earlier versions had none


class Checkpoints:
    """The checkpoints in a run's folder: one per step, of named arrays.

    A save returns once the arrays are copied, and writes in the background. A step gets its final
    name only when it is complete, so a killed process leaves the previous one as the latest.

    No step is used before all its files have the hashes that were recorded. Of other steps, all
    but the content of arrays is compared when this opens. Damaged steps, listed in `damaged`, are
    renamed, and earlier ones are used. With `read_only` nothing is changed, another process may
    write, and the steps are those at the opening.
    """

    def __init__(self, workdir: Path | RunFolder, *, keep: int = 2, read_only: bool = False):
        self._run = RunFolder(workdir) if isinstance(workdir, Path) else workdir
        self.folder = self._run.checkpoints
        self.damaged: dict[int, str] = {}
        self._saved_file = self._run.files.resolve() / SAVED_FILE
        self._manager: ocp.CheckpointManager | None = None
        quiet_failed_saves()
        if read_only:
            self._steps = [step for step in self._finished() if not self._is_damaged(step)]
            self._verified: set[int] = set()
            return
        with process_0_first() as is_first:
            if is_first:
                self._set_damaged_aside()
        self._verify_newest()
        best = BestN(get_metric_fn=_score, n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            best_fn=_score,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._complete),
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        )

    def _finished(self) -> list[int]:
        """The finished steps."""
        with reading_steps(self.folder):
            folders = self.folder.iterdir() if self.folder.is_dir() else ()
            return sorted(int(path.name) for path in folders if _is_finished(path))

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
        damaged, rename that step and verify the one before."""
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
            return -_score(parse_json((self.folder / str(step) / METRICS).read_bytes()))
        except FileNotFoundError:  # another process is removing the step
            return math.inf

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
        if self._manager is None or jax.process_index() != 0:
            return
        newest = max(self._finished(), default=default)
        if newest is None:
            return
        with writing(self._saved_file.parent):
            write_atomically(self._saved_file, json.dumps({"step": newest}).encode())

    def check_lost(self, remedy: str, *, recorded: int = 0) -> None:
        """Check that a run without checkpoints never had any.

        Args:
          remedy: end of the message.
          recorded: last step of the run's metrics, which shows that it was trained if the record
            of its newest checkpoint is missing, too.

        Raises:
          UserError: it had; the message says what happened, and ends with the remedy.
        """
        if self._newest() is not None:
            return
        reasons = [f"step {step} ({reason})" for step, reason in sorted(self.damaged.items())]
        earlier = [path.name for path in sorted(self.folder.glob("damaged-*"))]
        saved = newest_saved(self._saved_file)
        if not (reasons or earlier or saved or (saved is None and recorded)):
            return
        found = "is damaged: " + ", ".join(reasons or earlier) if reasons or earlier else "is gone"
        raise UserError(f"{self.folder}: every checkpoint of this run {found}; {remedy}")

    def losses(self) -> list[str]:
        """Descriptions of damaged checkpoints and of a newest one that is missing."""
        found = [
            f"{self.folder / str(step)} is damaged ({reason})"
            for step, reason in sorted(self.damaged.items())
        ]
        latest, newest = self._newest(), newest_saved(self._saved_file)
        if latest is not None and newest is not None and latest < newest not in self.damaged:
            path = self.folder / str(newest)
            if not path.exists():  # another process may have saved it since this was opened
                found.append(f"{path} was saved, and is gone")
        return found

    def _newest(self) -> int | None:
        """The newest step without known damage."""
        return max(self._steps, default=None) if self._manager is None else self.latest_step()

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None without any. A reader verifies it first."""
        if self._manager is None:
            return self._first_intact(sorted(self._steps, reverse=True))
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Step with the smallest validation loss; the newest step if none was evaluated. A reader
        verifies it first."""
        if self._manager is None:
            order = sorted(self._steps, key=lambda step: (self._loss(step), -step))
            return self._first_intact(order)
        best = self._manager.best_step()
        return self.latest_step() if best is None else best

    def save(self, step: int, state: PyTree[Array], *, loss: float | None = None) -> None:
        """Start to write a step; `loss` is its validation loss, if it was evaluated."""
        if self._manager is None:
            raise RuntimeError(f"{self.folder} is open for reading only: step {step} is not saved")
        if step in self._manager.all_steps():
            return
        try:
            self._manager.save(
                step,
                args=ocp.args.PyTreeSave(flatten_with_names(state)),
                metrics={"loss": math.inf if loss is None else loss},
                force=True,
            )
            self.record_newest()  # records an earlier step, since this one is still being written
        except Exception as error:
            if not is_of_storage(error):
                raise
            raise self._not_written(error) from error

    def _not_written(self, error: Exception) -> UserError:
        return UserError(
            f"{self.folder}: a checkpoint cannot be written ({first_line(error)}); free space, or "
            "make the folder writable, and give the command again: earlier checkpoints are kept"
        )

    def wait(self) -> None:
        """Wait until all saves are written.

        Raises:
          UserError: a save failed; the checkpoints before it remain.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            self.record_newest()
        except Exception as error:
            if not is_of_storage(error):
                raise
            raise self._not_written(error) from error

    def restore(self, step: int, abstract: Tree) -> Tree:
        """Restore a pytree like `abstract` (shapes, dtypes, shardings), or a part of the saved one.
        Arrays without a sharding are NumPy arrays.

        Raises:
          UserError: the step is damaged, has other arrays, or cannot be read; the message names it.
        """
        wanted, place = flatten_with_names(abstract), self.folder / str(step)
        folder = place / ITEM
        arguments = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        try:
            handler = ocp.PyTreeCheckpointHandler()
            saved = handler.metadata(epath.Path(folder)).tree
            if missing := wanted.keys() - saved.keys():
                raise UserError(
                    f"{place} has no {min(missing)}: it was saved with another optimizer.name or "
                    "optimizer.ema_decay; restore those settings, or give --restart"
                )
            with ocp.Checkpointer(handler) as checkpointer:
                restored = checkpointer.restore(folder, arguments)
        except (UserError, jax.errors.JaxRuntimeError):  # the latter: of a device or a process
            raise
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError)
            remedy = "check the disk or network, and give the command again"
            if is_missing or not is_of_storage(error):
                remedy = "move that folder away to resume from the step before"
            raise UserError(f"{place} cannot be read ({first_line(error)}): {remedy}") from error
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in wanted])

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until all saves are written. An error inside the context takes precedence over those
        of saves, which may fail for the same reason."""
        if self._manager is None:
            return
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


def load_run(
    workdir: str | Path, *, best: bool = True, on_host: bool = False
) -> tuple[LanguageModel, Tokenizer | None, int]:
    """Load the model, the tokenizer and the step of a run's best (or latest) checkpoint, or of a
    model folder of `interop.hub`. The tokenizer is None if the run trained on a task.

    Args:
      workdir: the folder.
      best: whether to load the best checkpoint, not the latest.
      on_host: whether the parameters are NumPy arrays in the memory of this host, instead of arrays
        on its first device.

    Raises:
      UserError: the folder has no run, a damaged one, or one without checkpoints.

    Warns:
      UserWarning: a checkpoint is damaged or missing, and another one is used.
    """
    with opened(workdir) as run:
        return _loaded(run, best, on_host)


def load_architecture(workdir: str | Path) -> LanguageModelConfig:
    """The architecture of the model of `load_run`, without its weights.

    Raises:
      UserError: as `load_run`, but for damaged checkpoints.
    """
    with opened(workdir) as run:
        return _architecture(run)[0]


def _architecture(run: RunFolder) -> tuple[LanguageModelConfig, SavedConfig]:
    """The architecture of a run's model, and the whole configuration."""
    config = read_config(run.files)
    if config is None:
        raise UserError(_no_run(run))
    if not run.checkpoints.is_dir() and not has_weights(run.files):
        raise UserError(_no_checkpoint(run))
    try:
        return pydantic.TypeAdapter(LanguageModelConfig).validate_python(config["model"]), config
    except ValueError as error:
        raise UserError(f"{run.files / CONFIG_FILE}: model.{explain(error)}") from None


def _loaded(
    run: RunFolder, best: bool, on_host: bool
) -> tuple[LanguageModel, Tokenizer | None, int]:
    workdir = run.files
    model, config = _architecture(run)
    graph, abstract = nnx.split(LanguageModel.abstract(model))
    device = None if on_host else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
    )
    if run.checkpoints.is_dir():
        has_average = config["optimizer"].get("ema_decay") is not None
        name = "average" if has_average else "parameters"
        parameters, step = _of_checkpoint(run, name, abstract, best)
    else:
        arrays, step = load_weights(workdir, flatten_with_names(abstract))
        leaves = [arrays[name] for name in flatten_with_names(abstract)]
        parameters = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    is_task = "task" in config["data"]
    tokenizer = None if is_task else load_tokenizer(workdir)
    return nnx.merge(graph, parameters), tokenizer, step


def load_text_run(
    workdir: str | Path, *, best: bool = True
) -> tuple[LanguageModel, Tokenizer, int]:
    """`load_run` for a model of text.

    Raises:
      UserError: as `load_run`; or the model is trained on a synthetic task.
    """
    model, tokenizer, step = load_run(workdir, best=best)
    if tokenizer is None:
        raise UserError(
            f"{workdir}: the model is trained on a synthetic task; choose a run trained on text"
        )
    return model, tokenizer, step


def _of_checkpoint(
    run: RunFolder, name: str, abstract: nnx.State, best: bool
) -> tuple[nnx.State, int]:
    """Load the parameters, or their average, by the name in `TrainState`, and the step of a run's
    best (or latest) checkpoint."""
    with Checkpoints(run, read_only=True) as checkpoints:
        step = checkpoints.best_step() if best else checkpoints.latest_step()
        checkpoints.check_lost("bring one back, or train it again")
        if step is None:
            raise UserError(_no_checkpoint(run))
        for warning in checkpoints.losses():
            warnings.warn(f"{warning}: step {step} is used", stacklevel=3)
        return checkpoints.restore(step, {name: abstract})[name], step


def read_config(workdir: Path) -> SavedConfig | None:
    """Read the resolved configuration of a run; None if the folder has no run.

    Raises:
      UserError: the file is damaged.
    """
    path = workdir / CONFIG_FILE
    if not path.exists():
        return None
    try:
        config = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); restore it or use another workdir") from None
    if isinstance(config, dict) and "model_type" in config:
        command = shlex.join(("import", str(workdir), "--workdir", "DIR"))
        raise UserError(
            f"{workdir} is a checkpoint of transformers, not a run; import it with "
            f"`python -m heinsen_jax.interop.transformers {command}`"
        )
    for name in SavedConfig.__annotations__:
        kind = int if name == "seed" else dict
        if not isinstance(config, dict) or not isinstance(config.get(name), kind):
            raise UserError(f"{path} is damaged (no {name}); restore it or use another workdir")
    try:
        config["model"] = with_layers(config["model"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return cast(SavedConfig, config)


def newest_saved(path: Path) -> int | None:
    """The step that `Checkpoints.record_newest` recorded: 0 before the first one, -1 if the record
    is damaged, None without a record."""
    try:
        return int(parse_json(path.read_bytes())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _no_run(run: RunFolder) -> str:
    """Error message for a path without a run."""
    workdir, said = run.files, f"{run} holds no run ({CONFIG_FILE} is missing)"
    if workdir.is_file():
        return f"{workdir} is a file; give the folder of a run"
    if runs := sorted(path.parent.name for path in workdir.glob(f"*/{CONFIG_FILE}")):
        return f"{said}; give one of the folders in it that do: {', '.join(runs)}"
    command = shlex.join(("--config", "quickstart", "--workdir", str(run)))
    return f"{said}; train one with `python -m heinsen_jax.train {command}`"


def _no_checkpoint(run: RunFolder) -> str:
    if newest_saved(run.files / SAVED_FILE):
        return f"{run.checkpoints} is gone; bring it back, or train the run again"
    return f"{run} has no checkpoint yet; start its training again"


def _is_finished(folder: AnyPath) -> bool:
    """Whether a folder is of a finished step: by its name on a disk, where Orbax renames it; by its
    last object in a bucket."""
    is_local = isinstance(folder, Path)
    return folder.name.isdecimal() and (is_local or (folder / "commit_success.txt").exists())


def _is_being_written(folder: AnyPath) -> bool:
    if isinstance(folder, Path):
        return folder.name.endswith(".orbax-checkpoint-tmp")
    return folder.name.isdecimal() and not _is_finished(folder)


def _is_being_removed(folder: AnyPath) -> bool:
    """Whether the process that writes the run is removing this step."""
    deadline = time.monotonic() + REMOVED_WITHIN
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not folder.exists()


def _score(metrics: dict[str, float]) -> float:
    """The negative loss, which the best step has largest; a loss that is not a number is never
    the best."""
    return -math.inf if math.isnan(metrics["loss"]) else -metrics["loss"]
