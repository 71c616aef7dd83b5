"""Files appear with their complete content, which is on the disk by then."""

import os

import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.storage import files
from heinsen_jax.storage.files import filling, free_name, replacing, write_atomically


def test_content_is_on_the_disk_before_it_replaces_the_file(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    path.write_bytes(b"old")

    def fsync(number: int) -> None:
        synced.append((os.fstat(number).st_size, path.read_bytes()))

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_atomically(path, b"newer")
    assert synced == [(5, b"old")]
    assert path.read_bytes() == b"newer"


def test_an_error_leaves_the_previous_content_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"newer", "text"])  # type: ignore[list-item]
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == {"a": b"old"}


def test_a_folder_is_filled_as_a_whole_or_not_at_all(tmp_path):
    def fill(content: str) -> None:
        with filling(tmp_path / "a") as partial:
            (partial / "x").write_text("content")
            assert not (tmp_path / "a").exists()
            if content == "too long":
                raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot be written"):
        fill("too long")
    assert not [*tmp_path.iterdir()]
    fill("content")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "x").read_text() == "content"


def test_names_that_are_in_use_get_a_number(tmp_path):
    for name in ("a", "a-2", "a-3"):
        assert free_name(tmp_path / "a").name == name
        (tmp_path / name).touch()
