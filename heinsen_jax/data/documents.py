"""Documents: each kind of source is read as a stream of documents."""

import codecs
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import string
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

from heinsen_jax.data.sources import Source, SplitName
from heinsen_jax.data.streams import CHUNK_BYTES, Expansion, decompressed, reporting
from heinsen_jax.errors import UserError, explain, extra_module, parse_json
from heinsen_jax.storage.files import sha256_of

_DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError),
    gzip.BadGzipFile,
)

_BLANK = string.whitespace.encode() + codecs.BOM_UTF8


class Document(NamedTuple):
    """A unit of text, such as an article or a file."""

    text: str
    split: SplitName | None = None
    """The published split of the document, if any."""


def read_documents(source: Source, on_read: Callable[[int], None]) -> Iterator[Document]:
    """Stream the non-empty documents of a source.

    Args:
      source: the source. If it has a hash, then its content is compared with it.
      on_read: called with the number of bytes of each read, and of each skipped part.

    Raises:
      UserError: the source is damaged, or cannot be read, or its content has another hash, which is
        known after the last document.
    """
    in_order = source.kind != "parquet"
    done, digest = 0, hashlib.sha256()

    def report(block: memoryview) -> None:
        nonlocal done
        done += len(block)
        if source.sha256 and in_order:
            digest.update(block)
            if done > source.size:  # before a file that keeps growing is read to its end
                raise _changed(source)
        on_read(len(block))

    try:
        buffered = CHUNK_BYTES if in_order else 1
        with reporting(_open(source), report, buffered) as file:
            for document in _documents(file, source):
                if document.text:
                    yield document._replace(split=source.split or document.split)
        if source.sha256:
            read = digest.hexdigest() if in_order else sha256_of(source.path)
            if read != source.sha256 or (in_order and done != source.size):
                raise _changed(source)
        on_read(max(0, source.size - done))  # bytes of the other columns
    except _DAMAGED as error:
        raise UserError(f"{source.place} is damaged ({error}); get the file again") from error
    except OSError as error:
        raise UserError(f"{source.place} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # error classes differ between versions of the Hub's client
        if source.streamed is None or isinstance(error, UserError):
            raise
        raise UserError(
            f"{source.place} cannot be read ({explain(error)}); check the network, and give the "
            "same command again, which resumes"
        ) from error


def _changed(source: Source) -> UserError:
    return UserError(
        f"{source.place} changed while it was prepared; wait until nothing writes to it, or copy "
        "it, and prepare it again"
    )


def _open(source: Source) -> io.IOBase:
    if source.streamed:
        return extra_module("heinsen_jax.data.hub").open_file(source.streamed.url)
    return io.FileIO(source.path)


def _documents(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    form, _, compression = source.kind.partition(".")
    if compression:
        content = decompressed(file, compression, source.place)
        file = Expansion(source.place, file.tell).limit(content)
    return _READERS[form](file, source)


def _decode(content: bytes, name: str, encoding: str = "utf-8") -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text (byte {error.start}): convert it or leave it out"
        ) from None


def _check_encoding(content: bytes, name: str) -> None:
    """Refuse UTF-16 and UTF-32, whose ASCII characters would be valid UTF-8."""
    encoding = json.detect_encoding(content[:4])
    if not encoding.startswith("utf-8"):
        raise UserError(f"{name} is {encoding[:6].upper()} text; convert it to UTF-8")


def _read_text(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    """The file is one document."""
    content = file.read()
    _check_encoding(content, source.place)
    yield Document(_decode(content, source.place, "utf-8-sig"))


def _read_python(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    """The file is one document, or none if it is not UTF-8."""
    try:
        yield Document(file.read().decode("utf-8"))
    except UnicodeDecodeError:
        return


def _read_json(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    """Objects with a document in the text column: one in each line, without blank lines; or an
    array of objects, or a single one, over any number of lines."""
    rows = ((number, line) for number, line in enumerate(file, start=1) if line.strip(_BLANK))
    start = next(rows, None)
    if start is None:
        return
    _check_encoding(first := start[1], source.place)
    if _spans_lines(first):
        content = _parse(first + file.read(), f"{source.place}:{start[0]}")
        for item, row in enumerate(content if isinstance(content, list) else [content], start=1):
            yield Document(_text_of(row, f"{source.place}, item {item}", source.text_column))
        return
    for number, line in itertools.chain([start], rows):
        where = f"{source.place}:{number}"
        yield Document(_text_of(_parse(line, where), where, source.text_column))


def _spans_lines(line: bytes) -> bool:
    """Whether the first line of a file begins an array, or an object that does not end in it."""
    if line.lstrip(_BLANK).startswith(b"["):
        return True
    try:
        parse_json(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip()) > 0
    except ValueError:
        return False
    return False


def _parse(content: bytes, where: str) -> object:
    try:
        return parse_json(content)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): fix or remove it") from None


def _text_of(row: object, where: str, column: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f'{where} is not an object: every row must be {{"{column}": ...}}')
    if not isinstance(text := row.get(column), str):
        raise UserError(
            f"{where} has no string under {column!r}, but columns {', '.join(row)}: fix the row, "
            "or name the column of the texts (text_column); to train on JSON itself, rename the "
            "file to .txt"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where} contains an unpaired surrogate, which is invalid UTF-8: fix the row"
        ) from None
    return text


def _read_parquet(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    read = extra_module("heinsen_jax.data.parquet").read_texts
    expansion = Expansion(source.place, lambda: source.size)
    for text in read(file, source.place, source.text_column):
        expansion.add(len(text))
        yield Document(text)


def _read_wikitext(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    """The articles of the three raw files."""
    name = source.place
    members: dict[str, SplitName] = {
        "wiki.train.raw": "train",
        "wiki.valid.raw": "validation",
        "wiki.test.raw": "test",
    }
    expansion = Expansion(name, lambda: source.size)
    with zipfile.ZipFile(file) as archive:
        paths = {Path(member).name: member for member in archive.namelist()}
        for member, split in members.items():
            if member not in paths:
                raise UserError(f"{name} contains no {member}: it is not raw WikiText")
            with archive.open(paths[member]) as content:
                lines = expansion.limit(cast(io.IOBase, content))
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


def _read_openwebtext(file: io.BufferedReader, source: Source) -> Iterator[Document]:
    """An archive of archives of pages; runs of empty lines are collapsed, as is usual."""
    expansion = Expansion(source.place, file.tell)
    for _, subset in _members(file, ".xz", expansion):
        for name, page in _members(subset, ".txt", expansion):
            text = _decode(page.read(), f"{source.place}: {name}")
            yield Document(re.sub(r"\n\n\n+", "\n\n", text).strip())


def _members(
    file: io.BufferedReader, suffix: str, expansion: Expansion
) -> Iterator[tuple[str, io.BufferedReader]]:
    """The names and contents of the files with a suffix in a `.tar.xz`."""
    with (
        lzma.LZMAFile(file) as content,
        tarfile.open(fileobj=expansion.limit(content), mode="r|") as archive,
    ):
        for member in archive:
            if member.isfile() and member.name.endswith(suffix):
                yield member.name, cast(io.BufferedReader, archive.extractfile(member))


_READERS: dict[str, Callable[[io.BufferedReader, Source], Iterator[Document]]] = {
    "text": _read_text,
    "python": _read_python,
    "jsonl": _read_json,
    "parquet": _read_parquet,
    "wikitext": _read_wikitext,
    "openwebtext": _read_openwebtext,
}
