"""Models in the format of the Hugging Face Hub: save, load, and push with a model card.

    python -m heinsen_jax.interop.hub save --workdir runs/quickstart --output models/quickstart
    python -m heinsen_jax.interop.hub push --workdir runs/quickstart --repo-id me/quickstart

A model folder has the run's config.json, model.safetensors (or shards and their index), the
tokenizer, and README.md, the model card. `heinsen_jax.generate` and `heinsen_jax.evaluate` accept
it as `--workdir`. Needs `pip install 'heinsen_jax[hub]'`.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
from flax import nnx

from heinsen_jax.data.config import MODEL
from heinsen_jax.data.tokenizer_protocol import TOKENIZER_FILE, Tokenizer, has_name
from heinsen_jax.errors import UserError, command_line, parse_json, printable, without_extra
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.folder import open_run
from heinsen_jax.runs.load import ModelOptions, load_run
from heinsen_jax.runs.metrics_file import METRICS_FILE, read_evaluations
from heinsen_jax.runs.record import CONFIG_FILE, Sections, read_config
from heinsen_jax.runs.weights import SHARD_BYTES, check_finite, has_weights, save_weights
from heinsen_jax.runtime.arguments import parse_command
from heinsen_jax.storage.buckets import local_path
from heinsen_jax.storage.files import check_new_folder, filling
from heinsen_jax.typing import JSON, Array, config_dataclass

try:
    from huggingface_hub import EvalResult, HfApi, ModelCardData, snapshot_download

    from heinsen_jax.data import save_tokenizer
except ImportError as missing:
    raise without_extra(missing, __name__) from missing

__all__ = ["card", "from_pretrained", "push", "save_pretrained"]

CARD_FILE = "README.md"
FETCHED = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", METRICS_FILE]


def save_pretrained(
    workdir: str | Path,
    output: str | Path,
    *,
    best: bool = True,
    shard_bytes: int = SHARD_BYTES,
    repo_id: str | None = None,
) -> Path:
    """Write a run's best (or latest) checkpoint to the folder `output`, and return the folder. The
    card shows how to load it from `repo_id`.

    Raises:
      UserError: the run does not exist; the folder is not empty; or it cannot be written.
    """
    output = local_path(output, "output")
    check_new_folder(output)
    with open_run(workdir) as run:
        model, tokenizer, step = load_run(str(run), best=best, on_host=True)
        arrays = flatten_with_names(nnx.state(model, nnx.Param))
        with filling(output) as partial:
            save_weights(partial, arrays, step=step, shard_bytes=shard_bytes)
            if tokenizer is not None:
                save_tokenizer(tokenizer, partial)
            config = _without_paths(parse_json((run.files / CONFIG_FILE).read_bytes()))
            content = json.dumps(config, indent=2) + "\n"
            (partial / CONFIG_FILE).write_text(content, encoding="utf-8")
            if (run.files / METRICS_FILE).exists():
                shutil.copyfile(run.files / METRICS_FILE, partial / METRICS_FILE)
            name = output.name if output.is_absolute() else str(output)
            text = card(run.files, step, arrays, repo_id or name)
            (partial / CARD_FILE).write_text(text, encoding="utf-8")
    return output


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Remove this machine's folders from the paths in a configuration; the tokenizer is the file
    beside it."""

    def plain(value: Any) -> Any:
        match value:
            case str(path) if "/" in path and "://" not in path:
                return Path(path).name
            case dict(fields):
                return {plain(name): plain(x) for name, x in fields.items()}
            case [*several]:
                return [plain(x) for x in several]
        return value

    kept = {k: v for k, v in config["data"].items() if k == "text_column"}  # no path
    config |= {name: plain(config[name]) for name in ("data", "distillation") if name in config}
    config["data"] |= kept
    if "training" in config:
        config["training"] |= {"compilation_cache": None, "start": None}
    if "tokenizer" in config["data"] and not has_name(config["data"]["tokenizer"]):
        config["data"]["tokenizer"] = TOKENIZER_FILE
    return config


