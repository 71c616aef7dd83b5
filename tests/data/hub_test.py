"""Data sets of the Hugging Face Hub, of which a folder and a file system take the place."""

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset_builder

from heinsen_jax.data import hub
from heinsen_jax.data.documents import read_documents
from heinsen_jax.data.hub import hub_sources
from heinsen_jax.data.prepare import prepare
from heinsen_jax.errors import UserError
from tests.data.prepare_test import documents_of


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Return the folder of the files of `me/words`."""
    folder = tmp_path / "words"

    address = "datasets/me/words@1a2b/"

    class Files:
        """The file system of `hf://`."""

        def info(self, path):
            file = folder / path.removeprefix(address)
            return {"size": file.stat().st_size, "blob_id": f"blob of {file.name}"}

        def open(self, path):
            return (folder / path.removeprefix(address)).open("rb")

    def builder(path: str, config: str | None):
        assert path == "hf://datasets/me/words"
        found = load_dataset_builder(str(folder), config).config.data_files
        files = {
            split: [f"hf://{address}{os.path.relpath(name, folder)}" for name in names]
            for split, names in found.items()
        }
        return SimpleNamespace(config=SimpleNamespace(data_files=files))

    monkeypatch.setattr(hub, "load_dataset_builder", builder)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (Files(), url.removeprefix("hf://")))
    return folder


def write(folder: Path, *names: str) -> None:
    for name in names:
        texts = [f"{name} {row}" for row in range(5)]
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"body": texts}), path)
        else:
            path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))


TRAIN = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")
VALIDATION, TEST = "data/validation-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"


def test_published_splits_are_prepared(repository, tmp_path):
    write(repository, *TRAIN, VALIDATION, TEST)
    out = tmp_path / "out"
    manifest = prepare(["hf://me/words"], "bytes", out, text_column="body")
    assert (manifest.split, manifest.inputs[0].name) == ("published", "hf://me/words")
    train = [f"{name} {row}".encode() for name in TRAIN for row in range(5)]
    assert documents_of(out, "train") == train
    for split, name in (("validation", VALIDATION), ("test", TEST)):
        assert documents_of(out, split) == [f"{name} {row}".encode() for row in range(5)]


def test_sources_are_independent_of_the_commit(repository):
    write(repository, *TRAIN)
    for name in ("hf://me/words", "hf://datasets/me/words", "hf://me/words/default:train"):
        one, other = hub_sources(name, "body")
        assert (one.name, one.kind, one.split) == (f"me/words/{TRAIN[0]}", "parquet", None)
        assert one.identity[2:] == (one.size, f"blob of {Path(TRAIN[0]).name} body")
        assert one.version != other.version
        assert one.place == f"hf://datasets/me/words@1a2b/{TRAIN[0]}"


def test_a_split_by_name(repository):
    write(repository, *TRAIN, VALIDATION, TEST)
    for split, name in (("test", TEST), ("validation", VALIDATION)):
        (source,) = hub_sources(f"hf://me/words:{split}", "body")
        assert (source.name, source.split) == (f"me/words/{name}", None)
        counts: list[int] = []
        texts = [document.text for document in read_documents(source, counts.append)]
        assert texts == [f"{name} {row}" for row in range(5)]
        assert sum(counts) >= source.size


def test_an_interrupted_connection_is_reported(repository, monkeypatch):
    class Broken(io.FileIO):
        def readinto(self, buffer):
            raise RuntimeError("peer closed the connection")  # an error of any HTTP client

    write(repository, "train.jsonl")
    (source,) = hub_sources("hf://me/words", "body")
    monkeypatch.setattr(hub, "open_file", lambda url: Broken(repository / "train.jsonl"))
    with pytest.raises(UserError, match=r"train\.jsonl cannot be read \(peer closed .*resumes"):
        list(read_documents(source, lambda count: None))


def test_rows_of_json(repository):
    write(repository, "train.json", "validation.json")
    assert [(source.kind, source.split) for source in hub_sources("hf://me/words", "body")] == [
        ("jsonl", "train"),
        ("jsonl", "validation"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://me", "write hf://owner/name"),
        ("hf://me/words:other", "choose one of its splits, train, validation, test, by :split"),
        ("hf://me/words/other", "cannot be read from the Hugging Face Hub .*other"),
    ],
)
def test_invalid_names_are_refused(repository, name, message):
    write(repository, *TRAIN, VALIDATION, TEST)
    with pytest.raises(UserError, match=f"input {re.escape(name)}.*{message}"):
        hub_sources(name)


def test_other_data_is_refused(repository):
    write(repository, "data/test-00000-of-00001.parquet")
    with pytest.raises(UserError, match="choose one of its splits, test"):
        hub_sources("hf://me/words")
    (repository / TEST).unlink()
    (repository / "train.csv").write_text("body\na\n")
    with pytest.raises(UserError, match=r"train\.csv: tables of this kind are not read"):
        hub_sources("hf://me/words")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "heinsen_jax.data.hub", raising=False)
    with pytest.raises(UserError, match=r"pip install 'heinsen_jax\[datasets\]'"):
        prepare(["hf://me/words"], "bytes", tmp_path / "out")
