"""Running studies: resumption, and reports."""

import contextlib
import json
import math
import re
import shutil
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

from heinsen_jax import data
from heinsen_jax.config import as_json
from heinsen_jax.data import DataConfig
from heinsen_jax.errors import UserError
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.runs.load import load_model
from heinsen_jax.training import prepare_run, train
from heinsen_jax.training.config import DistillationConfig
from heinsen_jax.training.loop import Diverged
from studies import Study, runs
from studies.__main__ import main
from studies.grid import describe
from studies.results import RESULTS_FILE, results_of
from studies.runner import REPORT_FILE, run_study
from studies.runs import RECORD_FILE, content_of, in_processes, run_one
from tests.studies.small import BASE, GOOD, PLAIN, SMALLER, STUDIES, STUDY, Fake


def here(chosen, folder):
    """Execute runs in this process."""
    for run in chosen:
        yield run, run_one([*map(as_json, run.stages)], folder(run))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / RESULTS_FILE).read_text().splitlines()]


def test_every_value_is_run_once_and_the_best_with_all_seeds(tmp_path):
    executor = Fake()
    run_study(STUDY, tmp_path, executor)
    first = [labels for labels in executor.done if labels["seed"] == "0"]
    assert len(first) == 2 * 2 * 3
    others = [labels for labels in executor.done if labels["seed"] != "0"]
    assert len(others) == 2 * 2 * 2
    assert all(x["learning_rate"] == GOOD[x["width"]] for x in others)
    assert len(lines(tmp_path)) == 20
    report = (tmp_path / REPORT_FILE).read_text()
    assert report.startswith("# A small study\n\nWhether it works.\n\n![")
    assert "| mechanism | width | learning rate | parameters | state bytes | accuracy |" in report
    row = "| 100 | 160 | 0.7600 ± 0.0100 | 0.7500, 0.7600, 0.7700 | 0.0475 ± 0.0006 |"
    assert f"| softmax | 16 | 0.1 {row}" in report
    assert "20 of 20 runs, on a CPU, JAX 1; at abc." in report
    assert (
        "Each row has the learning rate that was the best with the first seed (the smallest loss "
        "decided between equals); all were run." in report
    )
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_values_are_chosen_by_one_split_and_reported_on_the_other(tmp_path):
    def opposite(runs, folder):
        for run, row in Fake()(runs, folder):
            tested = {"test_accuracy": 1 - row["metrics"]["accuracy"]}
            yield run, row | {"metrics": row["metrics"] | tested}

    base = replace(BASE, data=replace(BASE.data, test_examples=48))
    study = replace(PLAIN, base=base, metric="test_accuracy", selected_by="accuracy")
    run_study(study, tmp_path, opposite)
    results = results_of(study, tmp_path)
    assert all(x.tuned["learning_rate"] == GOOD[x.compared["width"]] for x in results)
    assert {round(x.mean("test_accuracy"), 6) for x in results} == {0.24}
    report = (tmp_path / REPORT_FILE).read_text()
    assert "the best with the first seed, by accuracy of validation (the smallest loss" in report


def test_a_test_split_is_measured_after_training(tmp_path):
    config = replace(BASE, data=replace(BASE.data, test_examples=48))
    record = run_one([as_json(config)], tmp_path / "run")
    tested = {name: x for name, x in record["metrics"].items() if name.startswith("test_")}
    assert not any(name.startswith("test_") for x in record["curve"].values() for name in x)
    train(prepare_run(config, tmp_path / "again"))
    model, _ = load_model(tmp_path / "again", best=False)
    dataset = data.load(config.data)
    wanted = evaluate_model(model, dataset, config.data, masked_fraction=0.15, split="test")
    assert {"loss", "accuracy", "accuracy_4", "accuracy_16"} <= {*wanted}
    assert tested == pytest.approx({f"test_{name}": x for name, x in wanted.items()}, rel=1e-5)
    assert tested["test_loss"] != record["metrics"]["loss"]
    assert record["longest_state_bytes"] >= record["state_bytes"]


def test_selected_runs_without_test_metrics_are_run_again(tmp_path):
    """After training without a test split, in the same folder."""
    earlier = replace(PLAIN, axes={"mechanism": {"linear": {}}, "seed": {"0": {"seed": 0}}})
    run_study(earlier, tmp_path, here)
    before = lines(tmp_path)
    tested = replace(BASE, data=replace(BASE.data, test_examples=48))
    study = replace(earlier, base=tested, metric="test_accuracy", selected_by="accuracy")
    run_study(study, tmp_path, here)
    after = lines(tmp_path)
    assert [x["fingerprint"] for x in after] == [x["fingerprint"] for x in before]
    for old, new in zip(before, after, strict=True):
        assert new["metrics"].items() > old["metrics"].items()
        assert {"test_loss", "test_accuracy"} <= {*new["metrics"]}
    run_study(study, tmp_path, Fake(fail_after=0))
    assert lines(tmp_path) == after