def from_pretrained(
    name: str | Path, *, revision: str | None = None, allow_nonfinite: bool = False
) -> tuple[LanguageModel, Tokenizer | None]:
    """Load the model and its tokenizer from a folder or a repository of the hub.

    Args:
      name: a model folder, a run's folder, or `owner/name`.
      revision: branch, tag or commit of the repository.
      allow_nonfinite: whether weights may be NaN or infinite.

    Raises:
      UserError: neither a folder nor a repository of this name exists; or a weight is NaN or
        infinite.
    """
    folder = name if Path(name).is_dir() else download(str(name), revision, FETCHED)
    model, tokenizer, _ = load_run(folder)
    if not allow_nonfinite:
        for path, value in flatten_with_names(nnx.state(model, nnx.Param)).items():
            check_finite(value, path, Path(folder), "set allow_nonfinite=True to load it")
    return model, tokenizer


def download(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download files of a repository of the hub, unless they are in its cache; return their folder.

    Args:
      name: `owner/name`.
      revision: branch, tag or commit.
      files: patterns of names.

    Raises:
      UserError: no such repository exists, or it cannot be downloaded.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files]))
    except Exception as error:  # error classes differ between versions of its client
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise UserError(
            f"{name} is not a local folder, and could not be downloaded as a repository of the "
            f"hub ({type(error).__name__}: {reason}); give a folder, or owner/name; try again "
            "after a lost connection; for a private one, log in with `hf auth login`"
        ) from error


def push(
    workdir: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    best: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Upload a run, or a folder that `save_pretrained` wrote, to a repository of the hub, which is
    created if needed; return its URL.

    Raises:
      UserError: the run does not exist; or the upload fails, for example without `hf auth login`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        saved, folder = Path(workdir).resolve(), Path(temporary) / "model"
        if has_weights(saved) and (saved / CARD_FILE).exists():
            shutil.copytree(saved, folder, copy_function=os.symlink)
            text = (saved / CARD_FILE).read_text(encoding="utf-8")
            call = LOADS + json.dumps(repo_id) + ")"  # in place of the folder's name
            text = re.sub(rf"^{re.escape(LOADS)}.*$", lambda _: call, text, flags=re.MULTILINE)
            (folder / CARD_FILE).unlink()
            (folder / CARD_FILE).write_text(text, encoding="utf-8")
        else:
            save_pretrained(workdir, folder, best=best, shard_bytes=shard_bytes, repo_id=repo_id)
        hub = HfApi()
        try:
            address = hub.create_repo(repo_id, private=private, exist_ok=True)
            hub.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=[*FETCHED, CARD_FILE],
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],  # earlier weights
                commit_message="A model of heinsen_jax",
            )
        except Exception as error:  # error classes differ between versions of its client
            reason = next(iter(str(error).splitlines()), "no reason given")
            raise UserError(
                f"{repo_id} could not be uploaded ({type(error).__name__}: {reason}); check the "
                "network, and log in with `hf auth login` as a user with write access"
            ) from error
    return str(address)


LOADS = "model, tokenizer = from_pretrained("
"""Start of the line of a card that loads the model."""
CARD = """---
{header}
---

# {title}

{origin}

| | |
|---|---|
{settings}

## Results

{results}

## Use

```python
from heinsen_jax.interop.hub import from_pretrained

{loads}{name})
```

or, with a copy of this folder, {commands}.

## Limits

The model reproduces its training data; nothing was done to make its output true or harmless.

## Cite

Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
"""


TRAINED = """A model trained with heinsen_jax. All of its settings are in
[config.json](config.json): `python -m heinsen_jax.train --config config.json` repeats the run."""
DISTILLED = """A model trained with heinsen_jax to imitate {source}, from whose weights it starts.
The settings of its training are in [config.json](config.json)."""
TUNED = """The weights of {source}, trained further with heinsen_jax. The settings of this training
are in [config.json](config.json)."""
IMPORTED = """The weights of {source}, converted by heinsen_jax and not trained further. The
architecture is in [config.json](config.json)."""


class _Origin(NamedTuple):
    """The origin of a model's weights.

    Attributes:
      text: a sentence for the card.
      is_trained: whether this package has trained them.
      base: the model of the hub that they are derived from, if it is known.
    """

    text: str
    is_trained: bool
    base: str | None = None


def _origin(config: Sections) -> _Origin:
    sources = ("distillation", "teacher", DISTILLED), ("training", "start", TUNED)
    for section, field, text in sources:
        if folder := config.get(section, {}).get(field):
            with open_run(str(folder)) as run:
                source_config = read_config(run.files)
            base = None if source_config is None else _origin(source_config).base
            source = _markdown(base or Path(str(folder)).name)
            return _Origin(text.format(source=source), True, base)
    name = str(config["data"].get("corpus"))
    if not name.startswith(MODEL):
        return _Origin(TRAINED, True)
    name = name.removeprefix(MODEL)
    base = name if "/" in name else None
    return _Origin(IMPORTED.format(source=_markdown(name)), False, base)


