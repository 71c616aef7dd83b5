"""Checkpoints: retention, restoration, and damage."""

import errno
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from heinsen_jax.config import ExperimentConfig, OptimizerConfig, as_json
from heinsen_jax.data import Induction
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.runs import checkpoints as checkpoints_module
from heinsen_jax.runs import checksums
from heinsen_jax.runs.checkpoints import CheckpointReader
from heinsen_jax.runs.checksums import (
    WRITTEN_LAST,
    find_damage,
    find_damaged_array,
    write_checksums,
)
from heinsen_jax.runs.folder import RunFolder
from heinsen_jax.runs.load import load_run
from heinsen_jax.runtime import distributed
from heinsen_jax.training import checkpoint
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.guard import Guard
from heinsen_jax.training.state import TrainState
from tests.models.small import random_model


def state(value: float) -> TrainState:
    parameters = {"w": jnp.full((4, 3), value)}
    return TrainState(jnp.array(1), parameters, (jnp.full(3, -value),), Guard.first())


def saved(tmp_path, *steps: tuple[int, float | None]):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, loss in steps:
            checkpoints.save(step, state(step), loss=loss)
    return checkpoints.folder


def test_checkpoints_are_restored_bit_for_bit(tmp_path, caplog):
    parameters = {"w": jnp.array([1.1, jnp.nan, -0.0, 1e-45, jnp.inf])}
    before = TrainState(jnp.array(7), parameters, (jnp.ones(5),), Guard.first())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, before)
    with Checkpoints(tmp_path) as checkpoints:
        after = checkpoints.restore(7, before)
    assert not caplog.records, "of libraries"
    assert after.parameters["w"].tobytes() == before.parameters["w"].tobytes()
    assert int(after.step) == 7
    np.testing.assert_array_equal(after.optimizer[0], before.optimizer[0])


def test_losses_of_other_data_are_not_compared(tmp_path):
    saved(tmp_path, (1, 1.0), (2, 2.0))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.forget_losses(2)
        for step, loss in ((3, 5.0), (4, 6.0), (5, 7.0)):
            checkpoints.save(step, state(step), loss=loss)
        checkpoints.wait()
        assert checkpoints.best_step() == 3
    reader = CheckpointReader(RunFolder(tmp_path))
    assert reader.best_step() == 3
    assert sorted(path.name for path in reader.folder.iterdir() if path.is_dir()) == ["3", "4", "5"]


def test_the_latest_and_the_best_are_kept(tmp_path):
    folder = saved(tmp_path, (1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5))
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["2", "4", "5"]
    with Checkpoints(tmp_path) as writer:
        for checkpoints in (writer, CheckpointReader(tmp_path)):
            assert (checkpoints.latest_step(), checkpoints.best_step()) == (5, 2)


def test_a_loss_that_is_not_a_number_is_never_the_best(tmp_path):
    saved(tmp_path, (1, 3.0), (2, math.nan), (3, 4.0))
    with Checkpoints(tmp_path) as writer:
        for checkpoints in (writer, CheckpointReader(tmp_path)):
            assert (checkpoints.latest_step(), checkpoints.best_step()) == (3, 1)