def test_a_metric_that_no_record_has_does_not_select(tmp_path):
    """Runs of earlier records are repeated, instead of the first one being the best."""

    def tested(runs, folder):
        for run, row in Fake()(runs, folder):
            yield run, row | {"metrics": row["metrics"] | {"new": 1 - row["metrics"]["accuracy"]}}

    run_study(PLAIN, tmp_path, Fake())
    path = tmp_path / RESULTS_FILE
    path.write_text(path.read_text().removesuffix("\n"))  # as other programs end files
    study = replace(PLAIN, metric="new")
    run_study(study, tmp_path, tested)
    results = results_of(study, tmp_path)
    assert all(x.tuned["learning_rate"] == GOOD[x.compared["width"]] for x in results)
    assert len(lines(tmp_path)) == len(path.read_text().splitlines()) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "test_accuracy", "selected_by": "accuracy"}, "needs a test split; set test_"),
        ({"reached": ("test_accuracy", 0.5)}, "reached of .* is measured after training only"),
    ],
)
def test_test_metrics_are_checked_before_any_run(tmp_path, changes, message):
    with_tests = replace(PLAIN, base=replace(BASE, data=replace(BASE.data, test_examples=48)))
    study = with_tests if "reached" in changes else PLAIN
    with pytest.raises(UserError, match=message):
        run_study(replace(study, **changes), tmp_path, Fake(fail_after=0))


def test_the_number_of_test_examples_is_part_of_a_record():
    tested = replace(BASE, data=replace(BASE.data, test_examples=48))
    assert content_of(tested) == {"test examples": "48"}
    assert content_of(BASE) == {}


