"""Evaluate a trained model on a validation split, or on tasks of the lm-evaluation-harness.

python -m heinsen_jax.evaluate --workdir runs/quickstart [--data CORPUS]
python -m heinsen_jax.evaluate --workdir runs/quickstart --tasks NAME ... [--include-path FOLDER]
"""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import tyro

from heinsen_jax import data as text
from heinsen_jax.config.load import load_config
from heinsen_jax.data import DataConfig, Dataset, TokenDataset, Tokenizer
from heinsen_jax.data.sources import DEFAULT_COLUMN
from heinsen_jax.data.text import load_text
from heinsen_jax.errors import UserError, command_line, printable
from heinsen_jax.generate.options import LATEST_HELP, WORKDIR_HELP, check_count
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.runs.folder import opened
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.compilation import cache_compilations
from heinsen_jax.runtime.signals import exit_immediately

DATA_HELP = (
    "a named corpus, a prepared folder or data with published splits, whose validation split is "
    "evaluated; or any other input of training, evaluated completely unless the run was trained on "
    "it; the run's data when None"
)


@command_line
def main() -> None:
    def run(
        workdir: Annotated[str, tyro.conf.arg(help=WORKDIR_HELP)],
        data: Annotated[str | None, tyro.conf.arg(help=DATA_HELP)] = None,
        sequence_length: Annotated[
            int | None, tyro.conf.arg(help="sequence length, in tokens; that of the run when None")
        ] = None,
        max_batches: Annotated[
            int | None, tyro.conf.arg(help="maximum number of batches; all when None")
        ] = None,
        text_column: Annotated[
            str | None, tyro.conf.arg(help="column of the texts of --data; `text` when None")
        ] = None,
        latest: Annotated[bool, tyro.conf.arg(help=LATEST_HELP)] = False,
        tasks: Annotated[
            tuple[str, ...],
            tyro.conf.arg(help="tasks of the lm-evaluation-harness, instead of --data"),
        ] = (),
        include_path: Annotated[
            Path | None, tyro.conf.arg(help="folder of YAML files with further tasks")
        ] = None,
        limit: Annotated[
            int | None, tyro.conf.arg(help="maximum number of examples per task; all when None")
        ] = None,
        num_fewshot: Annotated[
            int | None,
            tyro.conf.arg(help="number of examples in a prompt; that of each task when None"),
        ] = None,
        batch_size: Annotated[
            int | None, tyro.conf.arg(help="number of sequences per batch of tasks; 16 when None")
        ] = None,
        output: Annotated[
            Path | None, tyro.conf.arg(help="JSON file to which results of tasks are written")
        ] = None,
    ) -> None:
        """Evaluate a run's best checkpoint: loss, accuracy and bits per byte on text, or
        tasks of the lm-evaluation-harness."""
        of_text = {"--data": data, "--sequence-length": sequence_length}
        of_text |= {"--max-batches": max_batches, "--text-column": text_column}
        of_tasks = {"--include-path": include_path, "--limit": limit, "--output": output}
        of_tasks |= {"--num-fewshot": num_fewshot, "--batch-size": batch_size}
        for name, value in (of_text if tasks else of_tasks).items():
            if value is not None:
                kind = "is unsupported with" if tasks else "needs"
                raise UserError(f"{name} {value} {kind} --tasks; leave it out")
        if output is not None and not output.parent.is_dir():
            raise UserError(
                f"--output {output}: folder {output.parent} does not exist; create it first"
            )
        if output is not None and output.exists():
            raise UserError(f"--output {output} exists; give the name of a new file")
        if tasks:
            model: dict[str, str | bool | int] = {"workdir": workdir, "latest": latest}
            model["batch_size"] = batch_size or 16
            options = {"tasks": [*tasks], "limit": limit, "num_fewshot": num_fewshot}
            _run_tasks(model, options, include_path, output)
        else:
            _run_text(workdir, data, text_column, sequence_length, max_batches, latest)

    keep_freed_memory()
    cache_compilations()
    with exit_immediately():
        tyro.cli(run, prog="python -m heinsen_jax.evaluate")


