import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from heinsen_jax.data import documents, streams
from heinsen_jax.data.documents import Document, read_documents
from heinsen_jax.data.sources import Kind, Source, check_sources, find_sources
from heinsen_jax.errors import UserError


def read(path: Path, kind: Kind, column: str = "text") -> list[Document]:
    source = Source(path.name, path, kind, path.stat().st_size, text_column=column)
    return list(read_documents(source, lambda count: None))


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def rows(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text, "meta": {}}).encode() + b"\n" for text in texts)


def test_text_keeps_every_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a\r\nb\u2028\tc\n".encode())
    assert read(path, "text") == [Document("a\r\nb\u2028\tc\n")]


def test_every_byte_read_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(*["word " * 100] * 50))
    source = find_sources(path)[0]
    for kind in ("text", "jsonl"):
        counts: list[int] = []
        list(read_documents(Source("a", path, kind, source.size), counts.append))
        assert sum(counts) == source.size


def test_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.md", "a/2.txt", "a/10.txt", "a/rows.jsonl", ".git/x", "a/__pycache__/x.pyc"):
        write(tmp_path / name, b"{}")
    write(tmp_path / "z.jsonl.zst", b"")
    sources = find_sources(tmp_path)
    assert [(source.name.partition("/")[2], source.kind) for source in sources] == [
        ("a/10.txt", "text"),
        ("a/2.txt", "text"),
        ("a/rows.jsonl", "jsonl"),
        ("b.md", "text"),
        ("z.jsonl.zst", "jsonl.zst"),
    ]
    assert {source.name.partition("/")[0] for source in sources} == {tmp_path.name}


def test_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt", "caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        read(path, "text")
    assert read(path, "python") == []


def test_jsonl_yields_its_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows("one", "", "zwei ü\n") + b"\n")
    assert read(path, "jsonl") == [Document("one"), Document("zwei ü\n")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{not json}", "is not JSON"),
        (b'{"body": "x"}', "no string under 'text'"),
        (b'{"text": 3}', "no string under 'text'"),
        (b"[1]", "is not an object"),
        (b'{"body": "x", "id": 1}', "but columns body, id"),
        (b'{"text": "\\ud800"}', "an unpaired surrogate"),
        (b'{"text": "caf\xe9"}', "is not JSON"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, line: bytes, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", rows("one", "two") + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:3 .*{problem}"):
        read(path, "jsonl")


def test_rows_may_have_another_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"body": "one"}')
    assert read(path, "jsonl", "body") == [Document("one")]


@pytest.mark.parametrize("missing", [1, 9, 100])
def test_gzip(tmp_path: Path, missing: int) -> None:
    texts = [f"{i} ü" for i in range(1000)]
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(rows(*texts)))
    assert read(path, "jsonl.gz") == [Document(text) for text in texts]
    whole = write(tmp_path / "b.txt.gz", gzip.compress("a\r\nü".encode()))
    assert read(whole, "text.gz") == [Document("a\r\nü")]
    cut = write(tmp_path / "cut.jsonl.gz", path.read_bytes()[:-missing])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz is damaged"):
        read(cut, "jsonl.gz")
    with pytest.raises(UserError, match=r"other\.txt\.gz is damaged"):
        read(write(tmp_path / "other.txt.gz", b"text"), "text.gz")


def parquet(path: Path, columns: dict[str, list | pa.Array]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=100)
    return path


def test_parquet_is_read_row_group_by_row_group(tmp_path: Path) -> None:
    texts = ["", *(f"{i} ü\n" * 50 for i in range(2500))]
    path = parquet(tmp_path / "a.parquet", {"id": [*range(2501)], "text": texts})
    assert read(path, "parquet") == [Document(text) for text in texts[1:]]
    kinds = pa.array(texts, pa.large_string()), pa.array(texts).dictionary_encode()
    for kind in kinds:
        other = parquet(tmp_path / "b.parquet", {"body": kind})
        assert len(read(other, "parquet", "body")) == 2500


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    noise = [os.urandom(1000) for _ in range(1000)]
    path = parquet(tmp_path / "a.parquet", {"id": noise, "text": [*map(str, range(1000))]})
    counts: list[int] = []
    assert len(list(read_documents(find_sources(path)[0], counts.append))) == 1000
    assert sum(counts[:-1]) < path.stat().st_size / 4
    assert sum(counts) == path.stat().st_size


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["a"], "id": [1]},
            "no column 'text': its columns of texts are body, of body, ",
        ),
        ({"id": [1]}, "no column 'text': it has none of texts, of id"),
        ({"text": [1], "body": ["a"]}, "'text' is int64, not text .its columns of texts are body"),
        ({"text": ["a", None]}, "row 2: column 'text' has no text"),
        (
            {"text": pa.array([b"a", b"caf\xe9"], pa.binary()).view(pa.string())},
            "row 2: column 'text' is not UTF-8",
        ),
    ],
)
def test_invalid_column_of_parquet_is_named(tmp_path: Path, columns, message: str) -> None:
    with pytest.raises(UserError, match=rf"a\.parquet.*{message}"):
        read(parquet(tmp_path / "a.parquet", columns), "parquet")


