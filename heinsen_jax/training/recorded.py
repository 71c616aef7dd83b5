"""The settings that the folder of a run records, and whether a run may resume with others."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pydantic

from heinsen_jax.data import DataConfig, Dataset, TextDataset, load_tokenizer, save_tokenizer
from heinsen_jax.errors import UserError, explain, parse_json
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.runs.record import CONFIG_FILE, DATA_FILE, read_config
from heinsen_jax.storage.files import storage_errors, write_atomically
from heinsen_jax.training.config import ExperimentConfig, as_json, flat
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
    "training.start",
    "training.z_loss",
}
"""Fields of training that, besides its length, affect the result of a run."""
CHANGE_STATE = {"optimizer.name", "optimizer.ema_decay", "distillation.trained"}
"""Fields that change which arrays the state of training has."""
CONTENT = "data.content"
MEASURED = {"training.evaluation_batches", "training.masked_fraction"}
"""Fields of training that change what a validation loss measures, as fields of data do."""


def check_workdir(workdir: Path, config: ExperimentConfig) -> None:
    """Check that a run may start or resume in a folder, before its data are loaded.

    Raises:
      UserError: the folder has a run of another task or with another architecture.
    """
    if (recorded := read_config(workdir)) is None:
        return
    task = getattr(config.data, "task", "text")
    recorded_task = recorded["data"].get("task", "text")
    if task != recorded_task:
        raise UserError(
            f"--workdir {workdir} contains a run trained on {recorded_task}, not {task}; choose "
            "another folder"
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
    changed = _changes(workdir, config, dataset)
    refused = [line for name, line in changed.items() if _affects_result(name)]
    if refused and not allowed:
        changes_state = not CHANGE_STATE.isdisjoint(changed)
        condition = ", if its checkpoints have the arrays of these" if changes_state else ""
        raise UserError(
            f"--workdir {workdir} holds a run with other settings: {'; '.join(refused)}; restore "
            f"them, give --allow-change to resume with the new ones{condition}, or --restart to "
            "begin again"
        )
    return [*changed.values()]


def losses_differ(workdir: Path, config: ExperimentConfig, dataset: Dataset) -> bool:
    """Whether validation losses cannot be compared with earlier ones of a recorded run."""
    return any(
        name in MEASURED or (name.startswith("data.") and _affects_result(name))
        for name in _changes(workdir, config, dataset)
    )


def _changes(workdir: Path, config: ExperimentConfig, dataset: Dataset) -> dict[str, str]:
    """Descriptions of the settings that differ from a run's recorded ones, by name."""
    if (recorded := read_config(workdir)) is None:
        return {}
    ours, theirs = (by_name(flat(x)) for x in (as_json(config), recorded))
    if "data.documents" in ours:  # a run of an earlier version has no such field
        theirs.setdefault("data.documents", "continuous")
    changed = {
        name: f"{name} {value!r} (was {theirs[name]!r})"
        for name, value in ours.items()
        if name in theirs and value != theirs[name]
    }
    path = workdir / DATA_FILE
    if has_changed(path, dataset):
        changed[CONTENT] = f"the content of data.corpus ({path} records the previous one)"
    return changed


def by_name(fields: dict[str, JSON]) -> dict[str, JSON]:
    """The fields with the corpora of mixtures, in their order, by name instead of path."""

    def named(weights: Any) -> list[tuple[str, float]]:
        return [(Path(corpus).name, weight) for corpus, weight in weights.items()]

    changed: dict[str, JSON] = {}
    if (mixture := fields.get("data.mixture")) is not None:
        changed["data.mixture"] = named(mixture)
    stages: Any = fields.get("data.mixture_stages", ())
    changed["data.mixture_stages"] = [(step, named(weights)) for step, weights in stages]
    return fields | {name: x for name, x in changed.items() if name in fields}


def has_changed(path: Path, dataset: Dataset) -> bool:
    """Whether a data set of text differs from a recorded manifest, or that is damaged. A single
    corpus may be one of a recorded mixture."""
    if not isinstance(dataset, TextDataset) or not path.exists():
        return False
    recorded, ours = splits_of(path.read_bytes()), splits_of(dataset.content)
    if [*ours] == [""]:
        return ours[""] not in recorded.values()
    return recorded != ours


def splits_of(content: bytes) -> dict[str, JSON]:
    """The shards of training and validation with their hashes, from a manifest, or from all
    manifests of a mixture; none if damaged."""
    try:
        manifest = parse_json(content)
        by_name = manifest if "splits" not in manifest else {"": manifest}
        return {
            name: {split: each["splits"][split] for split in ("train", "validation")}
            for name, each in by_name.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _affects_result(name: str) -> bool:
    """Whether a field, if changed, makes a resumed run differ from an uninterrupted one, or its
    losses incomparable."""
    section = name.partition(".")[0]
    if section in ("seed", "data", "optimizer", "distillation"):
        measured = {f"data.test_{name}" for name in ("lengths", "pairs", "examples")}
        return name not in OWN_TO_A_HOST | {"data.verify"} | measured
    return name in AFFECT_RESULT


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
