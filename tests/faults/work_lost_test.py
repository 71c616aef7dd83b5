"""Work that would be lost: slow updates, losses that are not numbers, files of others."""

import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from heinsen_jax import data
from heinsen_jax.config import load_config, override
from heinsen_jax.data import DataConfig
from heinsen_jax.errors import UserError
from heinsen_jax.runs.checkpoints import CheckpointReader
from heinsen_jax.runs.folder import RunFolder, check_folder, set_aside
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runtime.signals import Signals
from heinsen_jax.runtime.timeouts import with_timeout
from heinsen_jax.sharding import MeshConfig, make_mesh
from heinsen_jax.train import main
from heinsen_jax.training import TrainingResult, loop, pacing, prepare_run, program, train
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.config import TrainingConfig
from heinsen_jax.training.metrics import Reporter
from heinsen_jax.training.pacing import InFlight, Requests
from tests.faults.conftest import said, wait_until
from tests.multi_device.apart import start


@pytest.fixture
def train_here(place, monkeypatch):
    """Return a function that trains the small run in this process, with overrides."""
    monkeypatch.chdir(place)

    def run(workdir: Path, *overrides: str) -> TrainingResult:
        config = override(load_config("tiny.py"), [*overrides, "--training.sample_tokens", "0"])
        workdir.mkdir(exist_ok=True)
        dataset = data.load(config.data)
        return train(prepare_run(config, workdir, dataset=dataset))

    return run


class Metrics:
    """Metrics of an update that completes after some seconds."""

    def __init__(self, seconds: float):
        self._due = time.monotonic() + seconds

    def block_until_ready(self) -> "Metrics":
        time.sleep(max(0.0, self._due - time.monotonic()))
        return self


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 1), (0.1, 0)])
def test_updates_in_flight(monkeypatch, seconds, most):
    """Without a wait, all would be in flight. Those before a dispatch are counted."""
    monkeypatch.setattr(InFlight, "SLOW", 0.05)
    completed, before_dispatch = [], []
    in_flight = InFlight(lambda step, metrics: completed.append(step))
    for step in range(1, 7):
        before_dispatch.append(step - 1 - len(completed))
        in_flight.add(step, Metrics(seconds))
    assert before_dispatch[0] == 0
    assert set(before_dispatch[3:]) == {most}
    in_flight.drain()
    assert completed == [1, 2, 3, 4, 5, 6]


STOPPED = """
import os, signal, sys, threading, time
from heinsen_jax.runtime.signals import Signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
def send():
    for pause in (0.2, 0.1, 0.6):  # the second one is a repetition by a wrapper
        time.sleep(pause)
        os.kill(os.getpid(), int(sys.argv[1]))
with Signals(60):
    threading.Thread(target=send).start()
    time.sleep(20)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_announced_and_a_further_one_exits(number):
    command = [sys.executable, "-c", STOPPED, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 128 + number
    lines = [line for line in done.stderr.splitlines() if line]
    name = signal.Signals(number).name
    last = f"stopped by {name}: the last checkpoint is kept"
    assert lines == ["stopping after this update; once more to exit now", last]


def test_a_stop_does_not_wait_for_a_batch():
    signalled = threading.Event()
    threading.Timer(0.3, signalled.set).start()
    stalled = iter(queue.SimpleQueue().get, None)
    batches = with_timeout(
        stalled, "a", timeout=60, warn=lambda line: None, is_stopped=signalled.is_set
    )
    started = time.monotonic()
    assert next(batches, "none") == "none"
    assert 0.2 < time.monotonic() - started < 5


def test_a_stop_interrupts_an_evaluation(train_here, tmp_path, monkeypatch):
    """The step is saved, without a validation loss."""
    evaluated = []
    make_step = program.make_evaluation_step

    def make_stopped_step(*arguments, **options):
        step = make_step(*arguments, **options)

        def stopped_step(*arguments):
            evaluated.append(arguments)
            signal.raise_signal(signal.SIGTERM)
            return step(*arguments)

        return stopped_step

    monkeypatch.setattr(program, "make_evaluation_step", make_stopped_step)
    result = train_here(tmp_path / "run")
    assert result == TrainingResult(20, {}, signal.SIGTERM)
    assert len(evaluated) == 1  # of 2 batches
    checkpoints = CheckpointReader(tmp_path / "run")
    assert checkpoints.latest_step() == 20
    assert all("validation/loss" not in row for row in read_metrics(tmp_path / "run"))


def test_checkpoints_by_time(train_here, tmp_path, monkeypatch):
    """Here after every update; the first one after at most a minute."""
    steps = "--training.steps", "8", "--training.checkpoint_every", "1000"
    train_here(tmp_path / "a", *steps, "--training.checkpoint_minutes", "1e-9")
    kept = {path.name for path in (tmp_path / "a/checkpoints").iterdir()}
    assert kept == {"7", "8"}  # keep_checkpoints=2
    now = [1000.0]
    monkeypatch.setattr(pacing.time, "monotonic", lambda: now[0])
    requests = Requests(make_mesh(MeshConfig()), Signals(60), 10.0)
    due = []
    for seconds in (59, 60, 61, 659, 660, 661):
        now[0] = 1000 + seconds
        due.append(requests()[1])
        if due[-1]:
            requests.restart()
    assert due == [False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((2.0, 1.0, math.nan), 2),
        ((1.5, math.nan, 2.0), 1),
        ((math.nan, 1.5, 2.0), 2),
        ((math.nan, math.nan), 2),
        ((2.0, None, math.nan, 3.0), 1),
        ((1.0, 1.0, 2.0), 2),
    ],
)
def test_a_loss_that_is_not_a_number_is_not_the_best(tmp_path, losses, best):
    """A reader agrees with the process that writes, and the best step is kept."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, loss in enumerate(losses, 1):
            checkpoints.save(step, {"x": jnp.full(3, step)}, loss=loss)
            checkpoints.wait()
        assert checkpoints.best_step() == best
    checkpoints = CheckpointReader(tmp_path)
    assert checkpoints.best_step() == best