def test_a_study_that_was_stopped_continues(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_study(PLAIN, tmp_path, Fake(fail_after=7))
    path = tmp_path / RESULTS_FILE
    path.write_text(path.read_text() + '{"labels": {"mechan')  # killed during a write
    executor = Fake()
    run_study(PLAIN, tmp_path, executor)
    assert len(executor.done) == 13
    assert len(lines(tmp_path)) == 20
    run_study(PLAIN, tmp_path, Fake(fail_after=0))


def test_results_of_other_settings_are_not_used(tmp_path):
    run_study(PLAIN, tmp_path, Fake())
    executor = Fake()
    longer = replace(PLAIN, base=replace(BASE, training=replace(BASE.training, steps=5)))
    run_study(longer, tmp_path, executor)
    assert len(executor.done) == 20


def test_equal_runs_of_another_study_are_copied(tmp_path):
    """With the labels of this study; runs that it does not have are not copied."""
    run_study(PLAIN, tmp_path / "other", Fake())
    renamed = {"first": {"seed": 0}, "second": {"seed": 1}}
    study = replace(PLAIN, axes={**PLAIN.axes, "seed": renamed})
    executor = Fake(fail_after=0)
    run_study(study, tmp_path / "new", executor, reuse=[tmp_path / "other"])
    assert {row["labels"]["seed"] for row in lines(tmp_path / "new")} == {"first", "second"}
    assert len(lines(tmp_path / "new")) == 12 + 4
    with pytest.raises(UserError, match="--reuse adds runs; leave out --report-only"):
        run_study(study, tmp_path / "new", executor, report_only=True, reuse=[tmp_path / "other"])
    with pytest.raises(UserError, match=r"--reuse .*none: results.jsonl is missing"):
        run_study(study, tmp_path / "third", executor, reuse=[tmp_path / "none"])


def test_a_run_that_failed_is_reported_and_never_the_best(tmp_path):
    run_study(PLAIN, tmp_path, Fake(failed="softmax"))
    assert len(lines(tmp_path)) == 10 + 6  # no further seeds of a failed run
    report = (tmp_path / REPORT_FILE).read_text()
    assert "| softmax | 8 | 0.001 | 100 | 80 |  | NaN! |  |" in report
    assert "| linear | 8 | 0.01 | 100 | 80 | 0.7600 ± 0.0100 |" in report


def test_a_report_of_finished_runs(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_study(PLAIN, tmp_path, Fake(fail_after=9))  # the last of three of the first comparison
    run_study(PLAIN, tmp_path, Fake(fail_after=0), report_only=True)
    report = (tmp_path / REPORT_FILE).read_text()
    assert "9 of 20 runs" in report
    assert "| linear | 8 | 0.01 |" in report
    assert "Not finished: linear 16; softmax 8; softmax 16." in report
    assert "| linear | 16 |" not in report
    with pytest.raises(UserError, match=r"results\.jsonl: nothing to report yet"):
        run_study(PLAIN, tmp_path / "new", Fake(fail_after=0), report_only=True)


def test_all_runs_are_counted_with_one_seed_and_with_further_ones(tmp_path):
    one = replace(PLAIN, axes={**PLAIN.axes, "seed": {"0": {"seed": 0}}})
    run_study(one, tmp_path, Fake())
    assert "12 of 12 runs" in (tmp_path / REPORT_FILE).read_text()
    run_study(PLAIN, tmp_path, Fake(fail_after=0), report_only=True)
    assert "12 of 20 runs" in (tmp_path / REPORT_FILE).read_text()
    run_study(PLAIN, tmp_path, Fake())
    assert "20 of 20 runs" in (tmp_path / REPORT_FILE).read_text()


def test_nan_is_never_the_best(tmp_path):
    class NotANumber(Fake):
        def __call__(self, runs, folder):
            for run, row in super().__call__(runs, folder):
                if run.labels["learning_rate"] == "0.001":
                    row["metrics"]["accuracy"] = math.nan
                yield run, row

    run_study(PLAIN, tmp_path, NotANumber())
    assert "| linear | 8 | 0.01 |" in (tmp_path / REPORT_FILE).read_text()


def test_a_metric_that_is_not_measured_is_named(tmp_path):
    with pytest.raises(UserError, match=r"metric of .*: 'accuracy_2' .* one of loss, acc"):
        run_study(replace(STUDY, metric="accuracy_2"), tmp_path, Fake())


def test_other_seeds_are_checked_before_any_run(tmp_path):
    seeds = {"0": {"seed": 0}, "1": {"sead": 1}}
    executor = Fake()
    with pytest.raises(UserError, match=r"seed 1: .* no field 'sead'"):
        run_study(replace(STUDY, axes={**STUDY.axes, "seed": seeds}), tmp_path, executor)
    assert not executor.done


def test_weights_to_start_from_are_sought_before_any_run(tmp_path):
    executor, training = Fake(), replace(STUDY.base.training, start="nothing")
    study = replace(STUDY, base=replace(STUDY.base, training=training))
    with pytest.raises(UserError, match=r"training\.start=nothing: nothing holds no run"):
        run_study(study, tmp_path, executor)
    assert not executor.done


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / RESULTS_FILE).write_text("{}x\n")
    with pytest.raises(UserError, match=r"results\.jsonl, line 1, is damaged"):
        run_study(STUDY, tmp_path, Fake())


def test_paths_are_the_same_for_all_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "tokenizer.json", "tinyshakespeare", "bytes"):
        (tmp_path / name).touch()
    settings = DataConfig(
        corpus="a.txt",
        mixture={"b.txt": 1.0, "tinyshakespeare": 2.0},
        mixture_stages=((10, {"b.txt": 1.0}),),
        tokenizer="tokenizer.json",
    )
    training = replace(BASE.training, compilation_cache="gs://bucket/cache", start="runs/base")
    distillation = replace(BASE.distillation, teacher="runs/teacher")
    relative = replace(BASE, data=settings, training=training, distillation=distillation)
    absolute = runs._anywhere(relative)
    assert absolute.data == DataConfig(
        corpus=f"{tmp_path}/a.txt",
        mixture={f"{tmp_path}/b.txt": 1.0, "tinyshakespeare": 2.0},
        mixture_stages=((10, {f"{tmp_path}/b.txt": 1.0}),),
        tokenizer=f"{tmp_path}/tokenizer.json",
        cache=f"{tmp_path}/data",
    )
    assert absolute.training == replace(training, start=f"{tmp_path}/runs/base")
    assert absolute.distillation.teacher == f"{tmp_path}/runs/teacher"
    named = runs._anywhere(replace(BASE, data=DataConfig(corpus="tinyshakespeare"))).data
    assert (named.corpus, named.tokenizer) == ("tinyshakespeare", "bytes")
    assert runs._anywhere(BASE) == BASE


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed; .* pip install -e '\.\[ray\]'"):
        next(runs.on_cluster([], lambda run: None, cpus=1, gpus=0))


