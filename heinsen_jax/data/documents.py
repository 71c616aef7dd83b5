"""Documents: each kind of source is read as a stream of documents."""

import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import zstandard

from heinsen_jax.data.sources import Kind, Source, SplitName
from heinsen_jax.errors import UserError, explain, extra_module

_CHUNK_BYTES = 1 << 20
_DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError),
    gzip.BadGzipFile,
)


class Document(NamedTuple):
    """A unit of text, such as an article or a file."""

    text: str
    split: SplitName | None = None
    """The published split of the document, if any."""


def read_documents(source: Source, on_read: Callable[[int], None]) -> Iterator[Document]:
    """Stream the non-empty documents of a source.

    Args:
      source: the source.
      on_read: called with the number of bytes of each read, and of the parts that need no reading.
    """
    done = 0

    def count(number: int) -> None:
        nonlocal done
        done += number
        on_read(number)

    try:
        buffered = 1 if source.kind == "parquet" else _CHUNK_BYTES  # it is not read in order
        with io.BufferedReader(_CountedFile(_open(source), count), buffered) as file:
            for document in _READERS[source.kind](file, source):
                if document.text:
                    yield document._replace(split=source.split or document.split)
        on_read(max(0, source.size - done))  # of the columns besides the text
    except _DAMAGED as error:
        raise UserError(f"{source.place} is damaged ({error}); get the file again") from error
    except OSError as error:
        raise UserError(f"{source.place} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the Hub's HTTP client differs between versions, and so do errors
        if source.streamed is None or isinstance(error, UserError):
            raise
        raise UserError(
            f"{source.place} cannot be read ({explain(error)}); check the network, and give the "
            "same command again, which resumes"
        ) from error


def _open(source: Source) -> BinaryIO:
    if source.streamed:
        return extra_module("heinsen_jax.data.hub").open_file(source.streamed.url)
    return cast(BinaryIO, io.FileIO(source.path))


class _CountedFile(io.RawIOBase):
    """A file that reports the number of bytes of each read."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], None]) -> None:
        self._file, self._on_read = file, on_read
        self.mode, self.name = "rb", getattr(file, "name", "")  # as `BinaryIO` has them

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._on_read(count)
        return count

    def readall(self) -> bytes:
        content = self._file.read()
        self._on_read(len(content))
        return content

    def close(self) -> None:
        self._file.close()
        super().close()


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text (byte {error.start}): convert it or leave it out"
        ) from None


def _read_text(file: BinaryIO, source: Source) -> Iterator[Document]:
    """The file is one document."""
    yield Document(_decode(file.read(), source.place))


def _read_gzip_text(file: BinaryIO, source: Source) -> Iterator[Document]:
    yield Document(_decode(gzip.GzipFile(fileobj=file).read(), source.place))


def _read_python(file: BinaryIO, source: Source) -> Iterator[Document]:
    """The file is one document, or none if it is not UTF-8."""
    try:
        yield Document(file.read().decode("utf-8"))
    except UnicodeDecodeError:
        return


def _read_jsonl(lines: Iterable[bytes], source: Source) -> Iterator[Document]:
    """Every line is a JSON object with a document in the text column; blank lines are skipped."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Document(_text_of_row(line, f"{source.place}:{number}", source.text_column))


def _text_of_row(line: bytes, where: str, column: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): fix or remove the line") from None
    if not isinstance(row, dict):
        raise UserError(f'{where} is not an object: every row must be {{"{column}": ...}}')
    if not isinstance(text := row.get(column), str):
        raise UserError(
            f"{where} has no string under {column!r}, but columns {', '.join(row)}: fix the line, "
            "or name the column of the texts (text_column)"
        )
    if not _is_unicode(text):
        raise UserError(
            f"{where} contains an unpaired surrogate, which is invalid UTF-8: fix the line"
        )
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_gzip_jsonl(file: BinaryIO, source: Source) -> Iterator[Document]:
    return _read_jsonl(gzip.GzipFile(fileobj=file), source)


def _read_zstandard_jsonl(file: BinaryIO, source: Source) -> Iterator[Document]:
    return _read_jsonl(_lines(_zstandard_chunks(file, source.place)), source)


def _read_parquet(file: BinaryIO, source: Source) -> Iterator[Document]:
    read = extra_module("heinsen_jax.data.parquet").read_texts
    return map(Document, read(file, source.place, source.text_column))


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
        raise UserError(f"{name} is damaged ({error}); get the file again") from error
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


def _read_wikitext(file: BinaryIO, source: Source) -> Iterator[Document]:
    """The articles of the raw training and validation files, without the test set."""
    name = source.place
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


def _read_openwebtext(file: BinaryIO, source: Source) -> Iterator[Document]:
    """An archive of archives of pages; runs of empty lines are collapsed, as is usual."""
    with tarfile.open(fileobj=file, mode="r|xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".xz"):
                for page in _pages(_open_member(archive, member), source.place):
                    yield Document(re.sub(r"\n\n\n+", "\n\n", page).strip())


def _pages(subset: io.BufferedReader, name: str) -> Iterator[str]:
    with tarfile.open(fileobj=subset, mode="r|xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".txt"):
                yield _decode(_open_member(archive, member).read(), f"{name}: {member.name}")


def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BufferedReader:
    return cast(io.BufferedReader, archive.extractfile(member))  # None only for what is no file


_READERS: dict[Kind, Callable[[BinaryIO, Source], Iterator[Document]]] = {
    "text": _read_text,
    "text.gz": _read_gzip_text,
    "python": _read_python,
    "jsonl": _read_jsonl,
    "jsonl.gz": _read_gzip_jsonl,
    "parquet": _read_parquet,
    "jsonl.zst": _read_zstandard_jsonl,
    "wikitext": _read_wikitext,
    "openwebtext": _read_openwebtext,
}