@pytest.mark.parametrize("has_average", [False, True])
@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_the_average_of_the_weights_is_loaded_if_the_checkpoint_has_one(
    tmp_path, ema_decay, has_average
):
    """The run may have resumed without one, by --allow-change."""
    sizes = {"vocab_size": 11, "model_dim": 8, "num_layers": 1, "num_heads": 2}
    model = random_model(LanguageModelConfig(attention="linear", **sizes))
    parameters = nnx.state(model, nnx.Param)
    average = jax.tree.map(lambda x: x + 1, parameters) if has_average else None
    optimizer = OptimizerConfig(ema_decay=ema_decay)
    config = ExperimentConfig(model=model.config, data=Induction(), optimizer=optimizer)
    (tmp_path / "config.json").write_text(json.dumps(as_json(config)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, TrainState(jnp.array(5), parameters, (), Guard.first(), average))
    loaded, tokenizer, step = load_run(tmp_path)
    assert (tokenizer, step) == (None, 5)
    wanted = average if has_average else parameters
    for have, want in zip(
        *map(jax.tree.leaves, (nnx.state(loaded, nnx.Param), wanted)), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def test_a_part_of_the_state_can_be_restored(tmp_path):
    saved(tmp_path, (2, None))
    part = {"parameters": {"w": jnp.zeros((4, 3))}}
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(2, part)
    np.testing.assert_array_equal(restored["parameters"]["w"], jnp.full((4, 3), 2.0))


FULL_DISK = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from heinsen_jax.errors import UserError
from heinsen_jax.runs.checkpoints import CheckpointReader
from heinsen_jax.training.checkpoint import Checkpoints

state = {"w": jnp.arange(100_000.0)}
with Checkpoints(Path(sys.argv[1]), keep=1) as checkpoints:
    checkpoints.save(1, state)
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoints.save(2, state)
        checkpoints.wait()
    except UserError as error:
        print(error)
"""


def test_a_failed_write_keeps_the_previous_step(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert f"{tmp_path / 'checkpoints'}: a checkpoint cannot be written" in said
    assert "File too large" in said
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(1, {"w": jnp.zeros(100_000)})
    np.testing.assert_array_equal(restored["w"], np.arange(100_000.0))


def test_a_partially_written_step_is_not_the_latest(tmp_path):
    (saved(tmp_path, (1, None)) / "2.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


WAYS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "flipped": flip,
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("truncated", marks=pytest.mark.nightly),
        pytest.param("emptied", marks=pytest.mark.nightly),
        pytest.param("deleted", marks=pytest.mark.nightly),
        "flipped",
    ],
)
def test_damage_to_any_file_is_detected_and_the_previous_step_is_used(tmp_path, way, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "REMOVED_WITHIN", 0.0)
    folder = saved(tmp_path / "original", (1, None), (2, None))
    names = [path.relative_to(folder) for path in files(folder / "2")]
    assert len(names) > 8
    for i, name in enumerate(names):
        workdir = tmp_path / str(i)
        shutil.copytree(tmp_path / "original", workdir)
        WAYS[way](workdir / "checkpoints" / name)
        reader = CheckpointReader(workdir)
        assert reader.latest_step() == reader.best_step() == 1, name
        with Checkpoints(workdir) as checkpoints:
            assert list(checkpoints.damaged) == [2], name
            assert checkpoints.latest_step() == 1
            restored = checkpoints.restore(1, state(0.0))
            checkpoints.save(2, state(2.0))
        np.testing.assert_array_equal(restored.parameters["w"], jnp.full((4, 3), 1.0))
        assert (workdir / "checkpoints/damaged-2").is_dir()
        with Checkpoints(workdir) as checkpoints:
            assert not checkpoints.damaged
            assert checkpoints.latest_step() == 2


def test_errors_are_named(tmp_path):
    folder = saved(tmp_path, (1, None), (2, None), (3, None))
    flip(folder / "2/default/manifest.ocdbt")
    (folder / "3/more").touch()
    checkpoints = CheckpointReader(tmp_path)
    assert checkpoints.damaged == {
        2: "default/manifest.ocdbt is not as it was written",
        3: "more does not belong there",
    }


@pytest.mark.parametrize("name", [".DS_Store", "default/._manifest.ocdbt", "@eaDir/more"])
def test_files_that_systems_create_are_no_damage(name, tmp_path):
    folder = saved(tmp_path, (1, None))
    (folder / "1" / name).parent.mkdir(exist_ok=True)
    (folder / "1" / name).touch()
    assert not CheckpointReader(tmp_path).damaged


def arrays(folder, step):
    """Return the files with the content of a step's arrays."""
    return [path for path in files(folder / str(step)) if path.parent.name == "d"]


def test_only_the_arrays_of_the_step_that_is_used_are_read(tmp_path, monkeypatch):
    folder = saved(tmp_path, (1, 1.0), (2, 2.0), (3, 3.0))
    read = set()
    hashes = checksums._hashes

    def recording(step, names, algorithm):
        names = list(names)
        read.update(step / name for name in names)
        return hashes(step, names, algorithm)

    monkeypatch.setattr(checksums, "_hashes", recording)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 3
    assert {*arrays(folder, 3)} < read
    assert not read & {*arrays(folder, 1), *arrays(folder, 2)}
    assert folder / "1/metrics/metrics" in read
    read.clear()
    checkpoints = CheckpointReader(tmp_path)
    assert checkpoints.best_step() == checkpoints.best_step() == 1
    assert {*arrays(folder, 1)} < read
    assert not read & {*arrays(folder, 2), *arrays(folder, 3)}


@pytest.mark.nightly
def test_a_reader_uses_the_second_best_if_the_best_is_damaged(tmp_path):
    folder = saved(tmp_path, (1, 1.0), (2, 2.0), (3, 3.0))
    flip(arrays(folder, 1)[0])
    checkpoints = CheckpointReader(tmp_path)
    assert checkpoints.damaged == {}
    assert checkpoints.best_step() == 2
    assert "is not as it was written" in checkpoints.damaged[1]


def test_every_file_of_arrays_is_in_one_share(tmp_path):
    folder = saved(tmp_path, (1, None)) / "1"
    assert len(arrays(folder.parent, 1)) > 3
    for path in arrays(folder.parent, 1):
        flip(path)
        found = [find_damaged_array(folder, share, 3) for share in range(3)]
        name = path.relative_to(folder).as_posix()
        assert sorted(filter(None, found)) == [f"{name} is not as it was written"]
        flip(path)


def test_checkpoints_with_the_hashes_of_earlier_versions_are_verified(tmp_path, monkeypatch):
    earlier = {"sha256": checksums.ALGORITHMS["sha256"]}
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "ALGORITHMS", earlier)
        folder = saved(tmp_path, (1, None), (2, None))
    assert (folder / "1/sha256.json").exists()
    flip(arrays(folder, 2)[0])
    with Checkpoints(tmp_path) as checkpoints:
        assert list(checkpoints.damaged) == [2]
        assert checkpoints.latest_step() == 1
        checkpoints.save(3, state(3.0))
    assert (folder / "3/xxh3_128.json").exists()


def test_a_step_is_valid_if_killed_before_its_last_files(tmp_path):
    folder = saved(tmp_path, (1, None)) / "1"
    for name in WRITTEN_LAST:
        (folder / name).rename(tmp_path / name)
    write_checksums(folder)
    for name in WRITTEN_LAST:
        (tmp_path / name).rename(folder / name)
    assert find_damage(folder) is None
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
    flip(folder / "commit_success.txt")
    assert find_damage(folder) == "commit_success.txt is not as it was written"


def test_arrays_that_were_not_saved_are_refused(tmp_path):
    saved(tmp_path, (1, None))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(UserError, match=r"checkpoints/1 has no parameters.other: .* --restart"),
    ):
        checkpoints.restore(1, {"parameters": {"other": jnp.zeros(3)}})


