"""Checkpoints of a run: asynchronous, atomic, the latest and the best kept."""

import contextlib
import json
import logging
import math
import sys
import tempfile
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
from heinsen_jax.training.seal import damage, seal, seal_the_last
from heinsen_jax.training.state import TrainState
from heinsen_jax.training.weights import has_weights, load_weights, named
from heinsen_jax.typing import JSON

CONFIG_FILE = "config.json"
CHECKPOINT_FOLDER = "checkpoints"

SAVED_FILE = "last_checkpoint.json"
"""The newest step that was saved: where it is known and no step is left, something was lost."""

EXPECTED = "CheckpointManagerOptions.read_only=True", "Given directory is read only"
"""What Orbax warns of where a folder is only read, which is what was asked for."""


def _is_news(record: logging.LogRecord) -> bool:
    """False for what this module reports itself: a save that fails is one `UserError`."""
    message = record.getMessage()
    is_of_save = "orbax" in record.pathname or "orbax" in message
    is_reported = is_of_save and record.levelno >= logging.ERROR and record.exc_info
    return not message.startswith(EXPECTED) and (wants_tracebacks() or not is_reported)


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_is_news)


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
        if read_only:
            self.damaged = self._find_damaged()
        else:
            if sys.unraisablehook is sys.__unraisablehook__:
                sys.unraisablehook = _ignore_closed_loop
            with process_0_first() as is_first:
                self.damaged = self._find_damaged() if is_first else {}
        best = BestN(get_metric_fn=_goodness, n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            best_fn=_goodness,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
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
                seal_the_last(folder)
            if reason := damage(folder):
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

    def _seal(self) -> None:
        """Called by Orbax when all files of a step are written, under a name not yet final."""
        if jax.process_index() == 0:
            for folder in self.folder.glob("*.orbax-checkpoint-tmp"):
                seal(folder)

    def record_newest(self) -> None:
        """Notes the newest step. (Orbax has no callback for the moment after a step is whole.)"""
        if self._read_only or jax.process_index() != 0:
            return
        if steps := [int(folder.name) for folder in self._steps()]:
            with writing(self._saved_file.parent):
                write_atomically(self._saved_file, json.dumps({"step": max(steps)}).encode())

    def check_lost(self) -> None:
        """Makes sure that a run without a checkpoint is one that never had any.

        Raises:
          UserError: it had; the message says what became of it.
        """
        if self.latest_step() is not None:
            return
        reasons = [f"step {step} ({reason})" for step, reason in sorted(self.damaged.items())]
        earlier = [path.name for path in sorted(self.folder.glob("damaged-*"))]
        if not (reasons or earlier or self._saved_file.exists()):
            return
        found = "is damaged: " + ", ".join(reasons or earlier) if reasons or earlier else "is gone"
        raise UserError(
            f"{self.folder}: every checkpoint of this run {found}; bring one back, or give "
            "--restart to set the run aside and begin at step 1"
        )

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
                args=ocp.args.PyTreeSave(named(state)),
                metrics={"loss": math.inf if loss is None else loss},
                force=True,
            )
            self.record_newest()  # of the steps before: this one is being written
        except jax.errors.JaxRuntimeError:  # of the devices, or of another process
            raise
        except Exception as error:
            raise self._not_written(error) from error

    def _not_written(self, error: Exception) -> UserError:
        return UserError(
            f"a checkpoint cannot be written into {self.folder} ({_reason(error)}): make room, or "
            "make it writable, and give the same command again; the checkpoints before it are kept"
        )

    def wait(self) -> None:
        """Returns when all that was saved is written.

        Raises:
          UserError: it could not be; the checkpoints before it are still there.
        """
        try:
            self._manager.wait_until_finished()
            self.record_newest()
        except jax.errors.JaxRuntimeError:  # of the devices, or of another process
            raise
        except Exception as error:
            raise self._not_written(error) from error

    def restore(self, step: int, abstract: Tree) -> Tree:
        """A pytree like `abstract` (shapes, dtypes, shardings), of any part of what was saved.

        Raises:
          UserError: the step is damaged or holds other arrays; the message names it.
        """
        wanted = named(abstract)
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
        self._on_exit.close()
        try:
            if not self._read_only:
                self.wait()
                if jax.process_index() == 0:
                    for folder in self._steps():
                        seal_the_last(folder)
        except Exception:
            if kind is None:
                raise
        finally:
            with contextlib.suppress(Exception):  # of a save that failed, once more
                self._manager.close()


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
        raise UserError(
            f"{workdir} holds no run ({CONFIG_FILE} is missing): train one with "
            f"`python -m heinsen_jax.train --config quickstart --workdir {workdir}`"
        )
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
        arrays, step = load_weights(workdir, named(abstract))
        leaves = [arrays[name] for name in named(abstract)]
        parameters = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    is_task = "task" in config["data"]
    tokenizer = None if is_task else load_tokenizer(workdir)
    return nnx.merge(graph, parameters), tokenizer, step


def _of_checkpoint(workdir: Path, abstract: nnx.State, best: bool) -> tuple[nnx.State, int]:
    """The parameters and the step of a run's best (or latest) checkpoint."""
    with Checkpoints(workdir, read_only=True) as checkpoints:
        step = checkpoints.best_step() if best else checkpoints.latest_step()
        checkpoints.check_lost()
        if step is None:
            raise UserError(_no_checkpoint(workdir))
        for damaged, reason in sorted(checkpoints.damaged.items()):
            warnings.warn(
                f"{checkpoints.folder / str(damaged)} is damaged ({reason}): step {step} is used",
                stacklevel=3,
            )
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


def _no_checkpoint(workdir: Path) -> str:
    if (workdir / SAVED_FILE).exists():
        return f"{workdir}: its checkpoints are gone; bring them back, or train it again"
    return f"{workdir} has no checkpoint yet: start its training again"


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
