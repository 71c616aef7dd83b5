"""Files and folders as sources, those in the form of the Hugging Face Hub among them."""

from pathlib import Path

import pytest

from heinsen_jax.data.sources import check_sources, find_sources
from heinsen_jax.errors import UserError


def found(folder: Path, *names: str) -> dict[str, tuple[str, str | None]]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    sources = find_sources(folder)
    return {source.name.partition("/")[2]: (source.kind, source.split) for source in sources}


def test_kinds_are_known_by_their_suffix(tmp_path):
    kinds = {
        "a.jsonl": "jsonl",
        "a.jsonl.gz": "jsonl.gz",
        "a.jsonl.zst": "jsonl.zst",
        "a.md": "text",
        "a.parquet": "parquet",
        "a.txt": "text",
        "a.txt.gz": "text.gz",
    }
    assert found(tmp_path, *kinds) == {name: (kind, None) for name, kind in kinds.items()}


TRAIN = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")


@pytest.mark.parametrize(
    ("names", "validation", "test"),
    [
        (TRAIN, "data/validation-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        (("train-00000-of-00001-1a2b3c.parquet",), "validation.parquet", "test.parquet"),
        (("train/0000.parquet", "train/0001.parquet"), "validation/0000.parquet", "test/0.parquet"),
        (("train.jsonl",), "valid.jsonl.gz", "test.jsonl"),
        (("train/00.jsonl.zst", "train/01.jsonl.zst"), "val.jsonl.zst", "test.jsonl.zst"),
    ],
)
def test_published_splits_of_a_folder_are_kept(names, validation, test, tmp_path):
    others = ("README.md", ".gitattributes", "dataset_infos.json")
    splits = found(tmp_path / "a", *names, validation, test, *others)
    assert {name: split for name, (_, split) in splits.items()} == {
        **dict.fromkeys(names, "train"),
        validation: "validation",
        test: "test",
    }
    assert found(tmp_path / "b", *names, test) == {
        name: (kind, None) for name, (kind, split) in splits.items() if split == "train"
    }


def test_other_folders_have_no_published_split(tmp_path):
    for number, names in enumerate(
        [("train.jsonl", "validation.jsonl", "notes.txt"), ("validation.jsonl", "test.jsonl")]
    ):
        splits = found(tmp_path / str(number), *names)
        assert splits.keys() == {*names}
        assert {split for _, split in splits.values()} == {None}


def test_a_column_of_files_without_columns_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="text_column=body: the inputs have no columns"):
        check_sources(find_sources(tmp_path, "body"))


def test_only_another_column_changes_the_identity(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (source,), (other,) = find_sources(tmp_path), find_sources(tmp_path, "body")
    assert source.identity[3].isalnum()
    assert other.identity != source.identity
