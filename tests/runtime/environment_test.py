"""The environment of a result: the commit, and whether files have changed since."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from heinsen_jax.runtime.environment import environment

FILES = "module.py", "benchmarks/results/record.json"


def git(folder: Path, *arguments: str) -> str:
    author = "-c", "user.name=a", "-c", "user.email=a@example.org"
    command = ["git", *author, *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout without uncommitted changes."""
    monkeypatch.setattr("heinsen_jax.runtime.environment.CHECKOUT", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Begin")):
        git(tmp_path, *command)
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(
    ("name", "is_change"), [(FILES[0], True), (FILES[1], False), ("untracked.py", False)]
)
def test_changes_are_those_of_tracked_files_other_than_records(checkout, name, is_change):
    found = environment()
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    assert not found["uncommitted_changes"]
    (checkout / name).write_text("2")
    assert environment()["uncommitted_changes"] == is_change


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("heinsen_jax.runtime.environment.CHECKOUT", tmp_path)
    found = environment()
    assert (found["commit"], found["uncommitted_changes"]) == ("", False)
    assert (found["jax"], found["num_devices"]) == (jax.__version__, jax.device_count())
