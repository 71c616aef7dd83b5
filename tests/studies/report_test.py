"""Results compared in a table."""

from dataclasses import replace
from pathlib import Path

import pytest

from heinsen_jax.errors import UserError
from studies import (
    Comparison,
    Points,
    PowerLawPlot,
    Ranking,
    load_study,
    results_of,
)
from studies.records import table
from studies.report import paragraphs, plot_files
from studies.results import RESULTS_FILE, Recorded
from studies.schedule import schedule
from tests.studies.small import PLAIN

STUDIES = sorted((Path(__file__).resolve().parents[2] / "benchmarks/results/studies").iterdir())
COSTS = {"parameters": 10, "state_bytes": 20}


def row(accuracies: tuple[float, ...] | None) -> dict:
    """Record of a run that was evaluated every 1000 updates."""
    if accuracies is None:  # of an earlier version
        return {"metrics": {"loss": 1.0, "accuracy": 1.0}, **COSTS}
    curve = {
        str(1000 * place): {"loss": 1 - x, "accuracy": x} for place, x in enumerate(accuracies, 1)
    }
    return {"metrics": curve[str(1000 * len(accuracies))], "curve": curve, **COSTS}


def comparison(name: str, *accuracies: tuple[float, ...] | None) -> Comparison:
    return Comparison({"mechanism": name}, {}, [row(x) for x in accuracies])


@pytest.mark.parametrize("reached", [("accuracy", 0.9), ("loss", 0.1)])
def test_updates_are_counted_until_the_first_evaluation_that_is_as_good(reached):
    results = [
        comparison("one", (0.5, 0.9, 0.8), (0.95, 0.96, 0.97)),
        comparison("two", (0.1, 0.2, 0.91), (0.1, 0.2, 0.3), None),
        comparison("none", (0.1, 0.2, 0.3)),
    ]
    assert [x.updates_until(*reached) for x in results] == [[2000, 1000], [3000, None], [None]]
    lines = table(results, "loss", (), reached).splitlines()
    assert lines[0].endswith(f"| updates until {reached[0]} {reached[1]} |")
    cells = [line.rpartition(" | ")[2] for line in lines[2:]]
    assert cells == ["2000, 1000 |", "3000, never |", "never |"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metric", "acuracy"),
        ("reached", ("acuracy", 0.9)),
        ("extra_metrics", ("loss", "acuracy")),
        ("plots", (Ranking("loss"), Points("acuracy"))),
    ],
)
def test_a_metric_that_no_evaluation_has_is_named(field, value):
    study = replace(PLAIN, **{"metric": "loss", "extra_metrics": ("parameters",), field: value})
    with pytest.raises(UserError, match=f"{field} of .*: 'acuracy' .* choose one of loss, acc"):
        paragraphs(study, [comparison("one", (0.5,))], [])


def test_exponents_of_power_laws_are_reported():
    def result(model: str, size: int, exponent: float) -> Comparison:
        loss = 0.8 * size**-exponent
        compared = {"model": model, "size": str(size)}
        return Comparison(compared, {}, [row((1 - loss,)) | {"parameters": size}])

    results = [result("one", size, 0.5) for size in (1, 10, 100)]
    results += [result("two", 1, 0.5)]
    results += [result("three", size, 0.7) for size in (1, 10, 100)]
    plot = PowerLawPlot("loss", "parameters", lines="model")
    models = {"one": {}, "two": {}, "three": {}}
    axes = {"model": models, "size": {str(x): {} for x in (1, 10, 100)}}

    def lines(**changes) -> list[str]:
        study = replace(PLAIN, axes=axes, extra_metrics=(), plots=(plot,), **changes)
        parts = paragraphs(study, results, [])
        at = next(place for place, part in enumerate(parts) if part.startswith("Power laws: loss"))
        return parts[at + 1].splitlines()

    head, _, *rows = lines()
    assert head == "| model | b |"
    assert rows[:2] == ["| one | 0.5000 [0.5000, 0.5000] |", "| two |  |"]
    head, _, *rows = lines(baseline="one")
    assert head == "| model | b | difference |"
    assert rows[0] == "| one | 0.5000 [0.5000, 0.5000] |  |"
    assert rows[2] == "| three | 0.7000 [0.7000, 0.7000] | 0.2000 [0.2000, 0.2000] |"


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_committed_reports_are_of_their_results(folder):
    study = load_study(folder.name)
    recorded = Recorded(folder / RESULTS_FILE, read_only=True)
    records = [recorded.of(run) for runs in schedule(study, recorded) for run in runs]
    now = paragraphs(study, results_of(study, folder), records)
    assert (folder / "report.md").read_text().strip() == "\n\n".join(now).strip()
    assert {x.name for x in folder.glob("*.png")} == {*plot_files(study)}
