"""The search among ordered values of a tuned axis."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from studies.runner import REPORT_FILE, run_study
from tests.studies.small import PLAIN, Fake

LABELS = "abcdefg"
AXES = {
    "mechanism": {"linear": {}},
    "learning_rate": {x: {"optimizer.learning_rate": 1 / ord(x)} for x in LABELS},
    "seed": {"0": {"seed": 0}, "1": {"seed": 1}},
}
SEARCH = replace(PLAIN, axes=AXES, metric="loss", extra_metrics=(), search="neighbors")


class Losses:
    """Simulated runs with these losses by learning rate, None if the run diverges."""

    def __init__(self, losses: dict[str, float | None]):
        self.losses, self.rounds = losses, []

    def __call__(self, runs, folder):
        found = [run.labels["learning_rate"] for run in runs]
        self.rounds.append([x + run.labels["seed"] for x, run in zip(found, runs, strict=True)])
        for run, rate in zip(runs, found, strict=True):
            loss = self.losses[rate]
            result = {"failed": "NaN!"} if loss is None else {"metrics": {"loss": loss}}
            place = {"cpu": "a CPU", "backend": "cpu", "device": "cpu", "jax": "1"}
            place |= {"commit": "abc", "uncommitted_changes": False}
            costs = {"parameters": 100, "state_bytes": 80, "seconds": 1.0}
            yield run, {**result, **costs, "environment": place}


def rounds(folder: Path, *losses: float | None, **changes) -> list[str]:
    executor = Losses(dict(zip(LABELS, losses, strict=True)))
    run_study(replace(SEARCH, **changes), folder, executor)
    return [" ".join(runs) for runs in executor.rounds]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((9, 8, 7, 6, 7, 8, 9), ["c0 d0 e0", "d1"]),
        ((9, 8, 7, 6, 5, 4, 5), ["c0 d0 e0", "f0", "g0", "f1"]),
        ((1, 2, 3, 4, 5, 6, 7), ["c0 d0 e0", "b0", "a0", "a1"]),
        ((9, 8, 7, math.nan, None, 1, 1), ["c0 d0 e0", "b0", "c1"]),
        ((9, 5, None, None, None, 4, 5), ["c0 d0 e0", "b0 f0", "g0", "f1"]),
        ((None,) * 7, ["c0 d0 e0", "b0 f0", "a0 g0"]),
    ],
    ids=["middle", "interior", "end", "diverged", "gap", "nothing"],
)
def test_the_search_ends_when_the_neighbors_of_the_best_are_no_better(tmp_path, losses, expected):
    assert rounds(tmp_path, *losses) == expected


def test_the_smaller_loss_ranks_first_among_equal_accuracies(tmp_path):
    """The search moves along a plateau of accuracies of 1 toward the smallest loss."""
    losses = Losses(dict(zip(LABELS, (9, 8, 7, 6, 5, 6, 7), strict=True)))

    def executor(runs, folder):
        for run, result in losses(runs, folder):
            yield run, result | {"metrics": result["metrics"] | {"accuracy": 1.0}}

    run_study(replace(SEARCH, metric="accuracy"), tmp_path, executor)
    assert losses.rounds == [["c0", "d0", "e0"], ["f0"], ["e1"]]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_short_axes_are_run_whole(tmp_path, number):
    rates = {x: AXES["learning_rate"][x] for x in LABELS[:number]}
    found = rounds(tmp_path, *range(7), axes={**AXES, "learning_rate": rates})
    assert found == [" ".join(f"{x}0" for x in rates), "a1"]


def test_runs_of_comparisons_alternate(tmp_path):
    mechanisms = {name: {"model.attention": name} for name in ("linear", "log", "softmax")}
    found = rounds(tmp_path, *range(7), axes={**AXES, "mechanism": mechanisms})
    assert found[0] == "c0 c0 c0 d0 d0 d0 e0 e0 e0"


def test_rows_that_are_recorded_count_whichever_labels_they_have(tmp_path):
    some = {x: AXES["learning_rate"][x] for x in "ab"}
    losses = 9, 8, 7, 8, 9, 9, 9
    rounds(tmp_path, *losses, search="grid", axes={**AXES, "learning_rate": some})
    assert rounds(tmp_path, *losses) == ["c0 d0 e0", "c1"]
    assert "6 of 6 runs" in (tmp_path / REPORT_FILE).read_text()  # without the second seed of b
    assert rounds(tmp_path, *losses) == []


def test_a_search_that_was_interrupted_has_the_runs_of_one_that_was_not(tmp_path):
    losses = 9, 8, 7, 6, 7, 8, 9
    only_c = {x: AXES["learning_rate"][x] for x in "c"}
    rounds(tmp_path, *losses, search="grid", axes={**AXES, "learning_rate": only_c})
    assert rounds(tmp_path, *losses) == ["d0 e0", "d1"]


def test_the_report_says_how_values_were_chosen_and_which_are_at_an_end(tmp_path):
    rounds(tmp_path, 9, 8, 7, 6, 7, 8, 9)
    report = (tmp_path / REPORT_FILE).read_text()
    assert "was the best with the first seed; of a, b, c, d, e, f, g, a search ran" in report
    assert "may exist" not in report
    rounds(tmp_path / "end", 1, 2, 3, 4, 5, 6, 7)
    report = (tmp_path / "end" / REPORT_FILE).read_text()
    assert "so a better one may exist, for all rows." in report


def test_rows_whose_best_value_is_at_an_end_of_the_grid_are_named(tmp_path):
    run_study(PLAIN, tmp_path, Fake())
    report = (tmp_path / REPORT_FILE).read_text()
    assert "may exist, for 0.1: `linear 16`, `softmax 16`." in report


@pytest.mark.parametrize("tuned", [(), ("learning_rate", "seed")])
def test_the_search_needs_one_tuned_axis(tuned):
    with pytest.raises(ValueError, match=f"one tuned axis, not {len(tuned)}"):
        replace(SEARCH, tuned=tuned)
