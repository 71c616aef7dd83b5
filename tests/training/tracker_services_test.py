"""The services themselves, with local storage; a run that resumes stays one tracked run."""

import sys
import time
from dataclasses import replace

import pytest

from heinsen_jax.config import override
from heinsen_jax.data import load
from heinsen_jax.errors import UserError
from heinsen_jax.runtime.environment import environment
from heinsen_jax.training.config import as_json
from heinsen_jax.training.settings import resolve_settings
from heinsen_jax.training.tracker_services import services
from heinsen_jax.training.trackers import TrackedRun, Tracking


@pytest.fixture
def started_twice(small, tmp_path):
    """Start a tracker, log step 5 and 10, resume from step 5, and log step 10 again."""

    config = replace(small, data=replace(small.data, mixture={"hf://owner/name": 1.0}))

    def start(name):
        said = []
        for rows in ({5: 2.0, 10: 1.0}, {10: 1.5}):
            with Tracking(services([name]), said.append) as tracking:
                tracking.start(TrackedRun("run", "tests", tmp_path, as_json(config), environment()))
                for step, loss in rows.items():
                    tracking.log(step, {"train/loss": loss, "train/skipped": float("nan")})
                tracking.finish("stopped" if 5 in rows else "finished")
        assert not said
        return tmp_path

    return start


def test_wandb(started_twice, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = started_twice("wandb")
    files = [*folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    deadline = time.monotonic() + 30  # wandb's own process writes them
    while not all(b"train/loss" in path.read_bytes() for path in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert b"model_dim" in files[0].read_bytes()


def test_trackio(started_twice, tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    for module in (trackio.utils, storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    started_twice("trackio")
    (run,) = trackio.Api().runs("tests")
    assert run.name == "run"
    assert run.config["model"]["model_dim"] == 32
    logs = storage.SQLiteStorage.get_logs("tests", "run")
    assert [(row["step"], row["train/loss"]) for row in logs] == [(5, 2.0), (10, 1.0), (10, 1.5)]


def test_mlflow(started_twice, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    started_twice("mlflow")
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["model.model_dim"] == "32"
    assert run.data.tags["commit"] == environment()["commit"]
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(row.step, row.value) for row in history] == [(5, 2.0), (10, 1.0), (10, 1.5)]


def test_a_missing_extra_is_named_before_training(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = override(small, ["--training.trackers", "wandb"])
    with pytest.raises(UserError, match=r"training.trackers: .*wandb.*heinsen_jax\[wandb\]"):
        resolve_settings(config, load(config.data))