def _run_text(
    workdir: str,
    data: str | None,
    text_column: str | None,
    sequence_length: int | None,
    max_batches: int | None,
    latest: bool,
) -> None:
    if text_column is not None and data is None:
        raise UserError(f"--text-column {text_column} needs --data; leave it out")
    check_count("--max-batches", max_batches)
    check_count("--sequence-length", sequence_length)
    model, tokenizer, step = load_run(workdir, best=not latest)
    if tokenizer is None and (data is not None or sequence_length is not None):
        raise UserError(
            f"{workdir} has a run that trained on a task, with its own lengths; leave out "
            "--data and --sequence-length"
        )
    with opened(workdir) as run:  # whose tokenizer prepares the data
        experiment = load_config(run.files / CONFIG_FILE)
        settings, is_other = experiment.data, False
        if isinstance(settings, DataConfig) and data is not None:
            settings, is_other = _of_data(settings, data, text_column or DEFAULT_COLUMN)
        if sequence_length is not None:
            settings = replace(settings, sequence_length=sequence_length)
        dataset = cast(Dataset, _all_of(settings) if is_other else text.load(settings))
    settings, documents = resolve_documents(settings, dataset, experiment.model)
    if isinstance(settings, DataConfig):
        _check_tokenizer(workdir, tokenizer, settings.corpus, dataset.tokenizer)
    model.config.warn_beyond_trained_length(settings.longest)
    metrics = evaluate_model(
        model,
        dataset,
        settings,
        masked_fraction=experiment.training.masked_fraction,
        loss_by_position=experiment.training.loss_by_position,
        max_batches=max_batches,
    )
    what = dataset.name
    if isinstance(dataset, TokenDataset) and isinstance(settings, DataConfig):
        split = dataset.manifest.splits["validation"]
        what = f"{settings.corpus}, {split.tokens:,} tokens"
        if dataset.manifest.split != "validation":
            what = f"the validation text of {what}"
    if max_batches is not None:
        what += f", of which the first {max_batches} batches"
    lines = [f"{workdir}, step {step}, on {what}:", *(f"  {line}" for line in documents)]
    lines += [f"  {name.replace('_', ' ')}: {value:.4f}" for name, value in metrics.items()]
    print("\n".join(map(printable, lines)))


def _of_data(settings: DataConfig, data: str, text_column: str) -> tuple[DataConfig, bool]:
    """The configuration of the data set of --data, and whether the run was not trained on it."""
    trained = [name for weights in settings.mixtures for name in weights] or [settings.corpus]
    own = next((name for name in trained if _same(data, name)), None)
    settings = replace(settings, corpus=own or data, mixture=None, mixture_stages=())
    if own is None:
        settings = replace(settings, validation_fraction=None, text_column=text_column)
    return settings, own is None


def _same(corpus: str, other: str) -> bool:
    """Whether these name the same corpus."""
    return corpus == other or (
        corpus not in text.CORPORA and Path(corpus).resolve() == Path(other).resolve()
    )


def _all_of(settings: text.AnyDataConfig) -> Dataset:
    """The data set of --data: a file or folder without splits is evaluated completely."""
    assert isinstance(settings, DataConfig)
    split = "auto" if settings.corpus in text.CORPORA else "validation"
    return load_text(settings, split=split)


def _check_tokenizer(
    workdir: str, ours: Tokenizer | None, corpus: str, theirs: Tokenizer | None
) -> None:
    if ours and theirs and ours.fingerprint != theirs.fingerprint:
        raise UserError(
            f"--data {corpus} was prepared with the tokenizer {theirs.name}, which differs from "
            f"that of {workdir}; prepare it with the latter"
        )


def _run_tasks(
    model: dict[str, str | bool | int],
    options: dict[str, list[str] | int | None],
    include_path: Path | None,
    output: Path | None,
) -> None:
    try:  # imported on request, since it is an extra
        harness = importlib.import_module("heinsen_jax.interop.harness")
    except ImportError as error:
        raise UserError(f"--tasks: {error}") from error
    results = harness.run_tasks(model, include_path=include_path, **options)
    print(printable(harness.table(results), lines=True))
    if output is not None:
        output.write_text(json.dumps(results["results"], indent=2, default=str) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
