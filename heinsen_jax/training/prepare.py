"""Preparation of a run: the checks of its settings, its data and its folder, before any work."""

import importlib.metadata
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from heinsen_jax import data as datasets
from heinsen_jax.data import Dataset, TextDataset
from heinsen_jax.errors import UserError, printable
from heinsen_jax.runs.folder import (
    RunFolder,
    check_folder,
    complete_restart,
    open_run,
    set_aside,
)
from heinsen_jax.runtime.compilation import cache_compilations
from heinsen_jax.runtime.distributed import (
    check_alike,
    check_shared,
    process_0_first,
    together,
)
from heinsen_jax.sharding import MeshConfig, training_mesh
from heinsen_jax.storage.buckets import resolved_path
from heinsen_jax.storage.files import joint_hash, sha256_of
from heinsen_jax.training.config import ExperimentConfig, as_json, flat
from heinsen_jax.training.recorded import (
    OWN_TO_A_HOST,
    by_name,
    check_changes,
    check_tokenizer,
    check_workdir,
)
from heinsen_jax.training.settings import Settings, resolve_settings
from heinsen_jax.training.start import check_start
from heinsen_jax.typing import JSON

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Modes:
    """Flags of the start of a run.

    Attributes:
      restart: whether to begin at step 1, and move a run in the folder into a subfolder.
      allow_change: whether to resume although data, teacher, or settings that affect the result
        have changed.
      dry_run: whether to compile, time a few updates and report the cost, instead of training. The
        folder is not locked.
      profile: whether to write a trace of a few steps into the folder.
    """

    restart: bool = False
    allow_change: bool = False
    dry_run: bool = False
    profile: bool = False


@dataclass
class Prepared:
    """A run whose settings, data and folder fit together, for `train`. It holds the lock of its
    folder until training ends; as a context manager, until the end of the block.

    Attributes:
      settings: its settings, data and devices.
      folder: its folder.
      modes: flags of its start.
    """

    settings: Settings
    folder: RunFolder
    modes: Modes
    _resources: ExitStack = field(default_factory=ExitStack, repr=False)
    is_closed: bool = field(default=False, init=False, repr=False)

    def begin(self) -> None:
        """Move an earlier run aside, if requested. All processes of the run call this."""
        with process_0_first() as is_first:
            if is_first and self.modes.restart and not self.modes.dry_run:
                set_aside(self.folder)
        self.modes = replace(self.modes, restart=False)

    def __enter__(self) -> "Prepared":
        if self.is_closed:
            raise RuntimeError(f"{self.folder} is not locked any more: prepare the run again")
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_closed = True
        self._resources.__exit__(*error)


def prepare_run(
    config: ExperimentConfig,
    workdir: str | Path,
    *,
    dataset: Dataset | None = None,
    mesh: Mesh | None = None,
    restart: bool = False,
    allow_change: bool = False,
    dry_run: bool = False,
    profile: bool = False,
) -> Prepared:
    """Check the settings, the data and the folder of a run, and lock the folder. All processes of
    the run call this.

    Args:
      config: the configuration.
      workdir: the run's folder, as a path or a gs:// address.
      dataset: the data set; loaded from `config.data` when None.
      mesh: the devices, with axes of any types named as in `MeshConfig`. When None, the mesh of
        `jax.set_mesh`, or else of `config.mesh`.
      restart, allow_change, dry_run, profile: see `Modes`.

    Returns:
      The run, for `train`; it holds the lock of the folder.

    Raises:
      UserError: settings, data and the content of the folder do not fit together; or another
        process uses the folder.
    """
    modes = Modes(restart=restart, allow_change=allow_change, dry_run=dry_run, profile=profile)
    config, mesh = _on_mesh(config, mesh)
    with ExitStack() as resources:
        with together():
            folder = resources.enter_context(open_run(workdir))
            folder.check_writable()
            if jax.process_index() == 0 and not dry_run:
                resources.enter_context(folder.locked())
                complete_restart(folder)
        with together():
            check_folder(folder, restart=restart)
        prepared = prepare_in(folder, config, modes, dataset=dataset, mesh=mesh)
        prepared._resources = resources.pop_all()
        return prepared


def _on_mesh(config: ExperimentConfig, mesh: Mesh | None) -> tuple[ExperimentConfig, Mesh | None]:
    """The configuration of a run on the user's mesh, if any, and that mesh with Auto axes."""
    given = jax.sharding.get_mesh() if mesh is None else mesh
    if given.empty:
        return config, None
    mesh = training_mesh(given)
    sizes = MeshConfig(**mesh.shape)
    for name, size in asdict(config.mesh).items():
        if config.mesh != MeshConfig() and size not in (-1, mesh.shape[name]):
            raise UserError(
                f"mesh.{name}={size}, but the given mesh has {mesh.shape[name]}; leave one out"
            )
    return replace(config, mesh=sizes), mesh


def prepare_in(
    folder: RunFolder,
    config: ExperimentConfig,
    modes: Modes,
    *,
    dataset: Dataset | None = None,
    mesh: Mesh | None = None,
) -> Prepared:
    """`prepare_run` in a folder that the caller has opened, checked and locked."""
    cache_compilations(config.training.compilation_cache)
    with together():
        if not modes.restart:
            check_workdir(folder.files, config)
    check_shared(folder.shared)
    if dataset is None:
        with process_0_first():
            dataset = datasets.load(config.data)
    if jax.process_count() > 1:
        flags = {f"--{name.replace('_', '-')}": value for name, value in asdict(modes).items()}
        with together():
            alike = identity(config, dataset) | flags
        check_alike(alike)
    with together():
        settings = resolve_settings(config, dataset, mesh)
    if modes.restart:
        with together():
            _check_kept(folder, config)
    begins = modes.restart or not folder.checkpoints.is_dir()
    if begins and (start := config.training.start) is not None:
        with together():
            check_start(config.model, start)
    with process_0_first() as is_first:
        if is_first and not (modes.dry_run or modes.restart):
            check_tokenizer(folder.files, config, dataset)
            changed = check_changes(folder.files, config, dataset, allowed=modes.allow_change)
            if changed:
                line = f"changed since the last start: {printable('; '.join(changed))}"
                print(line, flush=True)
    return Prepared(settings, folder, modes)


def _check_kept(folder: RunFolder, config: ExperimentConfig) -> None:
    """Check that no model to start from is in the run that a restart moves aside."""
    folders = {
        "training.start": config.training.start,
        "distillation.start": config.distillation.start,
        "distillation.teacher": config.distillation.teacher,
    }
    for name, path in folders.items():
        if path is not None and resolved_path(path) == resolved_path(str(folder.shared)):
            raise UserError(
                f"{name}={path} is the run that --restart moves aside; choose another --workdir"
            )


def identity(config: ExperimentConfig, dataset: Dataset) -> dict[str, JSON]:
    """Named values that all processes of a run must share."""
    fields = by_name(flat(as_json(config)))
    alike = {name: value for name, value in fields.items() if name not in OWN_TO_A_HOST}
    if isinstance(dataset, TextDataset):
        alike["the tokens of data.corpus"] = joint_hash(dataset.content.decode())[:12]
    sources = (sha256_of(path) for path in sorted(PACKAGE.rglob("*.py")))
    alike["the source of heinsen_jax"] = joint_hash(*sources)[:12]
    for library in ("jax", "jaxlib", "flax", "optax"):
        alike[library] = importlib.metadata.version(library)
    return alike
