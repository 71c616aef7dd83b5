"""Trackers: rows, resumption, and failures that never end training."""

import json
import os
import re
import signal
import threading

import pytest

from heinsen_jax import data
from heinsen_jax.config import override
from heinsen_jax.errors import UserError
from heinsen_jax.runs.metrics_file import METRICS_FILE, read_metrics
from heinsen_jax.runtime.environment import environment
from heinsen_jax.sharding import shard_batch
from heinsen_jax.training import prepare_run, trackers, train
from heinsen_jax.training.loss_plot import PLOT_FILE
from heinsen_jax.training.trackers import TRACKER_FILE, TrackedRun, Tracking


class Recorder:
    """A tracker that records its calls."""

    def __init__(self, name="recorder"):
        self.name, self.runs, self.rows, self.ends = name, [], [], []

    def start(self, run):
        self.runs.append(run)
        return run.id or f"{self.name} 1"

    def log(self, step, metrics):
        self.rows.append({"step": step, **metrics})

    def finish(self, status):
        self.ends.append(status)


class Unreachable(Recorder):
    """A tracker whose service fails after its start."""

    def log(self, step, metrics):
        raise ConnectionError("no route\nto host")


def described(folder) -> TrackedRun:
    return TrackedRun("run", "project", folder, {"seed": 1}, environment())


def test_a_run_is_tracked_completely_and_resumes_under_its_id(small, tmp_path, monkeypatch, capsys):
    """Stopped by a signal during step 7."""
    steps = []

    def shard(*args):
        steps.append(args)
        if len(steps) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return shard_batch(*args)

    monkeypatch.setattr("heinsen_jax.training.loop.shard_batch", shard)
    words = "--training.sample-tokens 0 --training.project mine --training.steps 20"
    config = override(small, words.split())
    recorder, unreachable = Recorder(), Unreachable("unreachable")
    workdir, dataset = tmp_path / "a run", data.load(config.data)
    workdir.mkdir()
    train(prepare_run(config, workdir, dataset=dataset), trackers=[recorder, unreachable])
    train(prepare_run(config, workdir, dataset=dataset), trackers=[recorder])
    first, second = recorder.runs
    assert (first.name, first.project, first.id, first.step) == ("a run", "mine", None, 0)
    assert (second.id, second.step) == ("recorder 1", 7)
    assert second.config["training"]["steps"] == 20
    assert second.environment["commit"] == environment()["commit"]
    assert recorder.rows == read_metrics(workdir)
    assert [row["step"] for row in recorder.rows] == [5, 10, 15, 20, 20]
    assert recorder.ends == ["stopped", "finished"]
    ids = json.loads((workdir / TRACKER_FILE).read_text())
    assert ids == {"recorder": "recorder 1", "unreachable": "unreachable 1"}
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("warning: tracker unreachable: no route to host; training continues") == 1
    train(
        prepare_run(config, workdir, dataset=dataset), trackers=[recorder]
    )  # nothing is left to train
    assert len(recorder.runs) == 2
    lines = (workdir / METRICS_FILE).read_text().splitlines(keepends=True)
    (workdir / METRICS_FILE).write_text("".join(lines[:-1]))  # stopped in its last evaluation
    plot = (workdir / PLOT_FILE).stat().st_mtime_ns
    train(prepare_run(config, workdir, dataset=dataset), trackers=[recorder])
    assert recorder.rows[-1] == read_metrics(workdir)[-1] == recorder.rows[-2]
    assert recorder.ends[-1] == "finished"
    assert (workdir / PLOT_FILE).stat().st_mtime_ns > plot


def test_a_run_without_trackers_has_no_file_of_them(tmp_path):
    with Tracking([], print) as tracking:
        tracking.start(described(tmp_path))
        tracking.log(1, {"train/loss": 1.0})
        tracking.finish("finished")
    assert not [*tmp_path.iterdir()]


def test_an_error_in_training_is_recorded(tmp_path):
    recorder = Recorder()
    tracking = Tracking([recorder], print)
    tracking.start(described(tmp_path))
    with pytest.raises(ZeroDivisionError), tracking:
        raise ZeroDivisionError
    assert recorder.ends == ["failed"]


def test_a_tracker_that_cannot_start_is_one_line_and_ends_the_others(tmp_path):
    class Refused(Recorder):
        def start(self, run):
            raise RuntimeError("no API key\nconfigured")

    recorder = Recorder()
    message = r"training.trackers: wandb cannot start \(no API key configured\); run `wandb login`"
    with (
        pytest.raises(UserError, match=message),
        Tracking([recorder, Refused("wandb")], print) as tracking,
    ):
        tracking.start(described(tmp_path))
    assert recorder.ends == ["failed"]
    assert json.loads((tmp_path / TRACKER_FILE).read_text()) == {"recorder": "recorder 1"}


def test_a_tracker_that_hangs_delays_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "START_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    forever, said = threading.Event(), []

    class Slow(Recorder):
        def log(self, step, metrics):
            forever.wait()

    class Stuck(Recorder):
        def start(self, run):
            forever.wait()
            return ""

    with Tracking([Slow("slow")], said.append) as tracking:
        tracking.start(described(tmp_path))
        tracking.log(1, {"train/loss": 1.0})
        tracking.finish("finished")
    assert said == [
        "warning: tracker slow: not all metrics were sent in 0.1 s; metrics.jsonl has all metrics"
    ]
    with (
        pytest.raises(UserError, match=r"stuck cannot start \(no answer in 0.1 s\)"),
        Tracking([Stuck("stuck")], said.append) as tracking,
    ):
        tracking.start(described(tmp_path))
    forever.set()


@pytest.mark.parametrize("content", ["{", "[1]", '{"recorder": 1}'])
def test_a_damaged_file_of_ids_is_named(tmp_path, content):
    (tmp_path / TRACKER_FILE).write_text(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / TRACKER_FILE)) + ".*remove it"):
        Tracking([Recorder()], print).start(described(tmp_path))


def test_a_tracker_that_is_given_twice_is_refused():
    with pytest.raises(UserError, match="twice"):
        Tracking([Recorder(), Recorder()], print)
