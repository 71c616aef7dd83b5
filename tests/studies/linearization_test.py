"""Studies of linearization: budgets, stages, and their teachers."""

from pathlib import Path

import pytest

from heinsen_jax.config import load_config
from studies import linearization, load_study, results_of
from studies.linearization import MERGED, TRAINED_FURTHER

ROOT = Path(__file__).resolve().parents[2]
GRIDS = ROOT / "studies/grids"
COMPARED = {"linearize_python": ("10%",), "linearize_shakespeare": ("3%", "30%")}
"""Fractions of the tokens of which all models are run."""
NAMES = [*COMPARED]


@pytest.mark.parametrize(("name", "compared"), [*COMPARED.items()])
def test_all_models_with_a_budget_have_the_same_tokens(name, compared):
    study, teacher = load_study(name), load_config(GRIDS / f"{name}.py")
    found = {}
    for runs in study.groups():
        labels, stages = runs[0].labels, runs[0].stages
        found[labels["model"], labels["tokens"]] = len(stages)
        updates = sum(stage.training.steps for stage in stages)
        assert f"{updates / teacher.training.steps:.0%}" == labels["tokens"]
        seeds = [stage.seed for stage in stages]
        assert len({*seeds, teacher.seed}) == len(seeds) + 1
    assert all((TRAINED_FURTHER, tokens) in found for tokens in study.axes["tokens"])
    assert found["log, Hedgehog", "1%"] == found[MERGED, "100%"] == 2
    assert found["log, Hedgehog, stage 2 only", compared[-1]] == 1
    assert found["linear, elu + 1", "1%"] == 1
    assert ("log, Hedgehog, stage 2 only", "100%") not in found


def test_seeds_of_shakespeare_are_repeated_with_3_percent():
    study = load_study("linearize_shakespeare")
    first = [runs[0].labels for runs in study.groups()]
    repeated = {(x["model"], x["tokens"]) for x in first if study.other_seed_runs(x)}
    main = {*linearization.MAIN} & {*study.axes["model"]}
    assert repeated == {(model, "3%") for model in main}


@pytest.mark.parametrize("name", NAMES)
def test_only_models_from_scratch_have_no_teacher(name):
    study, teacher = load_study(name), load_config(GRIDS / f"{name}.py")
    for runs in study.groups():
        label, stages = runs[0].labels["model"], runs[0].stages
        has_teacher = {stage.distillation.teacher is not None for stage in stages}
        assert has_teacher == {not label.endswith(linearization.FROM_SCRATCH)}
        if label == TRAINED_FURTHER:
            assert stages[-1].model == teacher.model


@pytest.mark.parametrize(
    ("name", "teachers"), [*zip(NAMES, ("long_context", "language_model"), strict=True)]
)
def test_teachers_are_the_best_softmax_models_of_their_studies(name, teachers):
    results = results_of(load_study(teachers), ROOT / "benchmarks/results/studies" / teachers)
    (best,) = (
        x.tuned["learning_rate"] for x in results if "softmax, rotary" in x.compared.values()
    )
    config = load_config(GRIDS / f"{name}.py")
    assert f"{config.optimizer.learning_rate:g}" == best
    assert config.model.layer_pattern == ("softmax",)