def test_the_training_loss_is_the_mean_since_the_last_report(train_here, tmp_path):
    steps = "--training.steps", "10", "--training.log_every"
    train_here(tmp_path / "a", *steps, "1")
    train_here(tmp_path / "b", *steps, "4")
    losses = [x["train/loss"] for x in read_metrics(tmp_path / "a") if "train/loss" in x]
    means = {x["step"]: x["train/loss"] for x in read_metrics(tmp_path / "b") if "train/loss" in x}
    assert len(losses) == 10
    for end, before in ((4, 0), (8, 4), (10, 8)):
        mean = sum(losses[before:end]) / (end - before)
        assert means[end] == pytest.approx(mean, rel=1e-6)


def test_checkpoints_without_a_configuration_are_not_resumed(place, run, monkeypatch, capsys):
    (run / CONFIG_FILE).unlink()
    monkeypatch.chdir(place)
    more = "--seed", "7", "--optimizer.learning-rate", "0.5", "--training.steps", "60"
    command = "--config", "tiny.py", "--workdir", str(run), *more, "--allow-change"
    code, err = said(main, monkeypatch, capsys, *command)
    assert code == 2
    assert f"--workdir {run} has checkpoints without config.json" in err
    assert not (run / CONFIG_FILE).exists()


@pytest.mark.parametrize(
    "moved", [pytest.param(x, marks=[pytest.mark.nightly] * (x != 3)) for x in (0, 1, 3, 6)]
)
def test_a_restart_that_is_interrupted_is_completed(train_here, run, capsys, monkeypatch, moved):
    """The run is not resumed with other settings, and all of it is in one folder."""
    before = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    metrics, moves = (run / "metrics.jsonl").read_bytes(), itertools.count(1)

    def move(path, target):
        if next(moves) > moved:
            raise KeyboardInterrupt
        os.rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr("heinsen_jax.runs.folder.move", move)
        with pytest.raises(KeyboardInterrupt):
            set_aside(RunFolder(run))
    more = "--workdir", str(run), "--training.steps", "6", "--model.model-dim", "24"
    assert said(main, monkeypatch, capsys, "--config", "tiny.py", *more) == (0, "")
    assert {path.name for path in (run / "before-restart").iterdir()} == before
    assert (run / "before-restart/metrics.jsonl").read_bytes() == metrics
    assert [row["step"] for row in read_metrics(run) if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert len([*run.glob("before-restart*")]) == 1


FOREIGN = {
    "tokenizer.json": "{}",
    "metrics.jsonl": '{"epoch": 1}\n',
    "loss.png": "a picture",
    "manifest.json": "{}",
    "model.partial.txt": "words",
    "notes.txt": "words",
    "config.json": '{"hidden_size": 3}',
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_others_is_not_written_to(tmp_path, name, restart):
    (tmp_path / name).write_text(FOREIGN[name])
    with pytest.raises(UserError, match=name):
        check_folder(RunFolder(tmp_path), restart=restart)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / "checkpoints").mkdir()  # of another program
    (tmp_path / "checkpoints/epoch1.pt").touch()
    with pytest.raises(UserError, match=r"is not the folder of a run|config\.json"):
        check_folder(RunFolder(tmp_path), restart=restart)


@pytest.mark.parametrize("restart", [False, True])
def test_the_weights_of_a_model_are_not_hidden_by_checkpoints(tmp_path, restart):
    for name, content in {"config.json": '{"model": {}}', "model.safetensors": ""}.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="holds the weights of a model, which checkpoints would"):
        check_folder(RunFolder(tmp_path), restart=restart)


