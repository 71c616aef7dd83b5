"""Preparation of a run: the checks of its settings, its data and its folder, before any work."""

import dataclasses
import importlib.metadata
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import jax
import pydantic
from jax.sharding import Mesh

from heinsen_jax import data as datasets
from heinsen_jax.attention import mechanism, names
from heinsen_jax.data import (
    AnyDataConfig,
    DataConfig,
    Dataset,
    TextDataset,
    load_tokenizer,
    save_tokenizer,
)
from heinsen_jax.data.dataset import DataSettings
from heinsen_jax.errors import UserError, explain, parse_json, printable
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.runs.folder import (
    RunFolder,
    check_folder,
    complete_restart,
    open_run,
    set_aside,
)
from heinsen_jax.runs.load import load_architecture
from heinsen_jax.runs.record import CONFIG_FILE, DATA_FILE, read_config
from heinsen_jax.runtime.compilation import cache_compilations
from heinsen_jax.runtime.distributed import (
    check_alike,
    check_shared,
    process_0_first,
    together,
)
from heinsen_jax.sharding import make_mesh, share_of_process
from heinsen_jax.storage.files import joint_hash, sha256_of, storage_errors, write_atomically
from heinsen_jax.training.config import ExperimentConfig, TrainingConfig, as_json, flat
from heinsen_jax.training.distillation import check_teacher
from heinsen_jax.training.optimizer import learning_rates
from heinsen_jax.training.tracker_services import services
from heinsen_jax.typing import JSON

NOT_ARCHITECTURE = {"dtype", "remat", "remat_policy"}
"""Fields of a model that may change when a run resumes."""
OWN_TO_A_HOST = {"data.corpus", "data.cache", "data.tokenizer", "training.compilation_cache"}
"""Paths, which may differ between the hosts of a run. The content of the data is compared
instead."""
AFFECT_RESULT = {
    "training.evaluation_batches",
    "training.masked_fraction",
    "training.skip_grad_norm_ratio",
    "training.z_loss",
}
"""Fields of training that, besides its length, affect the result of a run."""
CONTENT = "data.content"
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Settings:
    """Settings that fit together.

    Attributes:
      config: the configuration.
      dataset: the data set.
      data: `config.data`, with the documents resolved.
      mesh: the devices.
      lines: lines about documents and packing to print.
    """

    config: ExperimentConfig
    dataset: Dataset
    data: AnyDataConfig
    mesh: Mesh
    lines: tuple[str, ...]


@dataclass
class Prepared:
    """A run whose settings, data and folder fit together, for `train`. It holds the lock of its
    folder until training ends; as a context manager, until the end of the block.

    Attributes:
      settings: its settings, data and devices.
      folder: its folder.
      restart: whether `begin` moves an earlier run into a subfolder.
      dry_run: whether to compile, time a few updates and report the cost, instead of training.
      profile: whether to write a trace of a few steps into the folder.
      allow_change: whether to resume although the weights of the teacher have changed.
    """

    settings: Settings
    folder: RunFolder
    restart: bool = False
    dry_run: bool = False
    profile: bool = False
    allow_change: bool = False
    _resources: ExitStack = field(default_factory=ExitStack, repr=False)
    is_closed: bool = field(default=False, init=False, repr=False)

    def begin(self) -> None:
        """Move an earlier run aside, if requested. All processes of the run call this."""
        with process_0_first() as is_first:
            if is_first and self.restart and not self.dry_run:
                set_aside(self.folder)
        self.restart = False

    def __enter__(self) -> "Prepared":
        if self.is_closed:
            raise RuntimeError(f"{self.folder} is not locked any more: prepare the run again")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_closed = True
        self._resources.__exit__(kind, error, traceback)