def card(workdir: Path, step: int, arrays: dict[str, Array], name: str) -> str:
    """Return the model card: architecture, training, results, and use by that name."""
    config = read_config(workdir)
    assert config is not None
    model = pydantic.TypeAdapter(LanguageModelConfig).validate_python(config["model"])
    data = config["data"]
    is_text = "corpus" in data
    later = [name for _, weights in data.get("mixture_stages", ()) for name in weights]
    sources = dict.fromkeys([*(data.get("mixture") or ()), *later]) or [str(data.get("corpus"))]
    source = " + ".join(Path(x).name for x in sources) if is_text else str(data["task"])
    origin = _origin(config)
    source, title = " ".join(source.split()), " ".join(workdir.resolve().name.split())
    settings = {
        "parameters": f"{sum(x.size for x in arrays.values()):,}",
        "attention": ", ".join(model.layer_pattern),
        "layers": model.num_layers,
        "width": model.model_dim,
        "heads": model.num_heads,
        "vocabulary": f"{model.vocab_size:,}",
    }
    if origin.is_trained:
        settings |= {
            "data": _markdown(source),
            "sequence length": data.get("sequence_length"),
            "batch size": data["batch_size"],
            "steps": f"{step:,} of {config['training']['steps']:,}",
            "maximum learning rate": config["optimizer"]["learning_rate"],
        }
    metrics = read_evaluations(workdir).get(step, {})
    writes = is_text and model.is_causal
    commands = "`python -m heinsen_jax.evaluate --workdir FOLDER`"
    if writes:
        commands = f"`python -m heinsen_jax.generate --workdir FOLDER --prompt TEXT` and {commands}"
    header = ModelCardData(
        library_name="heinsen_jax",
        pipeline_tag="text-generation" if writes else None,
        tags=["jax", "flax", "heinsen_jax", f"{settings['attention']}-attention"],
        base_model=origin.base,
        model_name=title if metrics else None,
        eval_results=[_result(source, *metric) for metric in metrics.items()] or None,
    )
    return CARD.format(
        header=header.to_yaml(),
        title=_markdown(title),
        origin=origin.text,
        settings=_rows(settings),
        results=_results(metrics, config.get("training", {}).get("evaluation_batches")),
        loads=LOADS,
        name=json.dumps(name),
        commands=commands,
    )


def _result(source: str, name: str, value: float) -> EvalResult:
    """A measurement, as the hub lists it."""
    return EvalResult(
        task_type="text-generation",
        dataset_type=source,
        dataset_name=source,
        metric_type=name,
        metric_value=round(value, 4),
    )


def _results(metrics: dict[str, float], batches: JSON) -> str:
    """Return the metrics as a Markdown table, with the part of the data that was measured."""
    if not metrics:
        return "Not measured."
    rows = _rows({name.replace("_", " "): f"{x:.4f}" for name, x in metrics.items()})
    part = f"\n\nMeasured on the first {batches} batches of the validation text."
    part = "" if batches is None else part
    return f"| | validation |\n|---|---|\n{rows}{part}"


def _rows(values: Mapping[str, JSON]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in values.items())


def _markdown(text: str) -> str:
    """Escape text for Markdown."""
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", text)


@config_dataclass
class SaveOptions(ModelOptions):
    """Save a run's model in the format of the hub."""

    output: Path
    """A new or empty folder."""


@config_dataclass
class PushOptions(ModelOptions):
    """Upload a run's model, or a saved one, to the hub."""

    repo_id: str
    """Repository of the hub, as owner/name."""
    private: bool = False
    """Create it as a private repository, if it does not exist."""


@command_line
def main() -> None:
    commands = {"save": SaveOptions, "push": PushOptions}
    prog = "python -m heinsen_jax.interop.hub"
    match parse_command(commands, prog=prog, description=__doc__):
        case SaveOptions() as options:
            folder = save_pretrained(options.workdir, options.output, best=not options.latest)
            print(printable(f"saved in {folder}"))
        case PushOptions() as options:
            private, best = options.private, not options.latest
            address = push(options.workdir, options.repo_id, private=private, best=best)
            print(printable(f"pushed to {address}"))


if __name__ == "__main__":
    raise SystemExit(main())