@pytest.mark.parametrize("restart", [False, True])
def test_folders_of_runs_are_accepted(tmp_path, run, restart):
    """Empty, of a run, and of one that was killed before its first update."""
    for folder in (tmp_path / "new", tmp_path / "empty", tmp_path / "killed", run):
        folder.mkdir(exist_ok=True)
    (tmp_path / "killed/metrics.jsonl").touch()
    (tmp_path / "killed/slurm-17.out").write_text("compiling the update")
    (tmp_path / "killed/last_checkpoint.json").write_text('{"step": 0}')
    for name in ("teacher.sha256", "tracker.json", "tokenizer.json", "data_manifest.json"):
        (tmp_path / "killed" / name).write_text("{}")
    for name in ("tensorboard", "checkpoints"):
        (tmp_path / "killed" / name).mkdir()
    for folder in (tmp_path / "empty", tmp_path / "killed", run):
        check_folder(RunFolder(folder), restart=restart)


def test_tensorboard_has_no_points_of_lost_steps(tmp_path):
    """Its default loader shows all points in the files."""
    with Reporter(tmp_path, start_step=0, steps=60) as reporter:
        for step in (10, 20, 30):
            reporter.training(step, {"loss": 1.0})
        reporter.validation(30, {"loss": 1.0})
        reporter.sample(30, "words")
    (first,) = (tmp_path / "tensorboard").iterdir()
    with first.open("ab") as file:
        file.write(b"\x30\0\0")  # killed in mid-write
    with Reporter(tmp_path, start_step=20, steps=60) as reporter:
        reporter.training(40, {"loss": 1.0})
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime)
    steps = [x.step for path in files for x in events(path) if x.HasField("summary")]
    assert sorted(steps) == [10, 20, 40]


def events(path: Path) -> list[Event]:
    content, found, start = path.read_bytes(), [], 0
    while start < len(content):
        size = int.from_bytes(content[start : start + 8], "little")
        found.append(Event.FromString(content[start + 12 : start + 12 + size]))
        start += size + 16
    return found


SLOW = """
import dataclasses, time
import jax
from heinsen_jax.train import main
from heinsen_jax.training import program

make_train_step = program.make_train_step

def make_slow_step(*arguments, **options):
    train_step = make_train_step(*arguments, **options)

    def wait(step):
        time.sleep(1.5)
        return step

    def slow_step(state, *more):
        state, metrics = train_step(state, *more)
        step = jax.pure_callback(wait, jax.ShapeDtypeStruct((), state.step.dtype), state.step)
        return dataclasses.replace(state, step=step), metrics | {"loss": metrics["loss"] + 0 * step}

    return jax.jit(slow_step, donate_argnums=0)

program.make_train_step = make_slow_step
raise SystemExit(main())
"""


@pytest.mark.nightly
def test_slow_updates_lose_nothing(place, tmp_path):
    """The run ends within the update under way, which it saves."""
    workdir = tmp_path / "run"
    more = "--training.steps", "1000000", "--training.evaluate_every", "1000000"
    command = "--config", "tiny.py", "--workdir", str(workdir), *more
    process = start("-c", SLOW, *command, cwd=place, JAX_PLATFORMS="cpu")
    wait_until(lambda: (workdir / "metrics.jsonl").exists() and len(read_metrics(workdir)) > 2)
    process.terminate()
    stopped = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - stopped < 1.5 + 2
    assert process.returncode == 143
    assert "stopping after this update" in err
    step = int(out.split("after step ")[1].split(",")[0])
    checkpoints = CheckpointReader(workdir)
    assert checkpoints.latest_step() == step >= 3
    assert json.loads((workdir / "last_checkpoint.json").read_text()) == {"step": step}


def test_a_skipped_update_is_reported_with_its_own_loss():
    run, lines, rows = object.__new__(loop._Run), [], []
    run.training = TrainingConfig(steps=2, log_every=2)
    run.losses = []
    mesh = SimpleNamespace(size=1)
    run.program = SimpleNamespace(
        learning_rates=np.ones(2), data=DataConfig(), flops_per_token=1, mesh=mesh
    )
    run.clock = SimpleNamespace(steps_per_second=lambda step: 1.0)
    run.reporter = SimpleNamespace(line=lines.append, training=lambda _, row: rows.append(row))
    for step, loss in ((1, 2.0), (2, math.nan)):
        measured = {"loss": loss, "gradient_norm": 1.0, "consecutive_skips": step - 1}
        run._completed(step, measured)
    assert "the last 1 update(s) up to step 2 were skipped: loss nan" in lines[0]
    assert rows[0]["loss"] == 2.0
