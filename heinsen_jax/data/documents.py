"""Sources and documents: each kind of file is read as a stream of documents."""

import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import zstandard

from heinsen_jax.data.download import Remote
from heinsen_jax.data.files import sha256_of
from heinsen_jax.errors import UserError

Kind = Literal["text", "python", "jsonl", "jsonl.zst", "wikitext", "openwebtext"]
SplitName = Literal["train", "validation"]

SPLITS: tuple[SplitName, ...] = ("train", "validation")

_CHUNK_BYTES = 1 << 20
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError)


class Document(NamedTuple):
    """A unit of text, such as an article or a file."""

    text: str
    split: SplitName | None = None
    """The published split of the document, if any."""


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

    @property
    def has_published_split(self) -> bool:
        return self.kind == "wikitext"

    @cached_property
    def identity(self) -> tuple[str, str, int, str]:
        """Key of the content: equal for equal documents. Reads local files.

        Raises:
          UserError: it cannot be read.
        """
        try:
            digest = self.remote.sha256 if self.remote else sha256_of(self.path)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error
        return (self.name, self.kind, self.size, digest)

    @property
    def version(self) -> tuple[str, int, int]:
        """Key that changes whenever the content may have changed: of a local file, its mtime."""
        changed = 0 if self.remote else self.path.stat().st_mtime_ns
        return (self.name, self.size, changed)


def find_sources(path: Path) -> list[Source]:
    """The sources at `path`: a file, or all files under a folder in sorted order.

    Hidden files and folders and `__pycache__` are skipped; all others must be text.
    """
    if path.is_file():
        return [_source(path, path.name)]
    if not path.is_dir():
        raise UserError(f"input {path}: it does not exist; give a corpus, a text file or a folder")
    relatives = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    visible = [relative for relative in relatives if not _is_hidden(relative)]
    return [
        _source(path / relative, f"{path.resolve().name}/{relative.as_posix()}")
        for relative in sorted(visible, key=lambda relative: relative.parts)
    ]


def read_documents(source: Source, on_read: Callable[[int], None]) -> Iterator[Document]:
    """Stream the non-empty documents of a source.

    Args:
      source: the source.
      on_read: called with the number of bytes of each read.
    """
    try:
        with io.BufferedReader(_CountedFile(source.path, on_read), _CHUNK_BYTES) as file:
            documents = _READERS[source.kind](file, str(source.path))
            yield from (document for document in documents if document.text)
    except _DAMAGED as error:
        raise UserError(f"{source.path} is damaged ({error}): get the file again") from error
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {error.strerror or error}") from error


class _CountedFile(io.FileIO):
    """A file that reports the number of bytes of each read."""

    def __init__(self, path: Path, on_read: Callable[[int], None]) -> None:
        super().__init__(path)
        self._on_read = on_read

    def readinto(self, buffer) -> int | None:
        count = super().readinto(buffer)
        self._on_read(count or 0)
        return count

    def readall(self) -> bytes:
        content = super().readall()
        self._on_read(len(content))
        return content


def _source(path: Path, name: str) -> Source:
    kinds: dict[str, Kind] = {".jsonl": "jsonl", ".jsonl.zst": "jsonl.zst"}
    suffix = next(filter(path.name.endswith, kinds), "")
    return Source(name, path, kinds.get(suffix, "text"), path.stat().st_size)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text (byte {error.start}): convert it or leave it out"
        ) from None


def _read_text(file: BinaryIO, name: str) -> Iterator[Document]:
    """The file is one document."""
    yield Document(_decode(file.read(), name))


def _read_python(file: BinaryIO, name: str) -> Iterator[Document]:
    """The file is one document, or none if it is not UTF-8."""
    try:
        yield Document(file.read().decode("utf-8"))
    except UnicodeDecodeError:
        return


def _read_jsonl(file: Iterable[bytes], name: str) -> Iterator[Document]:
    """Every line is a JSON object whose `text` is a document; blank lines are skipped."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield Document(_text_of_row(line, f"{name}:{number}"))


def _text_of_row(line: bytes, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): fix or remove the line") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{where} has no string under 'text': every row must be {{\"text\": ...}}")
    if not _is_unicode(row["text"]):
        raise UserError(
            f"{where} contains an unpaired surrogate, which is invalid UTF-8: fix the line"
        )
    return row["text"]


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_zstandard_jsonl(file: BinaryIO, name: str) -> Iterator[Document]:
    return _read_jsonl(_lines(_zstandard_chunks(file, name)), name)


def _zstandard_chunks(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Decompress frame by frame. (A stream reader would not report a truncated frame.)"""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    try:
        while chunk := file.read(_CHUNK_BYTES):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UserError(f"{name} is damaged ({error}): get the file again") from error
    if frame is not None:
        raise UserError(f"{name} is truncated: its last frame has no end; get the file again")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    unfinished: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        unfinished.append(first)
        if others:
            yield b"".join(unfinished)
            yield from others[:-1]
            unfinished = [others[-1]]
    yield b"".join(unfinished)


def _read_wikitext(file: BinaryIO, name: str) -> Iterator[Document]:
    """The articles of the raw training and validation files, without the test set."""
    members: dict[str, SplitName] = {"wiki.train.raw": "train", "wiki.valid.raw": "validation"}
    with zipfile.ZipFile(file) as archive:
        paths = {Path(member).name: member for member in archive.namelist()}
        for member, split in members.items():
            if member not in paths:
                raise UserError(f"{name} contains no {member}: it is not raw WikiText")
            with archive.open(paths[member]) as lines:
                for article in _articles(_decode(line, name) for line in lines):
                    yield Document(article, split)


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """Split before every title, ` = Like this = `; section titles have more equals signs."""
    is_title = re.compile(r" = [^=]+ = \n").fullmatch
    article: list[str] = []
    for line in lines:
        if is_title(line):
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)


def _read_openwebtext(file: BinaryIO, name: str) -> Iterator[Document]:
    """An archive of archives of pages; runs of empty lines are collapsed, as is usual."""
    with tarfile.open(fileobj=file, mode="r|xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".xz"):
                for page in _pages(_open_member(archive, member), name):
                    yield Document(re.sub(r"\n\n\n+", "\n\n", page).strip())


def _pages(subset: io.BufferedReader, name: str) -> Iterator[str]:
    with tarfile.open(fileobj=subset, mode="r|xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".txt"):
                yield _decode(_open_member(archive, member).read(), f"{name}: {member.name}")


def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BufferedReader:
    return cast(io.BufferedReader, archive.extractfile(member))  # None only for what is no file


_READERS: dict[Kind, Callable[[BinaryIO, str], Iterator[Document]]] = {
    "text": _read_text,
    "python": _read_python,
    "jsonl": _read_jsonl,
    "jsonl.zst": _read_zstandard_jsonl,
    "wikitext": _read_wikitext,
    "openwebtext": _read_openwebtext,
}