def failing(monkeypatch, name: str, error: OSError) -> None:
    """Let each read of a file of this name fail."""
    original = Path.open

    def open_(path, *args, **kwargs):
        if path.name == name:
            raise error
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)


@pytest.mark.parametrize("name", ["xxh3_128.json", "manifest.ocdbt"])
@pytest.mark.parametrize("opened", [Checkpoints, CheckpointReader])
def test_a_step_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch, name, opened):
    folder = saved(tmp_path, (1, None), (2, None))
    with monkeypatch.context() as patch:
        failing(patch, name, PermissionError(errno.EACCES, "Permission denied"))
        denied = r"cannot be read \(.*Permission denied.*same command"
        with pytest.raises(UserError, match=denied):
            opened(tmp_path)
    assert (folder / "2").is_dir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 2


@pytest.mark.parametrize("name", ["xxh3_128.json", "manifest.ocdbt"])
def test_an_unreadable_sector_is_damage(tmp_path, monkeypatch, name):
    folder = saved(tmp_path, (1, None))
    error = OSError(errno.EIO, "Input/output error", str(folder / "1" / name))
    failing(monkeypatch, name, error)
    found = str(find_damage(folder / "1"))
    assert found in (
        checksums.NO_CHECKSUMS,
        f"{error.filename} cannot be read (Input/output error)",
    )


def test_a_failed_read_of_arrays_advises_to_try_again(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("UNAVAILABLE: HTTP response code: 503")

    saved(tmp_path, (1, None))
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
        with pytest.raises(UserError, match=r"503\): check the disk or network"):
            checkpoints.restore(1, state(0.0))


@pytest.mark.parametrize("name", ["find_damaged_array", "move", "_finished"])
def test_errors_of_verification_reach_all_processes(tmp_path, monkeypatch, name):
    def fail(*_):
        raise ZeroDivisionError

    folder = saved(tmp_path, (1, None), (2, None))
    flip(arrays(folder, 2)[0])
    checkpoints = object.__new__(Checkpoints)
    checkpoints._open(tmp_path)
    gathered = []
    monkeypatch.setattr(distributed, "gather", lambda text: gathered.append(text) or [text])
    monkeypatch.setattr(checkpoints if name == "_finished" else checkpoint, name, fail)
    with pytest.raises(ZeroDivisionError):
        checkpoints._verify_newest()
    assert gathered[-1:] == ["ZeroDivisionError()"]


def test_a_folder_without_a_run_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"holds no run .* train one with .* or import"):
        load_run(tmp_path)


def test_a_writer_removes_what_a_killed_one_left_and_a_reader_does_not(tmp_path):
    folder = saved(tmp_path, (1, None))
    unfinished = folder / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    checkpoints = CheckpointReader(tmp_path)
    restored = checkpoints.restore(1, state(0.0))
    np.testing.assert_array_equal(restored.parameters["w"], jnp.full((4, 3), 1.0))
    assert unfinished.is_dir()
    saved(tmp_path, (3, None))
    assert not unfinished.is_dir()


def test_the_newest_is_the_best_if_none_was_evaluated(tmp_path):
    saved(tmp_path, (1, None), (2, None))
    checkpoints = CheckpointReader(tmp_path)
    assert checkpoints.best_step() == 2
