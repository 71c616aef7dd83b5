"""From a study to its results and report: what is done is never done again."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heinsen_jax import data
from heinsen_jax.errors import UserError
from heinsen_jax.study.grid import Run, Study, describe
from heinsen_jax.study.report import Result, Row, draw, table
from heinsen_jax.study.runs import costs, folder_name
from heinsen_jax.training.settings import check_settings

RESULTS_FILE = "results.jsonl"
REPORT_FILE = "report.md"
PLOT_FILE = "report.png"

Executor = Callable[[Sequence[Run], Callable[[Run], Path]], Iterable[tuple[Run, Row]]]


def conduct(study: Study, output: Path, executor: Executor, report_only: bool = False) -> None:
    """Does the runs of a study that are not done yet, and writes its report.

    All tuned choices are run with the first seed; the best of each comparison with the others,
    unless all of them diverged.

    Args:
      study: what to do.
      output: the folder of results and report; runs have folders of their own in it.
      executor: does runs, given them and the folder of each, and yields rows as they end.
      report_only: whether to do none, and report on those that are done.

    Raises:
      UserError: a run's settings do not fit, before any is begun; or nothing is done to report on.
    """
    first = study.first()
    if not report_only:
        _check(first)
    output.mkdir(parents=True, exist_ok=True)
    results = _Results(output / RESULTS_FILE)
    console, expected = Console(), len(first) + len(_groups(study, first)) * _more_seeds(study)
    with _progress(console) as progress:
        task = progress.add_task("", total=expected)

        def do(runs: Sequence[Run]) -> None:
            left = [run for run in runs if results.of(run) is None and not report_only]
            progress.advance(task, len(runs) - len(left))
            if not left:
                return
            for run, row in executor(left, lambda run: output / "runs" / folder_name(run)):
                results.add(run, row)
                progress.advance(task)
                said = row.get("failed") or f"{study.metric} {row['metrics'][study.metric]:.4f}"
                console.print(f"{describe(run.labels)}: {said}", highlight=False, markup=False)

        do(first)
        best = [_best(study, runs, results) for runs in _groups(study, first)]
        good = [run for run in best if "metrics" in (results.of(run) or {})]
        do([other for run in good for other in study.then(run.labels)])
    _report(study, output, expected=len(best) * (1 + _more_seeds(study)))
    console.print(f"report: {output / REPORT_FILE}")


def results_of(study: Study, output: Path) -> list[Result]:
    """What is done of a study: the best of each comparison, with all its seeds.

    Raises:
      UserError: nothing is.
    """
    results = _Results(output / RESULTS_FILE)
    best = [_best(study, runs, results) for runs in _groups(study, study.first())]
    found = [_result(study, run, results) for run in best]
    if done := [result for result in found if result is not None]:
        return done
    raise UserError(f"{output / RESULTS_FILE}: no run of this study is done yet")


class _Results:
    """The lines of a results file, by what decides a run."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, {}
        text = path.read_text() if path.exists() else ""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                if text.endswith("\n") or number < len(text.splitlines()):
                    raise UserError(f"{path}, line {number}, is damaged: remove it") from None
                path.write_text(text[: text.rfind("\n") + 1])  # cut short as it was written
                break
            self._rows[row["fingerprint"]] = row

    def of(self, run: Run) -> Row | None:
        return self._rows.get(run.fingerprint)

    def add(self, run: Run, row: Row) -> None:
        row = {"labels": run.labels, "fingerprint": run.fingerprint, **row}
        self._rows[run.fingerprint] = row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _check(runs: Sequence[Run]) -> None:
    """That data can be had, and that all settings fit."""
    datasets: dict[Any, Any] = {}
    seen: dict[str, Run] = {}
    for run in runs:
        config = run.config
        if twin := seen.get(run.fingerprint):
            raise UserError(f"{describe(run.labels)} is the same as {describe(twin.labels)}")
        seen[run.fingerprint] = run
        if config.data not in datasets:
            datasets[config.data] = data.load(config.data)
        try:
            check_settings(datasets[config.data], config)
            costs(config)
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"{describe(run.labels)}: {error}") from error


def _groups(study: Study, runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in what is tuned alone."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(study.compared(run.labels).values()), []).append(run)
    return list(groups.values())


def _more_seeds(study: Study) -> int:
    return max(len(study.axes.get(study.seeds, {})) - 1, 0)


def _best(study: Study, runs: Sequence[Run], results: _Results) -> Run:
    sign = 1 if study.better == "more" else -1

    def goodness(run: Run) -> float:
        row = results.of(run) or {}
        value = row.get("metrics", {}).get(study.metric)
        return float("-inf") if value is None else sign * value

    return max(runs, key=goodness)


def _result(study: Study, best: Run, results: _Results) -> Result | None:
    """Of the best run and the same with other seeds; None if it is not done."""
    tuned = {axis: best.labels[axis] for axis in study.tuned if axis in best.labels}
    rows = [results.of(run) for run in (best, *study.then(best.labels))]
    done = [row for row in rows if row is not None]
    return Result(study.compared(best.labels), tuned, done) if done else None


def _report(study: Study, output: Path, expected: int) -> None:
    done = results_of(study, output)
    environments = [row["environment"] for result in done for row in result.rows]
    places = {(x["cpu"] if x["backend"] == "cpu" else x["device"], x["jax"]) for x in environments}
    commits = {x["commit"][:7] for x in environments}
    parts = [
        f"# {study.title}",
        study.about.strip(),
        table(done, study.metric, study.shown),
        "Seeds differ in first weights and in data; ± is half of what lies between the best and "
        f"the worst. {len(environments)} of {expected} runs, on "
        + "; ".join(f"{device}, JAX {version}" for device, version in sorted(places))
        + f"; at {', '.join(sorted(commits))}.",
    ]
    if study.plots:
        draw(study.plots, done).savefig(output / PLOT_FILE, dpi=110)
        parts.insert(2, f"![{study.title}]({PLOT_FILE})")
    (output / REPORT_FILE).write_text("\n\n".join(parts) + "\n")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("runs"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