def prepare_run(
    config: ExperimentConfig,
    workdir: str | Path | RunFolder,
    *,
    dataset: Dataset | None = None,
    restart: bool = False,
    allow_change: bool = False,
    dry_run: bool = False,
    profile: bool = False,
) -> Prepared:
    """Check the settings, the data and the folder of a run, and lock the folder. All processes of
    the run call this.

    Args:
      config: the configuration.
      workdir: the run's folder, as a path or a gs:// address; or opened, checked and locked by
        the caller.
      dataset: the data set; loaded from `config.data` when None.
      restart: whether to begin at step 1, and move a run in the folder into a subfolder.
      allow_change: whether to resume although data, teacher, or settings that affect the result
        have changed.
      dry_run: whether `train` shall only report the cost of the run. The folder is not locked.
      profile: whether `train` shall write a trace of a few steps.

    Raises:
      UserError: settings, data and the content of the folder do not fit together; or another
        process uses the folder.
    """
    cache_compilations(config.training.compilation_cache)
    with ExitStack() as resources:
        with together():
            if isinstance(workdir, RunFolder):
                folder = workdir
            else:
                folder = resources.enter_context(open_run(workdir))
            folder.check_writable()
            if jax.process_index() == 0 and not dry_run:
                if not isinstance(workdir, RunFolder):
                    resources.enter_context(folder.locked())
                complete_restart(folder)
        with together():
            if not isinstance(workdir, RunFolder):
                check_folder(folder, restart=restart)
            if not restart:
                check_workdir(folder.files, config)
        check_shared(folder.shared)
        if dataset is None:
            with process_0_first():
                dataset = datasets.load(config.data)
        modes: dict[str, JSON] = {
            "--dry-run": dry_run,
            "--profile": profile,
            "--restart": restart,
            "--allow-change": allow_change,
        }
        if jax.process_count() > 1:
            with together():
                alike = identity(config, dataset) | modes
            check_alike(alike)
        with together():
            settings = resolve_settings(config, dataset)
        with process_0_first() as is_first:
            if is_first and not (dry_run or restart):
                check_tokenizer(folder.files, config, dataset)
                changed = check_changes(folder.files, config, dataset, allowed=allow_change)
                if changed:
                    line = f"changed since the last start: {printable('; '.join(changed))}"
                    print(line, flush=True)
        modes_of_run = restart, dry_run, profile, allow_change
        return Prepared(settings, folder, *modes_of_run, resources.pop_all())


def resolve_settings(config: ExperimentConfig, dataset: Dataset) -> Settings:
    """Check the sections of a configuration against each other and the data set.

    Raises:
      UserError: two fields are incompatible; the message names them and the fix.
    """
    model, training = config.model, config.training
    data, lines = resolve_documents(config.data, dataset, model)
    vocabulary = dataset.vocab_size
    if model.vocab_size < vocabulary:
        owner = f"data.tokenizer={data.tokenizer}" if isinstance(data, DataConfig) else data.task
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of {owner}; make "
            f"it at least {vocabulary}"
        )
    if training.sample_tokens:
        if dataset.tokenizer is None:
            raise UserError(f"{dataset.name} has no text to sample; set training.sample_tokens=0")
        if not dataset.tokenizer.encode(training.sample_prompt):
            raise UserError(
                "training.sample_prompt is empty; give a character, or set sample_tokens=0"
            )
    if training.loss_by_position and not (model.is_causal and isinstance(data, DataConfig)):
        raise UserError("training.loss_by_position is for causal models of text; set it to False")
    check_teacher(config.distillation, model)
    if training.z_loss and config.distillation.teacher is not None:
        raise UserError(f"training.z_loss={training.z_loss}: distillation has none; set it to 0")
    if not model.is_causal:
        _check_masked(model, training, dataset)
    if model.max_length is not None and data.longest > model.max_length:
        raise UserError(
            f"model.max_length={model.max_length} is shorter than sequences of {data.longest} "
            f"tokens; make it at least {data.longest}"
        )
    dataset.train_row(data, config.seed)
    dataset.validation_rows(data)
    learning_rates(config.optimizer, training.steps)
    if jax.process_index() == 0:
        services(training.trackers)
    mesh = make_mesh(config.mesh)
    share_of_process(mesh)
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if data.batch_size % (training.accumulation_steps * parts):
        raise UserError(
            f"data.batch_size={data.batch_size} must be a multiple of "
            f"training.accumulation_steps={training.accumulation_steps} times the {parts} "
            "device(s) of mesh.data and mesh.fsdp"
        )
    _check_split(model, data, mesh)
    _check_mergeable(model, mesh)
    if (teacher := config.distillation.teacher) is not None:
        _check_mergeable(load_architecture(teacher), mesh, " of distillation.teacher")
    return Settings(config, dataset, data, mesh, tuple(lines))


