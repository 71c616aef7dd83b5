"""One process at a time in a folder."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from heinsen_jax.data.prepare import prepare
from heinsen_jax.errors import UserError
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.storage.locks import LOCK_FILE, locked
from studies.runner import run_study
from tests.faults.conftest import ENDLESS, assert_one_line, has_checkpoint, wait_until
from tests.multi_device.apart import finish, train
from tests.studies.small import SMALLER


@pytest.mark.nightly
def test_a_second_trainer_is_refused_and_the_first_continues(place, tmp_path):
    """The lock of a killed process is released."""
    workdir = tmp_path / "run"
    (first,) = train(place, "--workdir", str(workdir), *ENDLESS)
    wait_until(lambda: has_checkpoint(workdir))
    ((code, _, err),) = finish(train(place, "--workdir", str(workdir), "--seed", "1"))
    assert code == 2
    assert_one_line(err, f"{workdir} is in use by process {first.pid} on {socket.gethostname()}")
    before = len(read_metrics(workdir))
    wait_until(lambda: len(read_metrics(workdir)) > before)
    first.kill()
    first.communicate()
    assert f'"pid": {first.pid}' in (workdir / LOCK_FILE).read_text()
    steps = [row["step"] for row in read_metrics(workdir)]
    assert steps == [*range(1, len(steps) + 1)]
    last = str(len(steps) + 10)
    ((code, out, err),) = finish(train(place, "--workdir", str(workdir), "--training.steps", last))
    assert code == 0, err
    assert f"step {last}/{last}" in out


HOLD = """
import sys
from pathlib import Path
from heinsen_jax.storage.locks import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """Yield a folder that another process has locked, and that process."""
    folder = tmp_path / "folder"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield folder, process
        process.kill()


def test_a_lock_names_its_owner_and_ends_with_it(held):
    folder, process = held
    owner = rf"in use by process {process.pid} on {socket.gethostname()}, since 20\d\d-"
    with pytest.raises(UserError, match=owner), locked(folder):
        raise AssertionError
    process.kill()
    process.wait()
    with locked(folder):
        assert f'"pid": {os.getpid()}' in (folder / LOCK_FILE).read_text()


def test_a_study_and_a_preparation_lock_their_output(held, tmp_path):
    folder, _ = held
    (tmp_path / "a.txt").write_text("words " * 100)
    with pytest.raises(UserError, match="is in use by process"):
        prepare([str(tmp_path / "a.txt")], "bytes", folder)
    with pytest.raises(UserError, match="is in use by process"):
        run_study(SMALLER, folder, lambda runs, folder: pytest.fail("runs begin"))


def test_training_waits_for_another_process_that_prepares_its_data(held, tmp_path, capfd):
    folder, process = held
    (tmp_path / "a.txt").write_text("words " * 100)
    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(prepare, [str(tmp_path / "a.txt")], "bytes", folder, wait=True)
        said, deadline = "", time.monotonic() + 60
        while "waiting until it ends" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert f"in use by process {process.pid}" in said
        assert not prepared.done()
        process.kill()
        assert prepared.result(60).splits["train"].tokens


def test_a_lock_that_may_not_be_opened_is_refused(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(UserError, match=r"\.lock cannot be opened"), locked(tmp_path):
        raise AssertionError


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("heinsen_jax.storage.locks.FileLock.acquire", refuse)
    said = "cannot be locked .*not supported.* no other process uses it"
    with pytest.warns(match=said), locked(tmp_path):
        pass
