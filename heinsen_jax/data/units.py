"""Preparation in units: the plan, and the pure function that processes one unit."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pydantic

from heinsen_jax.data.documents import Document, read_documents
from heinsen_jax.data.manifest import Recipe, Record, Shard, SplitKind, numpy_dtype, token_dtype
from heinsen_jax.data.sources import SPLITS, Source, SplitName
from heinsen_jax.data.tokenizers import Tokenizer, load_tokenizer, start_ids
from heinsen_jax.storage.files import joint_hash, replacing

UNIT_BYTES = 64 << 20


@dataclass(frozen=True)
class SplitRule:
    """Rule that assigns text to training, validation and, with a `test_fraction`, test.

    - `document`: by a hash of each document's content, so that equal documents stay together.
    - `tail`: the last characters of the only document are for test, the ones before for validation.
    - `tails`: the last characters of each document, likewise.
    - `published`: as published.
    - `validation`: everything is for validation.

    The tokens of `document_start` precede each part of a document in a split. An end-of-text token
    follows it, except with `tail`.
    """

    kind: SplitKind
    validation_fraction: float | None
    test_fraction: float = 0.0

    def divide(self, document: Document) -> Iterator[tuple[SplitName, str]]:
        """The parts of a document and their splits."""
        fraction = self.validation_fraction
        if self.kind == "validation":
            yield "validation", document.text
        elif document.split is not None:
            yield document.split, document.text
        elif fraction is None:
            raise ValueError("a document without a published split needs a validation fraction")
        elif self.kind in ("tail", "tails"):
            length, held_out = len(document.text), fraction + self.test_fraction
            cut, end = int((1 - held_out) * length), int((1 - self.test_fraction) * length)
            yield "train", document.text[:cut]
            yield "validation", document.text[cut:end]
            yield "test", document.text[end:]
        else:
            digest = hashlib.sha256(document.text.encode("utf-8")).digest()
            number = int.from_bytes(digest[:8], "big") / 2**64
            name: SplitName = "validation" if number < fraction else "train"
            if fraction <= number < fraction + self.test_fraction:
                name = "test"
            yield name, document.text


@dataclass(frozen=True)
class Unit:
    """A part of the preparation that is processed as a unit."""

    index: int
    sources: tuple[Source, ...]
    rule: SplitRule
    fingerprint: str
    """Equal for two units if and only if they give the same shards."""

    @property
    def record_file(self) -> str:
        return f"unit-{self.index:05d}.json"

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)

    def resolved(self) -> "Unit":
        """A copy with absolute paths."""
        sources = (replace(source, path=source.path.resolve()) for source in self.sources)
        return replace(self, sources=tuple(sources))


class UnitRecord(Record):
    """Record of a processed unit and its shards. A split without text has no shard."""

    fingerprint: str
    shards: dict[SplitName, Shard]


def plan_units(recipe: Recipe, rule: SplitRule, sources: Sequence[Source]) -> list[Unit]:
    """Divide the sources, in order, into units of at most `UNIT_BYTES`, or of one source."""
    shared = recipe.tokenizer_fingerprint, *map(str, recipe.start_ids), repr(rule)
    groups: list[list[Source]] = []
    size = math.inf
    for source in sources:
        if size + source.size > UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(source)
        size += source.size
    return [
        Unit(
            index,
            tuple(group),
            rule,
            joint_hash(*shared, *(str(source.identity) for source in group)),
        )
        for index, group in enumerate(groups)
    ]


def process_unit(
    unit: Unit, output: Path, on_read: Callable[[int], None] = lambda count: None
) -> UnitRecord:
    """Write the shards of one unit and then its record; depends only on its arguments.

    Args:
      unit: the unit; its sources must have been downloaded.
      output: the folder of the data set, which has the tokenizer.
      on_read: called with the number of bytes of each read.
    """
    tokenizer = load_tokenizer(output)
    dtype = numpy_dtype(token_dtype(tokenizer.vocab_size))
    start = np.array(document_start(tokenizer), dtype)
    end = np.array([tokenizer.end_of_text_id] if unit.rule.kind != "tail" else [], dtype)
    with ExitStack() as files:
        writers: dict[SplitName, _ShardWriter] = {
            name: _ShardWriter(output / f"{name}-{unit.index:05d}.bin", files) for name in SPLITS
        }
        for source in unit.sources:
            for document in read_documents(source, on_read):
                for name, text in unit.rule.divide(document):
                    if text:
                        tokens = tokenizer.encode_to_numpy(text).astype(dtype)
                        writers[name].append((start, tokens, end), text)
        shards: dict[SplitName, Shard] = {
            name: writer.shard() for name, writer in writers.items() if writer.documents
        }
    record = UnitRecord(fingerprint=unit.fingerprint, shards=shards)
    record.write(output / unit.record_file)
    return record


def document_start(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens prepended to each part of a document: `start_ids`, unless they include the end-of-text
    token, which precedes each document already."""
    start = start_ids(tokenizer)
    return () if tokenizer.end_of_text_id in start else start


class _ShardWriter:
    """Streams tokens into a file, which is created with the first token."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.documents = 0
        self._path = path
        self._files = files
        self._file: BinaryIO | None = None
        self._tokens = self._bytes = 0
        self._digest = hashlib.sha256()

    def append(self, arrays: Sequence[np.ndarray], text: str) -> None:
        self._file = self._file or self._files.enter_context(replacing(self._path))
        for tokens in arrays:
            content = tokens.tobytes()
            self._file.write(content)
            self._digest.update(content)
            self._tokens += len(tokens)
        self._bytes += len(text.encode("utf-8"))
        self.documents += 1

    def shard(self) -> Shard:
        return Shard(
            file=self._path.name,
            tokens=self._tokens,
            bytes=self._bytes,
            documents=self.documents,
            sha256=self._digest.hexdigest(),
        )


def read_record(unit: Unit, output: Path) -> UnitRecord | None:
    """Read the record of a unit; `None` if the unit must be processed (again)."""
    try:
        record = UnitRecord.model_validate_json((output / unit.record_file).read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None
    exists = all((output / shard.file).is_file() for shard in record.shards.values())
    return record if exists and record.fingerprint == unit.fingerprint else None
