"""Evaluate a trained model on held-out text, or on tasks of the lm-evaluation-harness.

python -m heinsen_jax.evaluate --workdir runs/quickstart [--data CORPUS]
python -m heinsen_jax.evaluate --workdir runs/quickstart --tasks NAME ... [--include-path FOLDER]
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

from heinsen_jax import data as text
from heinsen_jax.config.load import load_config
from heinsen_jax.data import DataConfig, Dataset, Tokenizer
from heinsen_jax.data.sources import DEFAULT_COLUMN, HeldOut
from heinsen_jax.errors import (
    MissingExtra,
    UserError,
    command_line,
    extra_module,
    printable,
    without_extra,
)
from heinsen_jax.generate.options import check_count
from heinsen_jax.runs.folder import open_run
from heinsen_jax.runs.load import InferenceOptions, load_run
from heinsen_jax.runs.record import CONFIG_FILE, DATA_FILE
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.arguments import parse
from heinsen_jax.runtime.compilation import cache_compilations
from heinsen_jax.runtime.signals import exit_immediately
from heinsen_jax.typing import config_dataclass

try:
    from heinsen_jax.data.mixture import of_corpus
    from heinsen_jax.data.text import TokenDataset, load_text
    from heinsen_jax.objectives.documents import resolve_documents
    from heinsen_jax.objectives.evaluation import evaluate_model, in_microbatches
    from heinsen_jax.training.recorded import has_changed
except ImportError as missing:
    raise without_extra(missing, __name__) from missing


@config_dataclass
class Options(InferenceOptions):
    """Evaluate a run's best checkpoint: loss, accuracy and bits per byte on text, or tasks of the
    lm-evaluation-harness."""

    data: str | None = None
    """A named corpus, a prepared folder or data with published splits, of which a split is
    evaluated; or any other input of training, evaluated completely unless the run was trained on
    it; the run's data when None."""
    split: HeldOut | None = None
    """Split to evaluate; validation when None. Data has a test split if it is published, or with
    `data.test_fraction` or `data.test_examples`."""
    sequence_length: int | None = None
    """Sequence length, in tokens; the run's when None."""
    max_batches: int | None = None
    """Maximum number of batches, of --batch-size or else of an update; all when None."""
    text_column: str | None = None
    """Column of the texts of --data; `text` when None."""
    tasks: tuple[str, ...] = ()
    """Tasks of the lm-evaluation-harness, instead of --data."""
    include_path: Path | None = None
    """Folder of YAML files with further tasks."""
    limit: int | None = None
    """Maximum number of examples per task; all when None."""
    num_fewshot: int | None = None
    """Number of examples in a prompt; set by each task when None."""
    batch_size: int | None = None
    """Number of sequences per batch; when None, as many as in a microbatch of training, or 16 for
    tasks."""
    output: Path | None = None
    """JSON file to which results of tasks are written."""


@command_line
def main() -> None:
    keep_freed_memory()
    cache_compilations()
    with exit_immediately():
        _evaluate(parse(Options, prog="python -m heinsen_jax.evaluate", description=__doc__))


def _evaluate(options: Options) -> None:
    output = options.output
    of_text = "data", "split", "sequence_length", "max_batches", "text_column"
    of_tasks = "include_path", "limit", "output", "num_fewshot"
    for name in of_text if options.tasks else of_tasks:
        if (value := getattr(options, name)) is not None:
            kind = "is unsupported with" if options.tasks else "needs"
            raise UserError(f"--{name.replace('_', '-')} {value} {kind} --tasks; leave it out")
    if output is not None and not output.parent.is_dir():
        raise UserError(
            f"--output {output}: folder {output.parent} does not exist; create it first"
        )
    if output is not None and output.exists():
        raise UserError(f"--output {output} exists; give the name of a new file")
    if options.tasks:
        _run_tasks(options)
    else:
        _run_text(options)


