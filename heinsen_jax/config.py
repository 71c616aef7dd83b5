"""Configuration of an experiment: composed of its parts, loaded, overridden and recorded."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast, get_args

import pydantic
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from heinsen_jax.buckets import AnyPath, move
from heinsen_jax.data import (
    AnyDataConfig,
    DataConfig,
    Dataset,
    TextDataset,
    load_tokenizer,
    save_tokenizer,
)
from heinsen_jax.data.files import free_name, sha256_of, write_atomically, writing
from heinsen_jax.data.tokenizer_json import TOKENIZER_FILE
from heinsen_jax.data.tokenizers import has_name
from heinsen_jax.data.units import joint_hash
from heinsen_jax.errors import UserError, check_regular, explain, parse_json
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.layers import Pattern, parse_pattern, with_layers
from heinsen_jax.run_folder import CHECKPOINT_FOLDER, RunFolder
from heinsen_jax.sharding import MeshConfig
from heinsen_jax.suggestions import refusal
from heinsen_jax.training.checkpoint import (
    CONFIG_FILE,
    SAVED_FILE,
    SavedConfig,
    newest_saved,
    read_config,
)
from heinsen_jax.training.distillation import DistillationConfig
from heinsen_jax.training.optimizer import OptimizerConfig
from heinsen_jax.training.settings import TrainingConfig, plain_values
from heinsen_jax.typing import JSON, config_dataclass

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
SET_ASIDE = "before-restart"
RESTART_FILE = ".restart"
DATA_FILE = "data_manifest.json"
"""Manifest of the prepared data of a run."""

PACKAGE = Path(__file__).resolve().parent
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"
"""The shipped configurations: inside an installed package, beside it in a clone."""

COMMAND_LINE = ConstructorRegistry()
"""Rules by which tyro reads fields from the command line, besides its own."""

Kind = TypeVar("Kind")


@COMMAND_LINE.primitive_rule
def _attention(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Pattern] | None:
    """The rule for `model.attention`."""
    if field.type != get_args(Pattern)[0]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="MECHANISM[:OPTION=VALUE,...] ...",
        instance_from_str=parse_pattern,
        is_instance=lambda value: isinstance(value, str | Layers | tuple),
        str_from_instance=lambda value: [*map(str, value if isinstance(value, tuple) else [value])],
    )


@config_dataclass
class ExperimentConfig:
    """All settings of a run."""

    seed: int = 0
    """Seed of the initial weights, the order of the data, and samples."""
    model: LanguageModelConfig = LanguageModelConfig()
    data: AnyDataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    distillation: DistillationConfig = DistillationConfig()


def load_config(path: str | Path) -> ExperimentConfig:
    """Load an experiment from a Python file with `get_config()`, or from a run's config.json; with
    the tokenizer in the run's folder, unless it is one that is known by name.

    Args:
      path: path of the file, or name of a shipped configuration.

    Raises:
      UserError: the file does not exist, or a field is misspelled or has an invalid value.

    Examples:
      >>> load_config("quickstart").model.num_layers
      4
    """
    path = find_file(path, CONFIGS)
    if path.suffix != ".json":
        return run_file(path, "get_config", ExperimentConfig)
    try:
        values = parse_json(path.read_bytes())
        if isinstance(values, dict) and isinstance(values.get("model"), dict):
            values["model"] = with_layers(values["model"])
        config = pydantic.TypeAdapter(ExperimentConfig).validate_python(values)
    except ValueError as error:
        raise UserError(f"{path}: {explain(error)}") from error
    return _with_own_tokenizer(_in_range(config), path)


def _with_own_tokenizer(config: ExperimentConfig, path: Path) -> ExperimentConfig:
    """The configuration in a file, with the tokenizer of the file's folder, if that is of a run, in
    place of the path from which the run had it, which may not exist any more."""
    data, folder = config.data, path.absolute().parent
    is_of_run = path.name == CONFIG_FILE and (folder / TOKENIZER_FILE).exists()
    if not is_of_run or not isinstance(data, DataConfig) or has_name(data.tokenizer):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(data, tokenizer=str(folder)))


def find_file(path: str | Path, shipped: Path) -> Path:
    """The file of that path, or of that name in a shipped folder.

    Raises:
      UserError: neither exists, and the message lists the shipped names; or it is not a file.
    """
    by_name = {file.stem: file for file in sorted(shipped.glob("*.py"))}
    found = by_name.get(str(path), Path(path))
    check_regular(found)
    if not found.is_file():
        raise UserError(
            f"{path}: no such file; give an existing file or one of the names {', '.join(by_name)}"
        )
    return found


def override(config: ExperimentConfig, arguments: Sequence[str]) -> ExperimentConfig:
    """Replace fields of a configuration from `--section.field VALUE` arguments.

    Raises:
      UserError: a name is misspelled, or a value has the wrong type or is out of range.

    Examples:
      >>> override(ExperimentConfig(), ["--model.num-layers", "3"]).model.num_layers
      3
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            changed = tyro.cli(
                ExperimentConfig,
                default=config,
                args=list(arguments),
                config=(tyro.conf.AvoidSubcommands,),
                registry=COMMAND_LINE,
            )
    except ValueError as error:
        raise UserError(explain(error)) from error
    except SystemExit as ended:
        if not ended.code:
            print(said.getvalue())
            raise
        raise UserError(_refusal(config, ended.__context__, said.getvalue(), arguments)) from None
    return _in_range(changed)