def _check_split(model: LanguageModelConfig, data: DataSettings, mesh: Mesh) -> None:
    """Check that the mesh divides sequences and heads."""
    tensor, context = mesh.shape["tensor"], mesh.shape["context"]
    if model.num_heads % tensor:
        raise UserError(f"mesh.tensor={tensor} does not divide model.num_heads={model.num_heads}")
    if data.sequence_length % context:
        raise UserError(
            f"mesh.context={context} does not divide data.sequence_length={data.sequence_length}"
        )
    is_separate = isinstance(data, DataConfig) and data.documents == "separate"
    if context > 1 and is_separate and not model.is_causal:
        raise UserError(
            f"mesh.context={context}: documents of a bidirectional model cannot be separated in "
            "split sequences; use mesh.context=1, or set data.documents=continuous"
        )


def _check_mergeable(model: LanguageModelConfig, mesh: Mesh, owner: str = "") -> None:
    """Check that the mechanisms of a model run on split sequences."""
    if (context := mesh.shape["context"]) == 1:
        return
    for name, config in zip(model.layer_pattern, model.mechanisms(), strict=True):
        if not config.capabilities.mergeable:
            able = [name for name in names() if mechanism(name).capabilities.mergeable]
            raise UserError(
                f"mesh.context={context}: model.attention={name!r}{owner}, as configured, has no "
                f"states that merge, so sequences cannot be split; use mesh.context=1, or one of "
                f"{', '.join(able)} without a window"
            )


def _check_masked(model: LanguageModelConfig, training: TrainingConfig, dataset: Dataset) -> None:
    if dataset.has_labels:
        raise UserError(
            f"model.is_causal=False: {dataset.name} has labels, and masked tokens are predicted "
            "instead of labels; set it to True"
        )
    if model.vocab_size == (vocabulary := dataset.vocab_size):
        raise UserError(
            f"model.vocab_size={model.vocab_size} with model.is_causal=False leaves no id for the "
            f"mask token; make it at least {vocabulary + 1}"
        )
    if training.sample_tokens:
        raise UserError(
            "training.sample_tokens: a model with is_causal=False cannot generate; set it to 0"
        )


def check_workdir(workdir: Path, config: ExperimentConfig) -> None:
    """Check that a run may start or resume in a folder, before its data are loaded.

    Raises:
      UserError: the folder has a run of another task or with another architecture.
    """
    if (recorded := read_config(workdir)) is None:
        return
    ours = getattr(config.data, "task", "text")
    theirs = recorded["data"].get("task", "text")
    if ours != theirs:
        raise UserError(
            f"--workdir {workdir} contains a run trained on {theirs}, not {ours}; choose another "
            "folder"
        )
    try:
        model = pydantic.TypeAdapter(LanguageModelConfig).validate_python(recorded["model"])
    except ValueError as error:
        raise UserError(f"{workdir / CONFIG_FILE}: model.{explain(error)}") from None
    ours, theirs = (
        as_json(dataclasses.replace(config, model=x))["model"] for x in (config.model, model)
    )
    if differing := [
        f"model.{name} is {ours.get(name)!r} here, {theirs.get(name)!r} there"
        for name in sorted((ours.keys() | theirs.keys()) - NOT_ARCHITECTURE)
        if ours.get(name) != theirs.get(name)
    ]:
        raise UserError(
            f"--workdir {workdir} holds a run of another architecture ({'; '.join(differing)}); "
            "choose another folder, or the same architecture; --restart sets that run aside"
        )


