"""The grid of a study: fields, fingerprints, and the committed studies."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from heinsen_jax.config import (
    Layers,
)
from heinsen_jax.data import Copying, DataConfig
from studies import (
    Points,
    PositionPlot,
    PowerLawPlot,
    Ranking,
    Run,
    Study,
    load_study,
)
from studies.runs import costs
from tests.studies.small import BASE, PLAIN, STUDIES, STUDY

ALIKE = "recall", "recall_zoology", "linearize_shakespeare", "hybrids_updates"
"""Studies whose models are as those of others."""


def test_a_fingerprint_is_of_what_is_not_a_default():
    def fingerprint(**changes):
        return Run({}, (replace(BASE, **changes),)).fingerprint

    model = BASE.model
    assert fingerprint() == fingerprint(model=replace(model, attention="linear", remat=False))
    others = [
        {"seed": 1},
        {"model": replace(model, remat=True)},
        {"model": replace(model, attention=Layers("linear", options={"num_kv_heads": 1}))},
        {"data": Copying()},
        {"data": Copying(num_letters=25)},
        {"data": DataConfig()},
    ]
    assert len({fingerprint(), *(fingerprint(**changes) for changes in others)}) == 7


def test_lines_of_a_plot_are_of_an_axis_that_is_compared():
    with pytest.raises(ValueError, match="one of mechanism, width"):
        replace(STUDY, plots=(Points("accuracy", lines="learning_rate"),))


def test_highlighted_labels_and_the_baseline_exist():
    for plot in (
        Points("accuracy", highlighted={"linaer": "C0"}),
        Ranking("accuracy", highlighted={"0.01": "C0"}),  # not compared
        Ranking("accuracy", baseline="linaer"),
    ):
        with pytest.raises(ValueError, match=r"no compared axis has .*choose from \['linear', 's"):
            replace(STUDY, plots=(plot,))


def test_plots_check_the_labels_and_the_evaluations_that_they_need():
    plot = PowerLawPlot("accuracy", "parameters", lines="mechanism", where={"0.01": ("8",)})
    with pytest.raises(ValueError, match=r"where=.* must have labels by compared axes"):
        replace(STUDY, plots=(plot,))
    with pytest.raises(ValueError, match=r"needs training\.loss_by_position"):
        replace(STUDY, plots=(PositionPlot(8),))


def test_restricting_a_study_to_unknown_labels_is_an_error():
    with pytest.raises(
        ValueError, match="axis='heads': not in 'A small study'; choose one of mech"
    ):
        STUDY.restricted("heads", ["8"])
    with pytest.raises(
        ValueError, match=r"labels=\['gla'\]: not of .* choose from \['linear', 'so"
    ):
        STUDY.restricted("mechanism", ["linear", "gla"])


def test_only_selected_combinations_are_run():
    study = replace(
        STUDY, select=lambda labels: labels["width"] == "8" or labels["mechanism"] == "linear"
    )
    found = {(run.labels["mechanism"], run.labels["width"]) for run in study.all_runs()}
    assert found == {("linear", "8"), ("linear", "16"), ("softmax", "8")}
    assert len(study.groups()) == 3


def test_seeds_may_be_of_selected_combinations_only():
    study = replace(
        STUDY, select=lambda labels: labels["width"] == "8" or labels["seed"] in ("0", "2")
    )
    seeds = {
        run.labels["width"]: [other.labels["seed"] for other in study.other_seed_runs(run.labels)]
        for run in study.first_seed_runs()
    }
    assert seeds == {"8": ["1", "2"], "16": ["2"]}


def test_a_section_that_is_set_whole_replaces_its_fields():
    axes = {
        "mechanism": {"small": {"model.model_dim": 16, "model": replace(BASE.model, num_heads=4)}},
        "width": {"24": {"model.num_layers": 3}},
    }
    model = replace(STUDY, axes=axes, plots=()).first_seed_runs()[0].config.model
    assert (model.model_dim, model.num_heads, model.num_layers) == (8, 4, 3)


def test_fields_that_fit_only_together_are_set_together():
    fields = {"model.max_length": 8, "model.positions": "learned"}
    run = replace(PLAIN, axes={"positions": {"of 8 tokens": fields}}).first_seed_runs()[0]
    assert (run.config.model.max_length, run.config.model.positions) == (8, "learned")


@cache  # for all tests of a study
def load_with_runs(path: Path) -> tuple[Study, list[Run]]:
    study = load_study(path)
    return study, study.first_seed_runs()


def for_each_study(nightly: Collection[str] = ()) -> pytest.MarkDecorator:
    """Run a test for all studies, for some of them nightly."""

    def param(path: Path) -> Any:
        marks = [pytest.mark.nightly] * (path.stem in nightly)
        return pytest.param(path, id=path.stem, marks=marks)

    return pytest.mark.parametrize("path", [*map(param, STUDIES)])


@pytest.mark.repository
@for_each_study()
def test_committed_studies_load_and_all_their_runs_are_different(path):
    study, first = load_with_runs(path)
    runs = [run for chosen in first for run in (chosen, *study.other_seed_runs(chosen.labels))]
    assert len({run.fingerprint for run in runs}) == len(runs)


@pytest.mark.repository
@for_each_study(nightly=ALIKE)
def test_models_of_committed_studies_can_be_built(path):
    _, first = load_with_runs(path)
    models = [run.config.model for run in first]
    names = [model.attention for model in models]
    for run in dict(zip(names, first, strict=True)).values():
        assert costs(run.config)["state_bytes"] > 0


def test_fingerprints_do_not_depend_on_the_folder(tmp_path, monkeypatch):
    """The tokenizer of configs/python_code.py is relative to a checkout, or absolute elsewhere."""
    here = [run.fingerprint for run in load_study("long_context").first_seed_runs()]
    monkeypatch.chdir(tmp_path)
    elsewhere = load_study("long_context").first_seed_runs()
    assert elsewhere[0].config.data.tokenizer.startswith("/")
    assert here == [run.fingerprint for run in elsewhere]


def test_a_restricted_study_has_only_the_colors_of_its_labels():
    plots = (Ranking("accuracy", highlighted={"linear": "C0", "softmax": "C1", "8": "C2"}),)
    study = replace(STUDY, plots=plots).restricted("mechanism", ["softmax"])
    assert study.axes == STUDY.axes | {"mechanism": {"softmax": {"model.attention": "softmax"}}}
    assert study.plots[0].highlighted == {"softmax": "C1", "8": "C2"}


def test_a_restricted_study_has_no_plots_and_no_baseline_of_other_labels():
    plots = (
        Ranking("accuracy", baseline="linear"),
        Points("accuracy", where={"mechanism": "linear"}),
        Points("accuracy", where={"mechanism": ("linear", "softmax")}),
    )
    study = replace(STUDY, plots=plots, baseline="linear").restricted("mechanism", ["softmax"])
    assert study.baseline is None
    ranking, points = study.plots
    assert (ranking.baseline, points.where) == ("", {"mechanism": ("softmax",)})
    same = replace(STUDY, plots=plots, baseline="linear").restricted("width", ["16"])
    assert (same.baseline, same.plots) == ("linear", plots)
