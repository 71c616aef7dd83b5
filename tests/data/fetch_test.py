"""Prepared data are downloaded once, and each shard is verified."""

import os
from pathlib import Path

import pytest
from etils import epath

from heinsen_jax.data.fetch import fetch_prepared
from heinsen_jax.data.manifest import MANIFEST_FILE
from heinsen_jax.data.prepare import prepare
from heinsen_jax.errors import UserError


@pytest.fixture
def remote(tmp_path) -> epath.Path:
    """A folder in place of one in a bucket."""
    (tmp_path / "a.txt").write_text("exact attention in constant memory " * 20)
    prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "remote", validation_fraction=0.2)
    return epath.Path(tmp_path / "remote")


def contents(folder: os.PathLike) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


def test_a_folder_is_fetched_once_and_again_if_it_has_changed(remote, tmp_path):
    cache = tmp_path / "cache"
    folder = fetch_prepared(remote, cache)
    fetched = contents(folder)
    assert fetched == {name: x for name, x in contents(remote).items() if name in fetched}
    (folder / MANIFEST_FILE).unlink()  # as if the download had been interrupted
    (shard,) = folder.glob("train-*.bin")
    shard.unlink()
    assert fetch_prepared(remote, cache) == folder
    assert contents(folder) == fetched
    path = remote / MANIFEST_FILE
    path.write_text(path.read_text() + "\n")
    assert fetch_prepared(remote, cache) != folder


def test_a_damaged_shard_is_refused_and_not_kept(remote, tmp_path):
    (shard,) = remote.glob("train-*.bin")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(UserError, match=f"{shard.name} is damaged"):
        fetch_prepared(remote, tmp_path / "cache")
    assert not [*(tmp_path / "cache").rglob(f"{shard.name}*")]
    assert not [*(tmp_path / "cache").rglob(MANIFEST_FILE)]
