"""Checkpoints of a run: asynchronous, atomic, the latest and the best kept."""

import contextlib
import json
import logging
import math
import re
import shlex
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypedDict, TypeVar, cast

import jax
import orbax.checkpoint as ocp
import pydantic
import tiktoken
from flax import nnx
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from heinsen_jax.data import load_tokenizer
from heinsen_jax.data.files import free_name, write_atomically, writing
from heinsen_jax.distributed import process_0_first
from heinsen_jax.errors import UserError, explain, wants_tracebacks
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.checksums import add_last_checksums, find_damage, write_checksums
from heinsen_jax.training.state import TrainState
from heinsen_jax.training.weights import has_weights, load_weights
from heinsen_jax.typing import JSON

CONFIG_FILE = "config.json"
CHECKPOINT_FOLDER = "checkpoints"

SAVED_FILE = "last_checkpoint.json"
"""The newest step that was saved: where it is known and no step is left, something was lost."""

REMOVED_WITHIN = 2.0
"""Seconds that a reader waits for a step that another process seems to be removing."""

OF_SYSTEM = re.compile(r"os.error|errno|No space left|Permission denied", re.IGNORECASE)
"""How TensorStore and Orbax quote the operating system."""

EXPECTED = "CheckpointManagerOptions.read_only=True", "Given directory is read only"
"""What Orbax warns of where a folder is only read, which is what was asked for."""


def _is_news(record: logging.LogRecord) -> bool:
    """False for what this module reports itself: a save that fails is one `UserError`."""
    message = record.getMessage()
    is_of_save = "orbax" in record.pathname or "orbax" in message
    is_reported = is_of_save and record.levelno >= logging.ERROR and record.exc_info
    return not message.startswith(EXPECTED) and (wants_tracebacks() or not is_reported)


Tree = TypeVar("Tree")


class SavedConfig(TypedDict):
    """The file `config.json` of a run: the fields of its `ExperimentConfig`, section by section."""

    seed: int
    model: dict[str, JSON]
    data: dict[str, JSON]
    optimizer: dict[str, JSON]
    training: dict[str, JSON]
    mesh: dict[str, JSON]


