"""Data sets of the Hugging Face Hub, read over the network. Needs the extra `datasets`.

`hf://owner/name`, `hf://owner/name/config`, and `hf://owner/name:split` name the data files of a
repository at its newest commit. They are the sources of the same preparation as local files.
"""

import re
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
from datasets import load_dataset_builder

from heinsen_jax.data.sources import DEFAULT_COLUMN, Source, Streamed, kind_of, with_splits
from heinsen_jax.errors import UserError, explain

_NAME = re.compile(r"hf://(?:datasets/)?([^/:]+/[^/:]+)(?:/([^:]+))?(?::(.+))?")
_TEXT = re.compile(r"(?i)\.(txt|md)(\.(gz|zst|zstd))?$")
_SPLITS = ("train", "validation", "valid", "val", "dev", "test")


def hub_sources(name: str, text_column: str = DEFAULT_COLUMN) -> list[Source]:
    """Return the data files of a data set of the Hub.

    Without a split, these are the files of `train` and, if it exists, `validation`, as published.

    Args:
      name: `hf://owner/name`, with an optional `/config` and `:split`.
      text_column: the column of the documents.

    Raises:
      UserError: the name is invalid, the Hub cannot be read, or the data set has no such split or
        has files of other kinds than Parquet, JSON and text.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"input {name}: not the name of a data set; write hf://owner/name, /config or :split "
            "if needed"
        )
    repository, config, split = match.groups()
    try:
        builder = load_dataset_builder(f"hf://datasets/{repository}", config)
        files: dict[str, list[str]] = dict(builder.config.data_files or {})
        names = [split] if split else [each for each in _SPLITS if each in files]
        if not set(names) <= set(files) or (not split and "train" not in names):
            raise UserError(
                f"input {name}: no split {split or 'train'}; choose one of its splits, "
                f"{', '.join(files)}, by :split"
            )
        sources = [
            (_source(url, text_column), each) for each in names for url in sorted(files[each])
        ]
    except UserError:
        raise
    except Exception as error:  # error classes differ between versions of the libraries
        raise UserError(
            f"input {name} cannot be read from the Hugging Face Hub ({explain(error)}); check the "
            "name and the network; for private data, log in with `hf auth login`"
        ) from error
    return [source for source, _ in sources] if split else with_splits(sources)


def open_file(url: str) -> BinaryIO:
    """Open a file of the Hub for reading."""
    file_system, path = fsspec.url_to_fs(url)
    return cast(BinaryIO, file_system.open(path))


def _source(url: str, text_column: str) -> Source:
    kind = kind_of(url)
    if kind.startswith("text") and not _TEXT.search(url):
        raise UserError(f"{url}: unsupported kind of file; choose data in Parquet or JSON lines")
    file_system, path = fsspec.url_to_fs(url)
    content = file_system.info(path)
    name = re.sub(r"^datasets/|@[^/]+", "", path)  # without the commit
    version = Streamed(url, content["blob_id"])
    return Source(
        name, Path(path), kind, content["size"], streamed=version, text_column=text_column
    )