def check_tokenizer(workdir: Path, config: ExperimentConfig, dataset: Dataset) -> None:
    """Check that a run in a folder has the tokenizer of the data.

    Raises:
      UserError: it has another one.
    """
    tokenizer = dataset.tokenizer
    if tokenizer is None or read_config(workdir) is None:
        return
    assert isinstance(config.data, DataConfig)
    theirs = load_tokenizer(workdir)
    if theirs.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"--workdir {workdir} holds a run with the tokenizer {theirs.name}, which differs from "
            f"data.tokenizer={config.data.tokenizer}; choose another folder, or its tokenizer"
        )


def check_changes(
    workdir: Path, config: ExperimentConfig, dataset: Dataset, *, allowed: bool
) -> list[str]:
    """Describe the differences between the current settings and a run's recorded settings.

    Args:
      workdir: the run's folder.
      config: the current settings.
      dataset: the current data set.
      allowed: whether changes that affect the result are allowed.

    Raises:
      UserError: such settings have changed, and `allowed` is false; the message names them.
    """
    if (recorded := read_config(workdir)) is None:
        return []
    ours, theirs = flat(as_json(config)), flat(recorded)
    if "data.documents" in ours:  # a run of an earlier version has no such field
        theirs.setdefault("data.documents", "continuous")
    changed = {
        name: f"{name} {value!r} (was {theirs[name]!r})"
        for name, value in ours.items()
        if name in theirs and value != theirs[name]
    }
    path = workdir / DATA_FILE
    if isinstance(dataset, TextDataset) and _differs(path, dataset.content):
        changed[CONTENT] = f"the content of data.corpus ({path} records the previous one)"
    refused = [line for name, line in changed.items() if _affects_result(name)]
    if refused and not allowed:
        raise UserError(
            f"--workdir {workdir} holds a run with other settings: {'; '.join(refused)}; restore "
            "them, give --allow-change to resume with the new ones, or --restart to begin again"
        )
    return [*changed.values()]


def _differs(path: Path, content: bytes) -> bool:
    """Whether a manifest exists and has other tokens."""
    return path.exists() and splits_of(path.read_bytes()) != splits_of(content)


def splits_of(content: bytes) -> JSON:
    """The shards with their hashes, from a manifest, or from all manifests of a mixture; None if
    damaged."""
    try:
        manifest = parse_json(content)
        by_name = manifest if "splits" not in manifest else {"": manifest}
        return {name: each["splits"] for name, each in by_name.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _affects_result(name: str) -> bool:
    """Whether a field, if changed, makes a resumed run differ from an uninterrupted one, or its
    losses incomparable."""
    section = name.partition(".")[0]
    if section in ("seed", "data", "optimizer", "distillation"):
        return name not in OWN_TO_A_HOST | {"data.verify", "data.test_lengths", "data.test_pairs"}
    return name in AFFECT_RESULT


def identity(config: ExperimentConfig, dataset: Dataset) -> dict[str, JSON]:
    """Named values that all processes of a run must share."""
    fields = flat(as_json(config))
    alike = {name: value for name, value in fields.items() if name not in OWN_TO_A_HOST}
    if isinstance(dataset, TextDataset):
        alike["the tokens of data.corpus"] = joint_hash(dataset.content.decode())[:12]
    sources = (sha256_of(path) for path in sorted(PACKAGE.rglob("*.py")))
    alike["the source of heinsen_jax"] = joint_hash(*sources)[:12]
    for library in ("jax", "jaxlib", "flax", "optax"):
        alike[library] = importlib.metadata.version(library)
    return alike


def record(workdir: Path, config: ExperimentConfig, dataset: Dataset) -> None:
    """Write the resolved configuration, the tokenizer and the manifest of the data, if any, into a
    run's folder.

    Raises:
      UserError: a file cannot be written.
    """
    with storage_errors(workdir):
        if dataset.tokenizer is not None:
            save_tokenizer(dataset.tokenizer, workdir)
        if isinstance(dataset, TextDataset):
            write_atomically(workdir / DATA_FILE, dataset.content)
        content = json.dumps(as_json(config), indent=2) + "\n"
        write_atomically(workdir / CONFIG_FILE, content.encode())