class Checkpoints:
    """The checkpoints in a run's folder, one a step, of named arrays.

    A save returns once the arrays are copied and writes in the background; a step appears under its
    final name only when it is whole, so a killed process leaves the one before as the latest.
    Every file is held against the hash it was written with before a step counts as one: damaged
    steps, which `damaged` names, are renamed, and those before them are used.
    Opened with `read_only`, the folder is left as it is, also while another process writes to it.
    """

    def __init__(self, workdir: Path, *, keep: int = 2, read_only: bool = False):
        self.folder = workdir.resolve() / CHECKPOINT_FOLDER
        self._saved_file = workdir.resolve() / SAVED_FILE
        self._read_only = read_only
        self._on_exit = ExitStack()
        _quiet_failed_saves()
        if read_only:
            self.damaged = self._find_damaged()
        else:
            with process_0_first() as is_first:
                self.damaged = self._find_damaged() if is_first else {}
        best = BestN(get_metric_fn=_goodness, n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            best_fn=_goodness,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._write_checksums
            ),
        )
        self._manager = ocp.CheckpointManager(
            self._without_damaged(), options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        )

    def _steps(self) -> list[Path]:
        """The folders of finished steps."""
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return [path for path in folders if path.name.isdecimal()]

    def _find_damaged(self) -> dict[int, str]:
        """What is wrong with which steps. For a writer, these get another name."""
        found = {}
        for folder in self._steps():
            if not self._read_only:
                add_last_checksums(folder)
            reason = find_damage(folder)
            if reason and not (self._read_only and _is_being_removed(folder)):
                found[int(folder.name)] = reason
                if not self._read_only:
                    folder.rename(free_name(folder.with_name(f"damaged-{folder.name}")))
        return found

    def _without_damaged(self) -> Path:
        """The folder; for a reader, who renames nothing, one with links to what is whole."""
        if not (self._read_only and self.damaged):
            return self.folder
        links = Path(self._on_exit.enter_context(tempfile.TemporaryDirectory()))
        for folder in self._steps():
            if int(folder.name) not in self.damaged:
                (links / folder.name).symlink_to(folder)
        return links

    def _write_checksums(self) -> None:
        """Called by Orbax when all files of a step are written, under a name not yet final."""
        if jax.process_index() == 0:
            for folder in self.folder.glob("*.orbax-checkpoint-tmp"):
                write_checksums(folder)

    def record_newest(self) -> None:
        """Notes the newest step. (Orbax has no callback for the moment after a step is whole.)"""
        if self._read_only or jax.process_index() != 0:
            return
        if steps := [int(folder.name) for folder in self._steps()]:
            with writing(self._saved_file.parent):
                write_atomically(self._saved_file, json.dumps({"step": max(steps)}).encode())

    def check_lost(self, remedy: str) -> None:
        """Makes sure that a run without a checkpoint is one that never had any.

        Raises:
          UserError: it had; the message says what became of it, and ends with the remedy.
        """
        if self.latest_step() is not None:
            return
        reasons = [f"step {step} ({reason})" for step, reason in sorted(self.damaged.items())]
        earlier = [path.name for path in sorted(self.folder.glob("damaged-*"))]
        if not (reasons or earlier or self._saved_file.exists()):
            return
        found = "is damaged: " + ", ".join(reasons or earlier) if reasons or earlier else "is gone"
        raise UserError(f"{self.folder}: every checkpoint of this run {found}; {remedy}")

    def losses(self) -> list[str]:
        """In words, each checkpoint that is damaged, or was saved as the newest and is gone."""
        found = [
            f"{self.folder / str(step)} is damaged ({reason})"
            for step, reason in sorted(self.damaged.items())
        ]
        latest, newest = self.latest_step(), self._newest_saved()
        if latest is not None and newest is not None and latest < newest not in self.damaged:
            path = self.folder / str(newest)
            if not path.exists():  # it does where it was saved since this was opened
                found.append(f"{path} was saved, and is gone")
        return found

    def _newest_saved(self) -> int | None:
        """The step that `record_newest` noted."""
        try:
            return int(json.loads(self._saved_file.read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def latest_step(self) -> int | None:
        """The newest whole checkpoint."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The checkpoint with the least validation loss; the newest where none was evaluated."""
        best = self._manager.best_step()
        return self.latest_step() if best is None else best

    def save(self, step: int, state: TrainState, *, loss: float | None = None) -> None:
        """Begins to write a step; `loss` is its validation loss, where it was measured."""
        if self._read_only:
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
            self.record_newest()  # of the steps before: this one is being written
        except Exception as error:
            if not _is_of_storage(error):
                raise
            raise self._not_written(error) from error

    def _not_written(self, error: Exception) -> UserError:
        return UserError(
            f"{self.folder}: a checkpoint cannot be written ({_reason(error)}); make room, or make "
            "the folder writable, and give the same command again: the checkpoints before it are "
            "kept"
        )

    def wait(self) -> None:
        """Returns when all that was saved is written.

        Raises:
          UserError: it could not be; the checkpoints before it are still there.
        """
        try:
            self._manager.wait_until_finished()
            self.record_newest()
        except Exception as error:
            if not _is_of_storage(error):
                raise
            raise self._not_written(error) from error

    def restore(self, step: int, abstract: Tree) -> Tree:
        """A pytree like `abstract` (shapes, dtypes, shardings), of any part of what was saved.

        Raises:
          UserError: the step is damaged or holds other arrays; the message names it.
        """
        wanted = flatten_with_names(abstract)
        try:
            saved = self._manager.item_metadata(step).tree
            if missing := wanted.keys() - saved.keys():
                raise ValueError(f"it does not hold {min(missing)}")
            restored = self._manager.restore(
                step,
                args=ocp.args.PyTreeRestore(
                    wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=True,
                ),
            )
        except jax.errors.JaxRuntimeError:  # of the devices, or of another process
            raise
        except Exception as error:
            raise UserError(
                f"{self.folder / str(step)} cannot be read ({_reason(error)}): move that folder "
                "away to resume from the step before"
            ) from error
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in wanted])

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until everything is written. An error that ended the context is the one that is
        raised, not those of saves that fail for the same reason."""
        try:
            if not self._read_only:
                self.wait()
                if jax.process_index() == 0:
                    for folder in self._steps():
                        add_last_checksums(folder)
        except Exception:
            if kind is None:
                raise
        finally:
            with contextlib.suppress(Exception):  # of a save that failed, once more
                self._manager.close()
            self._on_exit.close()


def load_run(
    workdir: str | Path, *, best: bool = True
) -> tuple[LanguageModel, tiktoken.Encoding | None, int]:
    """The model, the tokenizer and the step of a run's best (or latest) checkpoint, or of a folder
    of `interop.hub`. There is no tokenizer where what was learned is a task, and no text.

    Raises:
      UserError: the folder holds no run, or one that cannot be read, or nothing has been saved in
        it yet.

    Warns:
      UserWarning: a checkpoint is damaged, and another one used.
    """
    workdir = Path(workdir)
    config = read_config(workdir)
    if config is None:
        raise UserError(_no_run(workdir))
    has_checkpoints = (workdir / CHECKPOINT_FOLDER).is_dir()
    if not has_checkpoints and not has_weights(workdir):
        raise UserError(_no_checkpoint(workdir))
    try:
        model = pydantic.TypeAdapter(LanguageModelConfig).validate_python(config["model"])
    except ValueError as error:
        raise UserError(f"{workdir / CONFIG_FILE}: model.{explain(error)}") from None
    graph, abstract = nnx.split(nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0))))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
    )
    if has_checkpoints:
        parameters, step = _of_checkpoint(workdir, abstract, best)
    else:
        arrays, step = load_weights(workdir, flatten_with_names(abstract))
        leaves = [arrays[name] for name in flatten_with_names(abstract)]
        parameters = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    is_task = "task" in config["data"]
    tokenizer = None if is_task else load_tokenizer(workdir)
    return nnx.merge(graph, parameters), tokenizer, step


def _of_checkpoint(workdir: Path, abstract: nnx.State, best: bool) -> tuple[nnx.State, int]:
    """The parameters and the step of a run's best (or latest) checkpoint."""
    with Checkpoints(workdir, read_only=True) as checkpoints:
        step = checkpoints.best_step() if best else checkpoints.latest_step()
        checkpoints.check_lost("bring one back, or train it again")
        if step is None:
            raise UserError(_no_checkpoint(workdir))
        for warning in checkpoints.losses():
            warnings.warn(f"{warning}: step {step} is used", stacklevel=3)
        return checkpoints.restore(step, {"parameters": abstract})["parameters"], step