def _in_range(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration, if JAX and NumPy can represent its integers.

    Raises:
      UserError: one of them is not.
    """
    for name, value in _flat(as_json(config)).items():
        limit = 2**63 if name == "seed" else 2**31
        if isinstance(value, int) and abs(value) >= limit:
            raise UserError(f"{name}={value} is out of range; give an integer below {limit:,}")
    return config


def _refusal(
    config: ExperimentConfig, error: BaseException | None, box: str, arguments: Sequence[str]
) -> str:
    """Describe in one line why tyro refused an argument, from its error or its printed box."""
    cause = error and (error.__cause__ or error.__context__)
    if isinstance(cause, pydantic.ValidationError):
        sections = (x.name for x in dataclasses.fields(config))
        by_class = {type(getattr(config, name)).__name__: name for name in sections}
        said = explain(cause, f"--{by_class.get(cause.title, cause.title)}")
        return re.sub(r"--[\w.]+", lambda flag: flag[0].replace("_", "-"), said)
    lines = [re.sub(r"[│╭╮╰╯─]|--{5,}", " ", line) for line in box.splitlines()]
    body = " ".join(" ".join(lines[1:]).split())  # below its title
    parts = "Perhaps you meant|Arguments similar to|Argument helptext|For full helptext"
    reason = re.split(rf" (?={parts})", body)[0].removeprefix("Error parsing ")
    return refusal(reason, _flat(as_json(config)), arguments)


def check_folder(run: RunFolder, *, restart: bool) -> None:
    """Check that a folder is new, empty or a run's, before anything is written into it.

    Raises:
      UserError: it has files of others, or checkpoints without `config.json`, unless they are set
        aside.
    """
    if not run.shared.is_dir():
        return
    try:
        if read_config(run.files) is not None:
            return
    except UserError:
        if not restart:
            raise
    newest = newest_saved(run.files / SAVED_FILE)
    steps = run.checkpoints.is_dir() and any(map(_is_step, run.checkpoints.iterdir()))
    if newest == 0 and not steps:  # a run that has begun, and was killed before its first update
        return
    if steps or newest is not None:
        if restart:
            return
        raise UserError(
            f"--workdir {run} has checkpoints without {CONFIG_FILE}, so the run's settings are "
            f"unknown; bring {CONFIG_FILE} back, or give --restart to set the run aside"
        )
    names = [path.name for path in run.shared.iterdir() if not _may_precede(path)]
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise UserError(
            f"--workdir {run} is not the folder of a run: it has {min(names)}{more}; give a new or "
            "an empty folder"
        )


def _is_step(path: AnyPath) -> bool:
    """Whether a path is the folder of a checkpoint, intact or set aside."""
    return path.name.removeprefix("damaged-").isdecimal()


def _may_precede(path: AnyPath) -> bool:
    """Whether a file or folder may be there before a run begins: a log to which its output is
    redirected, or what it writes before its record of the newest checkpoint."""
    name = path.name
    if name == CHECKPOINT_FOLDER:
        return not any(path.iterdir())
    is_log = name == "log.txt" or name.endswith((".log", ".out", ".err", ".partial"))
    return is_log or name.startswith((".", SET_ASIDE))


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
        as_json(config)["model"],
        as_json(dataclasses.replace(config, model=model))["model"],
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
    """Describe the differences between the current settings and those that a run recorded.

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
    ours, theirs = _flat(as_json(config)), _flat(recorded)
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
    refused = [said for name, said in changed.items() if _affects_result(name)]
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
    """The shards with their hashes in a manifest, or in those of a mixture; None if damaged."""
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


def set_aside(run: RunFolder) -> None:
    """Move the content of a run's folder into its subfolder `before-restart`.

    The file `.restart` names that folder meanwhile, so that `complete_restart` can end a move that
    was interrupted.
    """
    shared = run.shared
    paths = [path for path in shared.iterdir() if not path.name.startswith((".", SET_ASIDE))]
    intent = shared / RESTART_FILE
    if not (paths or intent.exists()):
        return
    with writing(run.files):
        if not intent.exists():
            intent.write_text(free_name(shared / SET_ASIDE).name)
        aside = shared / intent.read_text()
        aside.mkdir(exist_ok=True)
        for path in sorted(paths, key=lambda path: path.name == CONFIG_FILE):  # the settings last
            move(path, aside / path.name)
        for path in run.files.iterdir() if run.remote else ():  # copies of moved objects
            path.unlink()
        intent.unlink()


def complete_restart(run: RunFolder) -> None:
    """Complete a `set_aside` that was interrupted, if any."""
    if (run.shared / RESTART_FILE).exists():
        set_aside(run)


def identity(config: ExperimentConfig, dataset: Dataset) -> dict[str, JSON]:
    """Named values that all processes of a run must share."""
    fields = _flat(as_json(config))
    found = {name: value for name, value in fields.items() if name not in OWN_TO_A_HOST}
    if isinstance(dataset, TextDataset):
        found["the tokens of data.corpus"] = joint_hash(dataset.content.decode())[:12]
    sources = (sha256_of(path) for path in sorted(PACKAGE.rglob("*.py")))
    found["the source of heinsen_jax"] = joint_hash(*sources)[:12]
    for library in ("jax", "jaxlib", "flax", "optax"):
        found[library] = importlib.metadata.version(library)
    return found


def record(workdir: Path, config: ExperimentConfig, dataset: Dataset) -> None:
    """Write the resolved configuration, the tokenizer and the manifest of the data, if any, into a
    run's folder.

    Raises:
      UserError: the folder has a run with another tokenizer, model or task; or a file cannot be
        written.
    """
    check_workdir(workdir, config)
    check_tokenizer(workdir, config, dataset)
    with writing(workdir):
        if dataset.tokenizer is not None:
            save_tokenizer(dataset.tokenizer, workdir)
        if isinstance(dataset, TextDataset):
            write_atomically(workdir / DATA_FILE, dataset.content)
        content = json.dumps(as_json(config), indent=2) + "\n"
        write_atomically(workdir / CONFIG_FILE, content.encode())


def as_json(config: ExperimentConfig) -> SavedConfig:
    """Convert a configuration to nested dictionaries of plain values."""
    return cast(SavedConfig, plain_values(config))


def _flat(config: SavedConfig) -> dict[str, JSON]:
    """The fields of all sections, with names such as data.corpus."""
    found: dict[str, JSON] = {"seed": config["seed"]}
    for section, fields in config.items():
        if isinstance(fields, dict):
            found |= {f"{section}.{name}": value for name, value in fields.items()}
    return found


def run_file(path: Path, function: str, kind: type[Kind]) -> Kind:
    """Call a function of a Python file and check the type of its result.

    Raises:
      UserError: the file does not define the function, raises an error, or the result has another
        type.
    """
    if path.suffix != ".py":
        raise UserError(f"{path} must be a Python file, .py, that defines {function}()")
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"{path} defines no {function}()")
        returned = getattr(module, function)()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {explain(error)}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {explain(error)}") from error
    if not isinstance(returned, kind):
        raise UserError(
            f"{path}: {function}() must return {kind.__name__}, not {type(returned).__name__}"
        )
    return returned
