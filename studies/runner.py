"""Running a study: from its runs to its results and report. Finished runs are not repeated."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heinsen_jax import data
from heinsen_jax.data import AnyDataConfig
from heinsen_jax.errors import UserError, printable
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.storage.buckets import local_path
from heinsen_jax.storage.files import storage_errors
from heinsen_jax.storage.locks import locked
from heinsen_jax.training.settings import resolve_settings
from heinsen_jax.training.start import check_start
from studies.grid import Run, Study, describe
from studies.plots import draw
from studies.records import RunRecord, check_measured
from studies.report import paragraphs, plot_files
from studies.results import RESULTS_FILE, Recorded, best_of, results_of
from studies.runs import check_content, content_of, costs, folder_name
from studies.schedule import schedule

REPORT_FILE = "report.md"

Executor = Callable[[Sequence[Run], Callable[[Run], Path]], Iterable[tuple[Run, RunRecord]]]


def run_study(
    study: Study,
    output: Path,
    executor: Executor,
    report_only: bool = False,
    reuse: Sequence[Path] = (),
) -> None:
    """Run the unfinished runs of a study, and write its report.

    Tuned values are run with the first seed, as `search` says, and the best of each comparison with
    the other seeds, unless all of them diverged. The best are run again if their records have only
    the metric that selects, such as earlier ones, before the data had a test split.

    Args:
      study: the study.
      output: folder of the results, the report and the runs.
      executor: function of the runs and their folders that yields records as runs finish.
      report_only: whether to report on the finished runs only.
      reuse: folders of results of other studies; runs with the same settings are copied.

    Raises:
      UserError: the settings of a run are invalid, or an earlier run had other data or another
        teacher, before any run starts; another process runs this study; no comparison is finished;
        a folder to reuse has no results, or runs are reused by a report only.
    """
    if reuse and report_only:
        raise UserError("--reuse adds runs; leave out --report-only")
    others = [_of_other_study(folder) for folder in reuse]
    if not report_only:
        _check(study)
        for other in others:
            _check_content(study, other)
    local_path(output, "output")
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if report_only else locked(output):
        recorded = Recorded(output / RESULTS_FILE, read_only=report_only)
        runs = study.all_runs() if others else ()
        for other in others:
            recorded.reuse(other, runs)
        if not report_only:
            _check_content(study, recorded)
        _run_study(study, output, executor, report_only, recorded)


def _of_other_study(folder: Path) -> Recorded:
    if not (folder / RESULTS_FILE).exists():
        raise UserError(f"--reuse {folder}: {RESULTS_FILE} is missing; give the folder of a study")
    return Recorded(folder / RESULTS_FILE, read_only=True)


def _run_study(
    study: Study, output: Path, executor: Executor, report_only: bool, recorded: Recorded
) -> None:
    console = Console()
    with _progress(console) as progress:
        task = progress.add_task("")
        while True:
            first, others = schedule(study, recorded)
            selected = [run for runs in best_of(study, recorded) for run in runs]
            left = recorded.unfinished(first, study.selection_metric)
            left = left or recorded.unfinished(selected, study.metric)
            if report_only or not left:
                break
            runs = [*first, *others]
            completed = len(runs) - len(recorded.unfinished(runs))
            progress.update(task, total=len(runs), completed=completed)
            console.print(f"{len(left)} runs to do; each has a log.txt in its folder")
            for run, record in executor(left, lambda run: output / "runs" / folder_name(run)):
                recorded.add(run, record)
                progress.advance(task)
                outcome = record.get("failed") or f"{study.metric} {_metric(study, record):.4f}"
                line = printable(f"{describe(run.labels)}: {outcome}")
                console.print(line, highlight=False, markup=False)
    _report(study, output, [recorded.of(run) for run in (*first, *others)])
    console.print(printable(f"report: {output / REPORT_FILE}"), markup=False)


def _metric(study: Study, record: RunRecord) -> float:
    fields = ("metric", "selected_by", "reached")
    named = [(field, name) for field, name in study.named_metrics() if field in fields]
    check_measured(study.title, named, [record])
    return record.get("metrics", {})[study.metric]


def _check(study: Study) -> None:
    """Check the data and the settings of all runs."""
    datasets: dict[AnyDataConfig, data.Dataset] = {}
    models: set[LanguageModelConfig] = set()
    runs_by_fingerprint: dict[str, Run] = {}
    tested = [name for _, name in study.named_metrics() if name.startswith("test_")]
    if study.reached is not None and study.reached[0] in tested:
        raise UserError(
            f"reached of {study.title!r}: {study.reached[0]} is measured after training only; "
            "choose a metric of validation"
        )
    for run in study.all_runs():
        if twin := runs_by_fingerprint.get(run.fingerprint):
            raise UserError(f"{describe(run.labels)} is the same as {describe(twin.labels)}")
        runs_by_fingerprint[run.fingerprint] = run
        for config in run.stages:
            if config.data not in datasets:
                datasets[config.data] = data.load(config.data)
                _check_test(study, tested, config.data, datasets[config.data])
            try:
                resolve_settings(config, datasets[config.data])
                if (start := config.training.start) is not None:
                    check_start(config.model, start)
                if config.model not in models:
                    costs(config)  # creates the model without its weights
                    models.add(config.model)
            except (ValueError, NotImplementedError) as error:
                raise UserError(f"{describe(run.labels)}: {error}") from error


def _check_test(
    study: Study, metrics: Sequence[str], config: AnyDataConfig, dataset: data.Dataset
) -> None:
    """Check that the data of a run has the test split that metrics are measured on."""
    if dataset.has_test:
        dataset.held_out_rows(config, "test")
    elif metrics:
        raise UserError(
            f"{study.title}: {metrics[0]} needs a test split; set test_fraction of text or "
            "test_examples of a task in the data of the base"
        )


def _check_content(study: Study, recorded: Recorded) -> None:
    """Check that recorded runs had the current data and teachers."""
    contents: dict[tuple[AnyDataConfig, str | None, str | None], dict[str, str]] = {}
    for run in study.all_runs():
        if then := (recorded.of(run) or {}).get("content"):
            teaching, start = run.config.distillation, run.config.training.start
            files = run.config.data, teaching.teacher, start
            if files not in contents:
                contents[files] = content_of(run.config)
            check_content(then, contents[files], describe(run.labels))


def _report(study: Study, output: Path, records: Sequence[RunRecord | None]) -> None:
    """Write the report and its plots, given the records of all runs, None if unfinished."""
    results = results_of(study, output)
    for name, plot in plot_files(study).items():
        draw(study.title, plot, results).savefig(output / name, dpi=150)
    with storage_errors(output):
        (output / REPORT_FILE).write_text("\n\n".join(paragraphs(study, results, records)) + "\n")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("runs"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