def _run_text(options: Options) -> None:
    workdir, data, sequence_length = options.workdir, options.data, options.sequence_length
    text_column, max_batches = options.text_column, options.max_batches
    name = options.split or "validation"
    if text_column is not None and data is None:
        raise UserError(f"--text-column {text_column} needs --data; leave it out")
    check_count("--max-batches", max_batches)
    check_count("--sequence-length", sequence_length)
    check_count("--batch-size", options.batch_size)
    model, tokenizer, step = load_run(workdir, best=not options.latest, precision=options.model)
    if tokenizer is None and (data is not None or sequence_length is not None):
        raise UserError(
            f"{workdir} has a run that trained on a task, with its own lengths; leave out "
            "--data and --sequence-length"
        )
    with open_run(workdir) as run:  # whose tokenizer prepares the data
        experiment = load_config(run.files / CONFIG_FILE)
        settings, is_other = experiment.data, False
        if isinstance(settings, DataConfig) and data is not None:
            settings, is_other = _of_data(settings, data, text_column or DEFAULT_COLUMN)
        if sequence_length is not None:
            settings = replace(settings, sequence_length=sequence_length)
        if (rows := options.batch_size) is None:
            steps, is_causal = experiment.training.accumulation_steps, model.config.is_causal
            given = settings.batch_size, max_batches, steps
            rows, max_batches = in_microbatches(*given, is_causal=is_causal)
        settings = replace(settings, batch_size=rows)
        dataset = cast(Dataset, _all_of(settings) if is_other else text.load(settings))
        if not is_other and has_changed(run.files / DATA_FILE, dataset):
            raise UserError(
                f"{workdir}: the content of its data has changed since training, so that the "
                f"{name} split may have text of training; restore it, or give the text that is to "
                "be evaluated by --data"
            )
    settings, documents = resolve_documents(settings, dataset, experiment.model)
    if isinstance(settings, DataConfig):
        _check_tokenizer(workdir, tokenizer, settings.corpus, dataset.tokenizer)
    limit = model.config.max_length
    if limit is not None and settings.longest > limit:
        raise UserError(
            f"sequences of {settings.longest} tokens exceed model.max_length={limit}; give a "
            "smaller --sequence-length"
        )
    model.config.warn_beyond_trained_length(settings.longest)
    metrics = evaluate_model(
        model,
        dataset,
        settings,
        masked_fraction=experiment.training.masked_fraction,
        split=name,
        loss_by_position=experiment.training.loss_by_position,
        max_batches=max_batches,
    )
    what = f"the {name} split of {dataset.name}"
    if isinstance(dataset, TokenDataset) and isinstance(settings, DataConfig):
        split = dataset.manifest.splits[name]
        what = f"{settings.corpus}, {split.tokens:,} tokens"
        if dataset.manifest.split != "validation":
            what = f"the {name} text of {what}"
    if options.max_batches is not None:
        what += f", of which the first {options.max_batches} batches"
    lines = [f"{workdir}, step {step}, on {what}:", *(f"  {line}" for line in documents)]
    lines += [f"  {name.replace('_', ' ')}: {value:.4f}" for name, value in metrics.items()]
    print("\n".join(map(printable, lines)))


def _of_data(settings: DataConfig, data: str, text_column: str) -> tuple[DataConfig, bool]:
    """The configuration of the data set of --data, and whether the run was not trained on it."""
    trained = [name for weights in settings.mixtures for name in weights] or [settings.corpus]
    own = next((name for name in trained if _same(data, name)), None)
    if own is not None:
        return of_corpus(settings, own) if settings.mixtures else settings, False
    settings = replace(settings, corpus=data, mixture=None, mixture_stages=())
    settings = replace(
        settings, validation_fraction=None, test_fraction=0.0, text_column=text_column
    )
    return settings, True


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
            f"--data {corpus} was prepared with the tokenizer {theirs.name}, and {workdir} has "
            f"another; prepare the data with the run's tokenizer"
        )


def _run_tasks(options: Options) -> None:
    for option in ("limit", "batch_size"):
        check_count(f"--{option.replace('_', '-')}", getattr(options, option))
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UserError(f"--num-fewshot {options.num_fewshot} must not be negative; give 0 or more")
    try:  # imported on request, since it is an extra
        harness = extra_module("heinsen_jax.interop.harness")
    except MissingExtra as error:
        raise UserError(f"--tasks: {error}") from error
    model = {"workdir": options.workdir, "latest": options.latest} | vars(options.model)
    results = harness.run_tasks(
        model | {"batch_size": options.batch_size or 16},
        tasks=[*options.tasks],
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        include_path=options.include_path,
    )
    table = extra_module("lm_eval.utils").make_table(results)
    if options.output is not None:  # before printing, which a closed pipe or terminal may end
        options.output.write_text(json.dumps(results["results"], indent=2, default=str) + "\n")
    print(printable(table, lines=True))


if __name__ == "__main__":
    raise SystemExit(main())
