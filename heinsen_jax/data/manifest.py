"""The manifest of a prepared data set: its inputs, its content, and its hashes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic

from heinsen_jax.data.sources import DEFAULT_COLUMN, SplitName
from heinsen_jax.errors import UserError, check_regular
from heinsen_jax.storage.buckets import AnyPath
from heinsen_jax.storage.files import sha256_of, write_atomically

MANIFEST_FILE = "manifest.json"

DtypeName = Literal["uint16", "uint32"]
SplitKind = Literal["document", "tail", "tails", "published", "validation"]


def token_dtype(vocab_size: int) -> DtypeName:
    """The smallest type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def numpy_dtype(name: DtypeName) -> np.dtype:
    """The type of tokens on disk, little-endian on every machine."""
    return np.dtype(name).newbyteorder("<")


class Record(pydantic.BaseModel):
    """Base class of records in JSON, with equal bytes for equal values."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    def as_bytes(self) -> bytes:
        return (self.model_dump_json(indent=2) + "\n").encode()

    def write(self, path: Path) -> None:
        write_atomically(path, self.as_bytes())


class InputRecord(Record):
    """One of the inputs of a data set."""

    name: str
    files: int
    bytes: int
    fingerprint: str


class Recipe(Record):
    """Everything that determines the content of a data set."""

    format_version: Literal[1] = 1
    tokenizer: str
    tokenizer_fingerprint: str
    start_ids: tuple[int, ...] = ()
    """Tokens before each part of a document in a split."""
    split: SplitKind
    validation_fraction: float | None
    test_fraction: float = 0.0
    text_column: str = DEFAULT_COLUMN
    inputs: tuple[InputRecord, ...]


class Shard(Record):
    """A file of raw little-endian token ids."""

    file: str
    tokens: int
    bytes: int
    documents: int
    sha256: str


class Split(Record):
    """A split: its shards and their totals."""

    tokens: int
    bytes: int
    documents: int
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, shards: tuple[Shard, ...]) -> "Split":
        return cls(
            tokens=sum(shard.tokens for shard in shards),
            bytes=sum(shard.bytes for shard in shards),
            documents=sum(shard.documents for shard in shards),
            shards=shards,
        )


class Manifest(Recipe):
    """A complete data set. Bytes count the UTF-8 text, without start and end-of-text tokens."""

    dtype: DtypeName
    vocab_size: int
    splits: dict[SplitName, Split]

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read the manifest in `folder` and check that every shard exists with its full size."""
        path = Path(folder) / MANIFEST_FILE
        check_regular(path)
        try:
            manifest = cls.parse(path.read_bytes(), path)
        except OSError:
            raise UserError(
                f"{folder} holds no {MANIFEST_FILE}; prepare it with "
                f"python -m heinsen_jax.data.prepare INPUT --output {folder}"
            ) from None
        manifest._check_shards(Path(folder))
        return manifest

    @classmethod
    def parse(cls, content: bytes, path: AnyPath) -> "Manifest":
        """The manifest with this content, read from `path`."""
        try:
            return cls.model_validate_json(content)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "content"
            raise UserError(
                f"{path} is damaged ({where}: {problem['msg']}); delete {path.parent}, prepare it "
                "again"
            ) from None

    def check_hashes(self, folder: Path) -> None:
        """Check the hash of every shard.

        Raises:
          UserError: a hash differs; the message names the file.
        """
        for shard in self.shards():
            if sha256_of(path := folder / shard.file) != shard.sha256:
                raise UserError(
                    f"{path} is damaged (its content has another hash); delete {folder} and "
                    "prepare it again"
                )

    def shards(self) -> Iterator[Shard]:
        """The shards of all splits."""
        return (shard for split in self.splits.values() for shard in split.shards)

    def _check_shards(self, folder: Path) -> None:
        for shard in self.shards():
            path, expected = folder / shard.file, shard.tokens * numpy_dtype(self.dtype).itemsize
            if not path.is_file():
                raise UserError(f"{path} is missing; delete {folder} and prepare it again")
            if (size := path.stat().st_size) != expected:
                raise UserError(
                    f"{path} has {size} bytes instead of {expected}; "
                    f"delete {folder} and prepare it again"
                )