@pytest.mark.parametrize("cut", [3, 100, 3000])
def test_damaged_parquet_is_named(tmp_path: Path, cut: int) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": [f"{i} text" for i in range(1000)]})
    damaged = write(tmp_path / "cut.parquet", path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"cut\.parquet is damaged"):
        read(damaged, "parquet")


def test_a_missing_extra_for_parquet_is_named(tmp_path: Path, monkeypatch) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "heinsen_jax.data.parquet", raising=False)
    for act in (lambda: read(path, "parquet"), lambda: check_sources(find_sources(path))):
        with pytest.raises(UserError, match=r"pip install 'heinsen_jax\[parquet\]'"):
            act()


def test_zstandard_reads_all_frames(tmp_path: Path) -> None:
    texts = [f"document {i} " * 2000 for i in range(100)]
    frames = [zstandard.compress(rows(*texts[:30])), zstandard.compress(rows(*texts[30:]))]
    path = write(tmp_path / "a.jsonl.zst", b"".join(frames))
    assert [document.text for document in read(path, "jsonl.zst")] == texts


@pytest.mark.parametrize("missing", [1, 4, 100])
def test_truncated_zstandard_is_an_error(tmp_path: Path, missing: int) -> None:
    content = zstandard.compress(rows(*[f"{i} text" for i in range(1000)]))
    path = write(tmp_path / "a.jsonl.zst", content[:-missing])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst is truncated"):
        read(path, "jsonl.zst")


def test_damaged_zstandard_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.zst", b"no frame at all")
    with pytest.raises(UserError, match=r"a\.jsonl\.zst is damaged"):
        read(path, "jsonl.zst")


@given(st.lists(st.binary(max_size=8).map(lambda chunk: chunk.replace(b"a", b"\n")), max_size=8))
def test_lines_do_not_depend_on_the_frames(chunks: list[bytes]) -> None:
    content = b"".join(map(zstandard.compress, chunks))
    stored = streams.reporting(io.BytesIO(content), lambda block: None)
    file = streams.decompressed(stored, "zst", "a.zst")
    assert list(streams.reporting(file, lambda block: None)) == list(io.BytesIO(b"".join(chunks)))


def wikitext(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(f"wikitext-2-raw/{name}", text)
    return path


def test_wikitext_is_split_into_articles_and_keeps_its_split(tmp_path: Path) -> None:
    first = " \n = Valkyria = \n \n text = 3 . \n = = Plot = = \n more \n"
    second = " = Tower = \n \n text \n"
    path = wikitext(
        tmp_path / "w.zip",
        {"wiki.train.raw": first + second, "wiki.valid.raw": second, "wiki.test.raw": first[2:]},
    )
    assert read(path, "wikitext") == [
        Document(" \n", "train"),
        Document(first[2:], "train"),
        Document(second, "train"),
        Document(second, "validation"),
        Document(first[2:], "test"),
    ]


LINES = (  # as in WikiText: titles of articles and sections, paragraphs, formulas, empty lines
    *(" = Homarus gammarus = \n", " = The = sign = \n", " = = Description = = \n"),
    *(" \n", "\n", " = = = Range = = = \n", " The ratio r = 3 = 6 / 2 . \n", " = \n", "=\n"),
)


@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_articles_begin_at_titles_and_nothing_is_lost(lines: list[str]) -> None:
    articles = list(documents._articles(lines))
    assert "".join(articles) == "".join(lines)
    assert len(articles) == 1 + lines.count(LINES[0])
    assert all(article.startswith(LINES[0]) for article in articles[1:])


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    members = {"wiki.train.raw": "x" * 999, "wiki.valid.raw": "y", "wiki.test.raw": "z"}
    whole = wikitext(tmp_path / "w.zip", members)
    cut = write(tmp_path / "cut.zip", whole.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"cut\.zip is damaged"):
        read(cut, "wikitext")
    other = wikitext(tmp_path / "other.zip", {"wiki.train.tokens": "x"})
    with pytest.raises(UserError, match=r"other\.zip contains no wiki\.train\.raw"):
        read(other, "wikitext")


def tar_xz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return lzma.compress(buffer.getvalue())


def test_openwebtext_is_read_through_both_archives(tmp_path: Path) -> None:
    subsets = {
        "openwebtext/0.xz": tar_xz({"1.txt": b"\n\none\n\n\n\nparagraph\n", "2.txt": b"two"}),
        "openwebtext/1.xz": tar_xz({"3.txt": "drü".encode()}),
        "openwebtext/1.xz.lock": b"",
    }
    path = write(tmp_path / "o.tar.xz", tar_xz(subsets))
    texts = [document.text for document in read(path, "openwebtext")]
    assert texts == ["one\n\nparagraph", "two", "drü"]
    cut = write(tmp_path / "cut.tar.xz", path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cut\.tar\.xz is damaged"):
        read(cut, "openwebtext")


def test_missing_source_is_named(tmp_path: Path) -> None:
    source = Source("a", tmp_path / "gone.txt", "text", 1)
    with pytest.raises(UserError, match=r"gone\.txt cannot be read"):
        list(read_documents(source, lambda count: None))