def read_config(workdir: Path) -> SavedConfig | None:
    """The resolved configuration that a run's folder records; None where there is no run.

    Raises:
      UserError: the file is damaged.
    """
    path = workdir / CONFIG_FILE
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it readable") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it or use another workdir") from None
    for name in SavedConfig.__annotations__:
        kind = int if name == "seed" else dict
        if not isinstance(config, dict) or not isinstance(config.get(name), kind):
            raise UserError(f"{path} is damaged (no {name}): restore it or use another workdir")
    return cast(SavedConfig, config)


def _no_run(workdir: Path) -> str:
    """What to say of something without a run's configuration."""
    said = f"{workdir} holds no run ({CONFIG_FILE} is missing)"
    if workdir.is_file():
        return f"{workdir} is a file: give the folder of a run"
    if runs := sorted(path.parent.name for path in workdir.glob(f"*/{CONFIG_FILE}")):
        return f"{said}: give one of the folders in it that do: {', '.join(runs)}"
    command = shlex.join(("--config", "quickstart", "--workdir", str(workdir)))
    return f"{said}: train one with `python -m heinsen_jax.train {command}`"


def _no_checkpoint(workdir: Path) -> str:
    if (workdir / SAVED_FILE).exists():
        return f"{workdir / CHECKPOINT_FOLDER} is gone: bring it back, or train the run again"
    return f"{workdir} has no checkpoint yet: start its training again"


def _is_being_removed(folder: Path) -> bool:
    """Whether a step is one that the process which writes the run is just removing."""
    deadline = time.monotonic() + REMOVED_WITHIN
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not folder.exists()


def _is_of_storage(error: Exception) -> bool:
    """Whether a save failed where it was to be stored: not on a device, nor for a fault of ours.
    Orbax raises errors of its own; TensorStore's are ValueError, with the system's in its text."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return False
    causes = [error, error.__cause__, error.__context__]
    return any(isinstance(x, OSError) or OF_SYSTEM.search(str(x)) for x in causes)


def _quiet_failed_saves() -> None:
    """Silences what libraries log of saves that fail here: permanently, since their threads outlive
    the save."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _ignore_closed_loop


def _ignore_closed_loop(unraisable: "sys.UnraisableHookArgs") -> None:
    """After a save that failed, threads of TensorStore call back an event loop that Orbax has
    closed: each would print a traceback."""
    if wants_tracebacks() or str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _reason(error: Exception) -> str:
    """The first line of what an error is about."""
    cause = error.__cause__ or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def _goodness(metrics: dict[str, float]) -> float:
    return -metrics["loss"]