@pytest.mark.parametrize("failure", [Diverged, UserError, OSError])
def test_only_a_run_that_diverged_is_recorded_as_failed(tmp_path, monkeypatch, failure):
    def train(*arguments):
        raise failure("too high a learning rate")

    monkeypatch.setattr(runs, "train", train)
    if failure is Diverged:
        row = runs.run_one([as_json(BASE)], tmp_path)
        assert row["failed"] == "too high a learning rate"
        assert "metrics" not in row
    else:
        with pytest.raises(failure):
            runs.run_one([as_json(BASE)], tmp_path)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"model.atention": "l1"}, r"mechanism wrong.*has no field 'atention'"),
        ({"model.attention": "nope"}, r"mechanism wrong.*attention mechanism 'nope': unknown"),
        ({"model.num_heads": 3}, r"mechanism wrong.*num_heads=3 does not divide"),
        ({"model.vocab_size": 3}, r"mechanism wrong.*vocabulary of induction"),
        ({}, r"mechanism wrong.* is the same as mechanism linear"),
    ],
)
def test_invalid_settings_are_named_before_any_run(tmp_path, choice, message):
    axes = {**STUDY.axes, "mechanism": {"linear": {}, "wrong": choice}}
    executor = Fake()
    with pytest.raises(UserError, match=message):
        run_study(replace(STUDY, axes=axes), tmp_path, executor)
    assert not executor.done


def test_runs_in_processes_record_their_costs_and_run_once(tmp_path, monkeypatch):
    run_study(SMALLER, tmp_path, lambda runs, folder: in_processes(runs, folder, 1))
    rows = {row["labels"]["mechanism"]: row for row in lines(tmp_path)}
    assert set(rows) == {"linear", "softmax"}
    for row in rows.values():
        assert {"loss", "accuracy", "accuracy_4", "accuracy_16"} <= set(row["metrics"])
        assert 0 <= row["metrics"]["accuracy"] <= 1
        assert [*row["curve"]] == ["2", "4"]
        assert row["curve"]["4"] == row["metrics"] != row["curve"]["2"]
        assert row["flops"] > 6 * row["parameters"] * 4 * 16 * 8
    assert rows["softmax"]["state_bytes"] > rows["linear"]["state_bytes"] > 0
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert "step 4/4" in (folder / "log.txt").read_text()
        assert (folder / "metrics.jsonl").exists()
        assert not (folder / "checkpoints").exists()
    monkeypatch.setattr(runs, "train", None)
    for folder in folders:
        again = runs.run_one([as_json(BASE)], folder)
        (row,) = (row for row in rows.values() if row["state_bytes"] == again["state_bytes"])
        assert again == {name: row[name] for name in again}


