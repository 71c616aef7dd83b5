"""Sources: the files of documents that an input consists of."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal, cast, get_args

from heinsen_jax.data.download import Remote
from heinsen_jax.errors import UserError, check_regular, extra_module
from heinsen_jax.storage.files import sha256_of

RowKind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
"""Kinds whose documents are in a column."""
TextKind = Literal["text", "text.gz", "text.zst", "python"]
"""Kinds with one document."""
Kind = RowKind | TextKind | Literal["wikitext", "openwebtext"]
HeldOut = Literal["validation", "test"]
SplitName = Literal["train", HeldOut]

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")

DEFAULT_COLUMN = "text"

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""Formats by suffix, in small letters; all other files are text."""
_COMPRESSIONS = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst"}
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z", ".rar", ".bz2", ".xz", ".lzma", ".lz4"}
"""Suffixes of unsupported archives and compressions; some archives are valid UTF-8."""
_TABLES = {".csv", ".tsv", ".xls", ".xlsx", ".arrow", ".feather", ".orc", ".parq", ".avro"}
"""Suffixes of unsupported tables, which would be read as text otherwise."""
_HUB_FILE = re.compile(
    r"(?:.*/)?(train|validation|valid|val|dev|test)(?:/\d+|-\d{5}-of-\d{5}(?:-[0-9a-f]+)?)?"
    r"(?i:\.parquet|\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|zstd))?)"
)
"""Data files of a split in a folder in the form of the Hugging Face Hub."""
_HUB_OTHERS = {"README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "dataset_infos.json"}


@dataclass(frozen=True)
class Streamed:
    """A file that is read over the network."""

    url: str
    version: str
    """Hash that determines the content."""


@dataclass(frozen=True)
class Source:
    """A file of documents."""

    name: str
    """Name in records, independent of the location of the file."""
    path: Path
    kind: Kind
    size: int
    """Size of the stored file in bytes."""
    remote: Remote | None = None
    """Source of the download, if the file is not local."""
    streamed: Streamed | None = None
    """Address of the file, if it is read over the network."""
    split: SplitName | None = None
    """The published split of all its documents, if any."""
    text_column: str = DEFAULT_COLUMN
    """The column of its documents, if it has rows."""
    sha256: str | None = None
    """Hash of a local file; None if it was not computed yet."""

    @property
    def has_published_split(self) -> bool:
        return self.kind == "wikitext" or self.split is not None

    @property
    def is_local(self) -> bool:
        return self.remote is None and self.streamed is None

    @property
    def place(self) -> str:
        """Path or address, for messages."""
        return self.streamed.url if self.streamed else str(self.path)

    def hashed(self) -> "Source":
        """A copy with the hash of the content, for which local files are read.

        Raises:
          UserError: it cannot be read.
        """
        try:
            return replace(self, sha256=sha256_of(self.path)) if self.is_local else self
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error

    @property
    def identity(self) -> tuple[str, str, int, str]:
        """Key of the content: equal for equal documents. Reads local files without a hash."""
        if self.streamed:
            digest = self.streamed.version
        else:
            digest = self.remote.sha256 if self.remote else self.sha256 or sha256_of(self.path)
        if self.text_column != DEFAULT_COLUMN:
            digest += f" {self.text_column}"
        return (self.name, self.kind, self.size, digest)

    @property
    def version(self) -> tuple[str | int, ...]:
        """Key that changes whenever the content may have changed; it has the mtime of a local
        file."""
        if self.streamed:
            return (self.name, self.size, self.streamed.version)
        changed = 0 if self.remote else self.path.stat().st_mtime_ns
        # Earlier versions, whose data sets are in caches, read other names of JSON as text.
        kind = ["rows"] if self.kind.startswith("jsonl") and ".jsonl" not in self.name else []
        return (self.name, self.size, changed, *kind)


def find_sources(path: Path, text_column: str = DEFAULT_COLUMN) -> list[Source]:
    """The sources at `path`: a file, or all files under a folder in sorted order.

    Hidden files and folders and `__pycache__` are skipped; all others must be text. If the files,
    besides a README, a license and `dataset_infos.json`, are named by split as on the Hugging Face
    Hub, such as `data/train-00000-of-00002.parquet`, then this split is kept.

    Raises:
      UserError: the path does not exist; or it, or a file in it, is a pipe, a device, a broken
        link, an archive, or a table that is not read.
    """
    if not path.is_dir():
        _check_file(path)
        return [_source(path, path.name, text_column)]
    visible = [file.relative_to(path) for file in _visible_files(path)]
    for relative in visible:
        _check_file(path / relative)
    splits = _hub_splits([relative.as_posix() for relative in visible])
    sources = [
        _source(path / relative, f"{path.resolve().name}/{relative.as_posix()}", text_column)
        for relative in sorted(visible, key=lambda relative: relative.parts)
    ]
    if not splits:
        return sources
    named = ((source, splits.get(source.path.relative_to(path).as_posix())) for source in sources)
    return with_splits([(source, name) for source, name in named if name])


def _check_file(path: Path) -> None:
    check_regular(path)
    if not path.exists():
        raise UserError(f"{path} is a broken link; restore its target, or remove it")


def with_splits(sources: Sequence[tuple[Source, str]]) -> list[Source]:
    """Mark sources with the splits that they are named by; without training or validation sources,
    leave out test sources and mark none."""
    names: dict[str, SplitName] = {"train": "train", "test": "test"}
    chosen = [(source, names.get(name, "validation")) for source, name in sources]
    if {"train", "validation"} <= {split for _, split in chosen}:
        return [replace(source, split=split) for source, split in chosen]
    return [source for source, split in chosen if split != "test"]


def _hub_splits(names: Sequence[str]) -> dict[str, str] | None:
    """The split of each data file of a folder in the form of the Hub; None for other folders."""
    data = [name for name in names if Path(name).name not in _HUB_OTHERS]
    splits = {name: match[1] for name in data if (match := _HUB_FILE.fullmatch(name))}
    return splits if len(splits) == len(data) and "train" in splits.values() else None


def check_sources(sources: Sequence[Source]) -> None:
    """Check, before any is read, that the sources can be read.

    Raises:
      UserError: a source needs a package that is not installed, or a column is named and no source
        has columns.
    """
    if any(source.kind == "parquet" for source in sources):
        extra_module("heinsen_jax.data.parquet")
    column = next((source.text_column for source in sources), DEFAULT_COLUMN)
    if column != DEFAULT_COLUMN and not any(source.kind in get_args(RowKind) for source in sources):
        raise UserError(f"text_column={column}: the inputs have no columns; leave it out")


def kind_of(name: str) -> Kind:
    """Return the kind of a file by its name.

    Raises:
      UserError: it is an archive, a table, or compressed in an unsupported way.
    """
    path = PurePosixPath(name.lower())
    compression = _COMPRESSIONS.get(path.suffix, "")
    suffix = PurePosixPath(path.stem).suffix if compression else path.suffix
    kind = _FORMATS.get(suffix, "text") + compression
    if suffix in _ARCHIVES or kind.startswith("parquet."):
        raise UserError(
            f"{name}: unsupported archive or compression; extract it (.gz and .zst of text and of "
            "lines of JSON are supported)"
        )
    if suffix in _TABLES:
        raise UserError(
            f"{name}: tables of this kind are not read; convert it to .jsonl or .parquet, with the "
            "texts in a column, or rename it to .txt to train on the file as it is"
        )
    return cast(Kind, kind)


def _source(path: Path, name: str, text_column: str) -> Source:
    return Source(name, path, kind_of(str(path)), path.stat().st_size, text_column=text_column)


def _visible_files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for link in filter(Path.is_symlink, (Path(parent, name) for name in folders)):
            if any(x.resolve().is_relative_to(link.resolve()) for x in link.parents):
                raise UserError(f"{link} is a link to a folder that contains it; remove it")
        yield from (Path(parent, name) for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"
