"""Checkpoints, runs and prepared data in a bucket."""

import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from heinsen_jax.data import DataConfig, load
from heinsen_jax.errors import UserError
from heinsen_jax.runs import checkpoints as checkpoints_module
from heinsen_jax.runs.checkpoints import CheckpointReader
from heinsen_jax.runs.folder import open_run
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.storage import buckets
from heinsen_jax.training.checkpoint import Checkpoints
from tests.faults.conftest import wait_until
from tests.multi_device.apart import finish, train


def state(value: float):
    return {"w": jnp.full((40, 3), value)}


def flip(path: epath.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_damaged_checkpoints_are_set_aside(bucket, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "REMOVED_WITHIN", 0.0)
    with open_run(bucket) as run, Checkpoints(run) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), loss=float(step))
        folder = checkpoints.folder
        checkpoints.wait()
        assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]
    names = buckets.files_below(folder / "3")
    flip(folder / "3" / next(name for name in names if "/d/" in name))
    flip(folder / "2/default/_METADATA")
    with open_run(bucket) as run:
        checkpoints = CheckpointReader(run)
        assert checkpoints.latest_step() == checkpoints.best_step() == 1
        assert sorted(checkpoints.damaged) == [2, 3]
    with open_run(bucket) as run, Checkpoints(run) as checkpoints:
        assert sorted(checkpoints.damaged) == [2, 3]
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(1, state(0.0))
        checkpoints.save(2, state(4.0))
    np.testing.assert_array_equal(restored["w"], state(1.0)["w"])
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "damaged-2", "damaged-3"]
    assert sorted(buckets.files_below(folder / "damaged-3")) == sorted(names)


def test_an_unfinished_checkpoint_is_ignored(bucket):
    with open_run(bucket) as run, Checkpoints(run) as checkpoints:
        checkpoints.save(1, state(1.0))
    (checkpoints.folder / "2/default/d/file").write_text("killed before commit_success.txt")
    with open_run(bucket) as run, Checkpoints(run) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert not checkpoints.damaged
        checkpoints.save(2, state(2.0))
    with open_run(bucket) as run, Checkpoints(run) as checkpoints:
        assert checkpoints.latest_step() == 2


def test_metrics_are_in_the_bucket_before_their_checkpoint(bucket):
    with open_run(bucket) as run, Checkpoints(run) as checkpoints:
        (run.files / "metrics.jsonl").write_text('{"step": 1}\n')
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        assert (epath.Path(bucket) / "metrics.jsonl").read_text() == '{"step": 1}\n'


def arrays(step: epath.Path) -> dict[str, np.ndarray]:
    """Return all arrays of a checkpoint by name."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = ocp.PyTreeCheckpointHandler().metadata(step / "default").tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(step / "default", ocp.args.PyTreeRestore(restore_args=as_numpy))


@pytest.mark.nightly
def test_a_killed_run_in_a_bucket_resumes_bit_for_bit(place, bucket):
    """Compared with a run that was not killed, on a disk."""
    shared = epath.Path(bucket) / "checkpoints"
    (process,) = train(place, "--workdir", bucket)
    wait_until(lambda: (shared / "5/commit_success.txt").exists())
    process.kill()
    process.communicate()
    assert process.returncode == -9
    assert not (shared / "40/commit_success.txt").exists(), "it was over already"
    ((code, out, err),) = finish(train(place, "--workdir", bucket))
    assert code == 0, err
    assert f"continuing {bucket} from step " in out
    assert f"loss plot: {bucket}/loss.png" in out
    ours, theirs = arrays(shared / "40"), arrays(epath.Path(place) / "finished/checkpoints/40")
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)
    with open_run(bucket) as run:
        rows, expected = read_metrics(run.files), read_metrics(place / "finished")
    assert [row.get("train/loss") for row in rows] == [row.get("train/loss") for row in expected]
    assert [row.get("validation/loss") for row in rows] == [
        row.get("validation/loss") for row in expected
    ]
    names = {path.name for path in epath.Path(bucket).iterdir()}
    assert names > {"config.json", "metrics.jsonl", "tensorboard", "samples", "loss.png"}
    assert ".lock" not in names
    _, tokenizer, step = load_run(bucket, best=False)
    assert step == 40
    assert tokenizer is not None


def test_prepared_data_are_downloaded_once(bucket, tmp_path):
    (tmp_path / "words.txt").write_text("attention at constant cost per token " * 500)
    local = DataConfig(corpus=str(tmp_path / "words.txt"), cache=str(tmp_path / "prepared"))
    dataset = load(local)
    remote = epath.Path(bucket) / "prepared"
    for path in dataset.folder.iterdir():
        if not path.name.startswith("."):
            (remote / path.name).write_bytes(path.read_bytes())
    config = DataConfig(corpus=str(remote), cache=str(tmp_path / "cache"), verify=True)
    fetched = load(config)
    assert fetched.manifest == dataset.manifest
    assert fetched.folder.parent == tmp_path / "cache"
    read = [x.split("train").read(0, 0, 100) for x in (dataset, fetched)]
    np.testing.assert_array_equal(*read)
    before = {path: path.stat().st_mtime_ns for path in fetched.folder.glob("*.bin")}
    load(config)
    assert {path: path.stat().st_mtime_ns for path in fetched.folder.glob("*.bin")} == before
    (shard,) = fetched.folder.glob("train-*.bin")
    shutil.rmtree(fetched.folder)
    flip(remote / shard.name)
    with pytest.raises(UserError, match=rf"{shard.name} is damaged .* copy it to the bucket again"):
        load(config)
    (remote / shard.name).unlink()
    with pytest.raises(UserError, match=rf"data\.corpus .*{shard.name} cannot be read"):
        load(config)
    (remote / shard.name).write_bytes((dataset.folder / shard.name).read_bytes())
    load(config)  # resumes


def test_a_bucket_without_prepared_data_is_refused(bucket):
    with pytest.raises(UserError, match=r"data\.corpus gs://bucket/.* holds no manifest\.json"):
        load(DataConfig(corpus=bucket))
    with pytest.raises(UserError, match=r"data\.corpus s3://bucket/x: only buckets of Google"):
        load(DataConfig(corpus="s3://bucket/x"))


@pytest.mark.nightly
def test_a_second_trainer_is_refused(place, bucket):
    with buckets.locked(epath.Path(bucket)):
        ((code, _, err),) = finish(train(place, "--workdir", bucket, "--training.steps", "41"))
    assert code == 2
    assert err.splitlines()[-1].startswith(f"error: {bucket} is in use by process ")


@pytest.mark.nightly
def test_two_processes_train_in_a_bucket(place, bucket):
    """Neither has any other folder in common."""
    ends = finish(train(place, "--workdir", bucket, "--training.steps", "20", processes=2))
    for code, _, err in ends:
        assert code == 0, err
    ends = finish(train(place, "--workdir", bucket, processes=2))
    for code, _, err in ends:
        assert code == 0, err
    assert f"continuing {bucket} from step 20" in ends[0][1]
    assert load_run(bucket, best=False)[2] == 40
