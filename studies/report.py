"""The report of a study, in paragraphs of Markdown."""

from collections.abc import Mapping, Sequence

from studies.differences import (
    METHOD,
    SELECTION,
    difference_table,
    differences_of,
    remaining_differences,
)
from studies.grid import Study
from studies.plots import Plot
from studies.power_law import PowerLawPlot
from studies.records import (
    Comparison,
    RunRecord,
    check_measured,
    is_larger_better,
    markdown_table,
    table,
)


def plot_files(study: Study) -> dict[str, Plot]:
    """The plots of a study by the names of their files."""
    if len(study.plots) == 1:
        return {"report.png": study.plots[0]}
    return {f"report_{number}.png": plot for number, plot in enumerate(study.plots, 1)}


def paragraphs(
    study: Study, results: Sequence[Comparison], records: Sequence[RunRecord | None]
) -> list[str]:
    """The paragraphs of the report.

    Args:
      study: the study.
      results: its finished results.
      records: one per run, None if unfinished.

    Raises:
      UserError: no run has measured a metric that the study names.
    """
    measured = [record for result in results for record in result.records]
    check_measured(study.title, study.named_metrics(), measured)
    parts = [f"# {study.title}", study.about.strip()]
    parts += (f"![{study.title}]({name})" for name in plot_files(study))
    parts.append(table(results, study.metric, study.extra_metrics, study.reached))
    if len(study.axes.get(study.seeds, {})) > 1:
        parts.append(
            "Seeds differ in initial weights and in data; ± is half the range between the best "
            "and the worst."
        )
    parts += _tuning(study, results)
    if study.baseline is not None and (differences := differences_of(study, results)):
        parts.append(f"Differences from {study.baseline}, which is subtracted:")
        method = f"{METHOD} {SELECTION}" if {*study.tuned} & {*study.axes} else METHOD
        parts += [difference_table(differences), method]
        if any(x.p_value is not None for x in differences):
            parts.append(remaining_differences(differences))
    parts += _power_laws(study, results)
    finished = [record for record in records if record is not None]
    parts.append(f"{len(finished)} of {len(records)} runs, {_made(finished)}.")
    shown = [result.compared for result in results]
    every = [study.compared(run.labels) for run in study.first_seed_runs()]
    if left := dict.fromkeys(" ".join(x.values()) for x in every if x not in shown):
        parts.append(f"Not finished: {'; '.join(left)}.")
    return parts


def _tuning(study: Study, results: Sequence[Comparison]) -> list[str]:
    """Explain how tuned values were chosen, and name those at an end of their axis."""
    parts: list[str] = []
    tuned = {axis: [*study.axes[axis]] for axis in study.tuned if len(study.axes.get(axis, {})) > 1}
    if tuned:
        names = " and ".join(map(_words, tuned))
        chosen = f"Each row has the {names} that was the best with the first seed"
        if study.selection_metric != study.metric:
            chosen += f", by {_words(study.selection_metric)} of validation"
        if is_larger_better(study.selection_metric):
            chosen += " (the smallest loss decided between equals)"
        how = "all were run"
        if study.search == "neighbors":
            how = (
                f"of {', '.join(*tuned.values())}, a search ran neighbors of the best, from the "
                "middle or from earlier runs, until they were no better"
            )
        parts.append(f"{chosen}; {how}.")
    measured = [result for result in results if result.values(study.metric)]
    every = [run.labels for run in study.first_seed_runs()] if tuned else []
    for axis in tuned:
        at_ends, alone = ({label: [] for label in study.axes[axis]} for _ in range(2))
        for x in measured:
            row, best = f"`{' '.join(x.compared.values())}`", x.tuned[axis]
            labels = [*dict.fromkeys(y[axis] for y in every if x.compared.items() <= y.items())]
            if len(labels) == 1:
                alone[best].append(row)
            elif best in (labels[0], labels[-1]):
                at_ends[best].append(row)
        if any(alone.values()):
            parts.append(f"Rows with one {_words(axis)} only, without a search: {_by(alone)}.")
        if any(at_ends.values()):
            is_all = sum(map(len, at_ends.values())) == len(measured)
            parts.append(
                f"The best {_words(axis)} is the first or the last that was tried, so a better one "
                f"may exist, for {'all rows' if is_all else _by(at_ends)}."
            )
    return parts


def _by(rows: Mapping[str, Sequence[str]]) -> str:
    """Rows by the label of a tuned axis."""
    return "; ".join(f"{label}: {', '.join(names)}" for label, names in rows.items() if names)


def _power_laws(study: Study, results: Sequence[Comparison]) -> list[str]:
    """Tables of the exponents of power laws."""
    parts = []
    for plot in study.plots:
        if isinstance(plot, PowerLawPlot) and (fits := plot.fits(results)):
            cost = plot.cost_name(plot.x)
            parts.append(
                f"Power laws: {_words(plot.y)} proportional to ({cost})^(-b), fitted to the "
                "logarithms of the means over the seeds. Brackets are 95% confidence intervals of "
                "b, within the range of the plot, as if deviations of points from the line were "
                "independent."
            )
            columns = {"b": fits}
            if study.baseline is not None and study.baseline in fits:
                columns["difference"] = plot.differences(results, study.baseline)
                parts[-1] += (
                    f" Differences are exponents of losses relative to losses of {study.baseline}."
                )
            lines = [
                [label, *(str(column.get(label) or "") for column in columns.values())]
                for label in fits
            ]
            parts.append(markdown_table([plot.lines, *columns], lines))
    return parts


def _words(axis: str) -> str:
    return axis.replace("_", " ")


def _made(records: Sequence[RunRecord]) -> str:
    """Hardware, versions and commit of the runs."""
    made_on = [record["environment"] for record in records]
    platforms = {(x["cpu"] if x["backend"] == "cpu" else x["device"], x["jax"]) for x in made_on}
    commits = {x["commit"][:7] or "no commit" for x in made_on}
    changed = " with uncommitted changes" if any(x["uncommitted_changes"] for x in made_on) else ""
    on = "; ".join(f"{device}, JAX {version}" for device, version in sorted(platforms))
    return f"on {on}; at {', '.join(sorted(commits))}{changed}"