def test_each_stage_starts_from_the_one_before(tmp_path):
    """A second stage that hardly trains has the loss of the first."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    dataset = data.load(BASE.data)
    train(prepare_run(BASE, teacher, dataset=dataset))
    still = replace(BASE.optimizer, learning_rate=1e-9, end_learning_rate=1e-9)
    tuning = replace(
        BASE,
        model=replace(BASE.model, attention="log"),
        data=replace(BASE.data, validation_examples=BASE.data.batch_size),
        distillation=DistillationConfig(teacher=str(teacher)),
    )

    def stages(labels, config):
        first = replace(config, training=replace(config.training, steps=2, evaluate_every=2))
        return first, replace(config, optimizer=still)

    study = replace(PLAIN, base=tuning, axes={"mechanism": {"log": {}}}, stages=stages)
    (only,) = study.first_seed_runs()
    second = replace(study, stages=lambda labels, config: stages(labels, config)[1:])
    assert only.fingerprint != second.first_seed_runs()[0].fingerprint
    run_study(study, tmp_path / "study", here)
    (row,) = lines(tmp_path / "study")
    (before,) = row["before"]
    assert row["metrics"]["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert row["tokens"] == (2 + 4) * 16 * 8
    assert "flops" not in row
    assert [*(tmp_path / "study").rglob("metrics.jsonl")]
    assert not [*(tmp_path / "study").rglob("checkpoints")]


def with_text(path: Path) -> Study:
    """A study of one run, on a text."""
    text = DataConfig(corpus=str(path), cache=str(path.parent), sequence_length=8, batch_size=2)
    axes = {"mechanism": {"linear": {}}, "width": {"8": {}}}
    axes |= {"learning_rate": {"0.01": {}}, "seed": {"0": {}}}
    base = replace(BASE, model=replace(BASE.model, vocab_size=264), data=text)
    return replace(PLAIN, base=base, axes=axes, metric="loss", extra_metrics=())


def test_runs_with_other_text_are_refused(tmp_path):
    """Under the same name; also those of another study."""
    text = tmp_path / "text.txt"
    study = with_text(text)
    text.write_text("some text " * 99)
    run_study(study, tmp_path / "study", Fake(content=content_of(study.base)))
    run_study(study, tmp_path / "study", Fake(fail_after=0))
    text.write_text("other text " * 99)
    changed = r"mechanism linear.*: the data have changed since; bring"
    with pytest.raises(UserError, match=changed):
        run_study(study, tmp_path / "study", Fake(fail_after=0))
    with pytest.raises(UserError, match=changed):
        run_study(study, tmp_path / "new", Fake(fail_after=0), reuse=[tmp_path / "study"])
    assert not (tmp_path / "new").exists()


@pytest.mark.nightly
def test_a_run_with_another_text_than_it_began_with_is_refused(tmp_path):
    """Whether it is finished or not."""
    text, workdir = tmp_path / "text.txt", tmp_path / "run"
    stages = [as_json(with_text(text).base)]
    workdir.mkdir()
    text.write_text("some text " * 99)
    recorded = run_one(stages, workdir)
    assert run_one(stages, workdir) == recorded
    text.write_text("other text " * 99)
    for _ in range(2):
        with pytest.raises(UserError, match=r"run: the data have changed since"):
            run_one(stages, workdir)
        (workdir / RECORD_FILE).unlink(missing_ok=True)


@pytest.mark.nightly
def test_the_content_of_a_run_has_the_weights_of_its_teacher(tmp_path):
    settings = DistillationConfig(teacher=str(tmp_path))
    student = replace(BASE, model=replace(BASE.model, attention="log"), distillation=settings)
    dataset, found = data.load(BASE.data), []
    for seed in range(2):
        teacher = replace(BASE, seed=seed)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        train(prepare_run(teacher, tmp_path, dataset=dataset))
        found.append(content_of(student))
        assert found[-1] == content_of(student)
    assert [*found[0]] == ["teacher"]
    assert found[0] != found[1]
    assert content_of(BASE) == {}


FILE = """
from tests.studies.small import SMALLER

def get_study():
    return SMALLER
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nothing",),
            "nothing: no such file; give an existing file or one of the names "
            + ", ".join(path.stem for path in STUDIES),
        ),
        (("study.json",), "study.json must be a Python file, .py, that defines get_study()"),
        (("none.py",), "none.py: get_study() must return Study, not NoneType"),
        (("study.py", "--jobs", "0"), "--jobs 0 must be at least 1"),
        (
            ("study.py", "--gpus", "1"),
            "--gpus 1.0 has no effect with --executor local; leave it out",
        ),
        (
            ("study.py", "--executor", "ray", "--jobs", "2"),
            "--jobs 2 has no effect with --executor ray; leave it out",
        ),
        (
            ("study.py", "--reuse", "a", "--reuse", "b"),
            "--reuse is given twice; give all values together: a b",
        ),
        (("empty.py",), "empty.py defines no get_study()"),
    ],
)
def test_invalid_options_are_refused(tmp_path, arguments, message, monkeypatch, capsys):
    (tmp_path / "study.py").write_text(FILE)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "none.py").write_text("def get_study():\n    pass\n")
    (tmp_path / "study.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["studies", *arguments])
    assert main() == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_errors_name_their_run():
    run = replace(STUDY, axes=SMALLER.axes).first_seed_runs()[0]
    with pytest.raises(UserError, match="mechanism linear, seed 0: no space"), runs._named(run):
        raise UserError("no space")


def test_an_error_of_a_killed_process_names_the_runs_that_it_may_have_had(monkeypatch):
    """All unfinished runs fail then, in any order."""

    class Pool(contextlib.AbstractContextManager):
        def __init__(self, *_: object):
            self.count = 0

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, *_: object) -> Future:
            future = Future()
            self.count += 1
            if self.count == 1:
                future.set_result({"metrics": {}})
            else:
                future.set_exception(BrokenProcessPool())
            return future

        def shutdown(self, **_: object) -> None:
            pass

    monkeypatch.setattr(runs, "ProcessPoolExecutor", Pool)
    several = STUDY.first_seed_runs()[:5]
    second, third = (describe(run.labels) for run in several[1:3])
    message = f"{second}; or {third}: its process was killed, perhaps out of memory"
    with pytest.raises(UserError, match=re.escape(message)):
        list(runs.in_processes(several, lambda run: Path("x"), jobs=2))
