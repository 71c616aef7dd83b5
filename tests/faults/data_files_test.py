"""Files of text of all kinds, damaged, changing and foreign ones among them."""

import codecs
import gzip
import io
import json
import lzma
import os
import resource
import socket
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from heinsen_jax.config import load_config
from heinsen_jax.data import DataConfig, load, streams
from heinsen_jax.data import prepare as prepare_module
from heinsen_jax.data.documents import read_documents
from heinsen_jax.data.download import Remote, ensure_downloaded
from heinsen_jax.data.hub import _source as hub_source
from heinsen_jax.data.manifest import Manifest
from heinsen_jax.data.prepare import main, prepare
from heinsen_jax.data.sources import Kind, Source, find_sources
from heinsen_jax.data.tokenizers import byte_tokenizer, get_tokenizer, save_tokenizer
from heinsen_jax.data.train_tokenizer import train_tokenizer
from heinsen_jax.errors import UserError, parse_json
from heinsen_jax.runs.metrics_file import read_lines
from heinsen_jax.runs.record import read_config
from heinsen_jax.runs.weights import weight_files
from heinsen_jax.storage.locks import LOCK_FILE
from studies.results import Recorded

TEXTS = ["one", "zwei ü"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
ARRAY = json.dumps([{"text": text} for text in TEXTS], indent=1).encode()
BOM = codecs.BOM_UTF8
DEEP = b"[" * 100_000 + b"]" * 100_000

compressed = partial(gzip.compress, mtime=0)  # the same bytes, and names of tests, at any time


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def texts_of(path: Path, column: str = "text") -> list[str]:
    (source,) = find_sources(path, column)
    return [document.text for document in read_documents(source, lambda count: None)]


def command(monkeypatch, capfd, *arguments: object) -> tuple[int, str]:
    """Return the exit code of the command and its errors."""
    monkeypatch.setattr("sys.argv", ["prepare", *map(str, arguments)])
    code = main()
    return code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c4-train.00000-of-01024.json.gz", compressed(LINES)),
        ("a.JSON.GZ", compressed(ARRAY)),
        ("a.json.zst", zstandard.compress(LINES)),
        ("a.json", LINES),
        ("a.json", b"\n" + ARRAY),
        ("a.json", json.dumps(json.loads(ARRAY)).encode()),
        ("a.json", LINES.replace(b"\n", b"\r\n")),
        ("a.ndjson", LINES.rstrip()),
        ("a.NdJson.Zstd", zstandard.compress(LINES)),
        ("a.JSONL", LINES),
        ("a.jsonl", BOM + LINES),
        ("a.jsonl", BOM + b"\n" + LINES),
        ("a.json", BOM + ARRAY),
        ("two.jsonl.gz", compressed(BOM + LINES[:16]) + compressed(BOM + LINES[16:])),
    ],
)
def test_rows_of_json_are_read_whatever_the_file_is_called(tmp_path, name, content):
    assert texts_of(write(tmp_path / name, content)) == TEXTS


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_single_object_is_a_row(tmp_path, name):
    for content in (
        b'{\n "text":\n "one"\n}',
        b'{"text": "one", "more": [\n1]}',
        b'{"text":"one"}',
    ):
        assert texts_of(write(tmp_path / name, content)) == ["one"]
    assert texts_of(write(tmp_path / name, b" \n")) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": 2}', r"a\.json, item 1 has no string under 'text', but columns a, b"),
        (b'[{"text": "x"}, 3]', r"a\.json, item 2 is not an object"),
        (b'\n[{"text": "x"},\n', r"a\.json:2 is not JSON \(Expecting value: line 2 column 1"),
        (LINES + b"[1]\n", r"a\.json:3 is not an object"),
        (b"3\n", r"a\.json:1 is not an object"),
        (b'{"text": ["x", "y"]}', r"a\.json:1 has no string under 'text'"),
        (LINES + b'{"text": "y", "more": ' + DEEP + b"}\n", r"a\.json:3 .*nested too deeply"),
        (DEEP, r"a\.json.*nested too deeply"),
        (b'[{"text": "y", "more": ' + DEEP + b"}]", r"a\.json.*nested too deeply"),
        (LINES.decode().encode("utf-16"), r"a\.json is UTF-16 text; convert it"),
        (LINES.decode().encode("utf-16-le"), r"a\.json is UTF-16 text"),
        (ARRAY.decode().encode("utf-32"), r"a\.json is UTF-32 text"),
    ],
)
def test_invalid_json_is_named(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        texts_of(write(tmp_path / "a.json", content))


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt", bytes),
        ("A.TXT", bytes),
        ("a.TXT.GZ", compressed),
        ("a.md.gz", compressed),
        ("a.txt.zst", zstandard.compress),
    ],
)
def test_text_has_no_byte_order_mark(tmp_path, name, pack):
    for mark in (b"", BOM):
        assert texts_of(write(tmp_path / name, pack(mark + "ü\r\n\ufeff".encode()))) == [
            "ü\r\n\ufeff"
        ]
    for encoding in ("utf-16", "utf-16-be"):
        with pytest.raises(UserError, match="is UTF-16 text; convert it to UTF-8"):
            texts_of(write(tmp_path / name, pack("plain".encode(encoding))))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TGZ", "a.zip", "a.xz", "a.parquet.gz"])
def test_archives_are_refused_before_anything_is_read(tmp_path, name):
    """A tar of texts is valid UTF-8."""
    write(tmp_path / "in" / "a.txt", b"text")
    for path in (write(tmp_path / "in" / name, b""), tmp_path / "in"):
        with pytest.raises(UserError, match=f"{name}: unsupported archive or compression"):
            find_sources(path)


def test_published_splits_of_all_names_of_json(tmp_path):
    write(tmp_path / "train-00000-of-00001.json.gz", compressed(LINES))
    write(tmp_path / "validation.NDJSON", LINES)
    write(tmp_path / "dataset_infos.json", b"{}")
    sources = {source.path.name: source for source in find_sources(tmp_path)}
    assert {name: (x.kind, x.split) for name, x in sources.items()} == {
        "train-00000-of-00001.json.gz": ("jsonl.gz", "train"),
        "validation.NDJSON": ("jsonl", "validation"),
    }


def test_the_hub_has_the_same_kinds(monkeypatch):
    class Files:
        def info(self, path):
            return {"size": 1, "blob_id": "id"}

    monkeypatch.setattr("fsspec.url_to_fs", lambda url: (Files(), url))
    kinds = {"a.JSON": "jsonl", "a.json.gz": "jsonl.gz", "a.txt": "text", "a.MD.gz": "text.gz"}
    assert {name: hub_source(name, "text").kind for name in kinds} == kinds
    for name in ("a.csv", "a.csv.gz", "a.arrow"):
        with pytest.raises(UserError, match=f"{name}: tables of this kind are not read"):
            hub_source(name, "text")
    with pytest.raises(UserError, match=r"a\.bin: unsupported kind of file"):
        hub_source("a.bin", "text")


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.csv.gz", "in/a.arrow", "a.parq", "a.xlsx"])
def test_tables_are_not_read_as_text(tmp_path, name, monkeypatch, capfd):
    path = write(tmp_path / name, b"text\nfirst\n")
    code, errors = command(monkeypatch, capfd, path, "--output", tmp_path / "out")
    assert code == 2
    assert errors == (
        f"error: {path}: tables of this kind are not read; convert it to .jsonl or .parquet, with "
        "the texts in a column, or rename it to .txt to train on the file as it is\n"
    )


def test_cached_text_of_json_names_is_not_used_as_rows(tmp_path):
    """Earlier releases read them as text, under a key of name, size and time."""
    keys = {}
    for name in ("a.jsonl", "a.txt", "a.txt.gz", "a.json", "a.JSONL", "a.ndjson"):
        (source,) = find_sources(write(tmp_path / name, b"{}"))
        keys[name] = len(source.version)
    assert keys == {**dict.fromkeys(keys, 4), "a.jsonl": 3, "a.txt": 3, "a.txt.gz": 3}


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS, pa.string_view()),
        pa.array(TEXTS).dictionary_encode(),
        pa.array(TEXTS, pa.large_string()).dictionary_encode(),
        pa.chunked_array([TEXTS[:1], TEXTS[1:]]).dictionary_encode(),
        pa.array(TEXTS).cast(pa.json_()),
    ],
    ids=lambda texts: str(texts.type),
)
def test_all_string_types_of_arrow_are_text(tmp_path, texts):
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == TEXTS


def test_damaged_pages_of_parquet_are_detected(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {row}" for row in range(5000)]})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = path.read_bytes()
    write(path, content.replace(b"text 2500", b"text 2501"))
    with pytest.raises(UserError, match=r"a\.parquet is damaged .*checksum"):
        texts_of(path)


@pytest.mark.parametrize(
    "read", ["config", "record", "metrics", "study", "weights", "split", "tokenizer"]
)
def test_deeply_nested_json_is_refused_by_name(tmp_path, read):
    path = write(tmp_path / "config.json", DEEP)
    if read == "config":
        with pytest.raises(UserError, match=r"config\.json: it is nested too deeply"):
            load_config(path)
    elif read == "record":
        with pytest.raises(UserError, match=r"config\.json is damaged \(it is nested too deeply"):
            read_config(tmp_path)
    elif read == "metrics":
        assert read_lines(write(tmp_path / "metrics.jsonl", DEEP + b"\n")) == ([], [1])
    elif read == "study":
        with pytest.raises(UserError, match=r"runs\.jsonl, line 1, is damaged"):
            Recorded(write(tmp_path / "runs.jsonl", DEEP + b"\n"))
    elif read == "weights":
        write(tmp_path / "model.safetensors.index.json", DEEP)
        with pytest.raises(UserError, match=r"index\.json is damaged .*nested too deeply"):
            weight_files(tmp_path)
    elif read == "tokenizer":
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged .*nested too deeply"):
            get_tokenizer(str(write(tmp_path / "tokenizer.json", DEEP)))
    else:
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            Manifest.parse(DEEP, tmp_path / "manifest.json")


def test_json_may_have_a_byte_order_mark():
    assert parse_json(BOM + b"{}") == parse_json("\ufeff{}") == {}
    with pytest.raises(ValueError, match="utf-8"):
        parse_json("{}".encode("utf-16"))


def own_folder(path: Path) -> Path:
    prepare([str(write(path.parent / "first.txt", b"text " * 100))], "bytes", path)
    return path


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "tokenizer.json", "tokenizer.tiktoken", "checkpoints/1/state"),
        ("tokenizer.json",),
        ("manifest.json",),
        ("mine.partial",),
        ("train-00000.bin",),
        ("notes/a.txt",),
    ],
)
def test_foreign_folders_are_refused_as_output(tmp_path, names, monkeypatch, capfd):
    out, text = tmp_path / "out", write(tmp_path / "a.txt", b"text " * 100)
    for name in names:
        write(out / name, b"mine")
    code, errors = command(monkeypatch, capfd, text, "--output", out)
    assert code == 2
    assert errors.startswith(f"error: output {out} has ")
    assert errors.count("\n") == 1
    assert {path for path in out.rglob("*") if path.is_file()} == {out / name for name in names}
    assert {(out / name).read_bytes() for name in names} == {b"mine"}


def test_a_foreign_recipe_is_refused(tmp_path):
    text = write(tmp_path / "a.txt", b"text " * 100)
    write(tmp_path / "out" / "recipe.json", b'{"cake": 1}')
    with pytest.raises(UserError, match=r"recipe\.json is damaged, or not of a preparation"):
        prepare([str(text)], "bytes", tmp_path / "out")


def test_only_own_partial_files_are_removed(tmp_path):
    out = tmp_path / "out"
    own = write(out / "train-00000.bin.0123456789ab.partial", b"")
    write(out / LOCK_FILE, b"")
    own_folder(out)
    assert not own.exists()
    kept = [write(out / name, b"mine") for name in ("a.partial", "model.bin.0123456789ab.partial")]
    own.touch()
    (out / "manifest.json").unlink()
    own_folder(out)
    assert not own.exists()
    assert {path.read_bytes() for path in kept} == {b"mine"}


def test_a_kill_at_any_write_leaves_a_folder_that_is_accepted(tmp_path, monkeypatch):
    for number, name in enumerate(("save_tokenizer", "plan_units", "_process", "_finish")):
        with monkeypatch.context() as patch:

            def kill(*arguments):
                raise KeyboardInterrupt

            patch.setattr(prepare_module, name, kill)
            with pytest.raises(KeyboardInterrupt):
                own_folder(tmp_path / str(number) / "out")
        own_folder(tmp_path / str(number) / "out")


def test_a_trained_tokenizer_replaces_no_settings(tmp_path):
    text = write(tmp_path / "a.txt", b"text " * 100)
    path = write(tmp_path / "out" / "tokenizer_config.json", b"mine")
    with pytest.raises(UserError, match=r"tokenizer_config\.json exists"):
        train_tokenizer([str(text)], 300, tmp_path / "out")
    assert path.read_bytes() == b"mine"


def parquet_of(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer)
    return buffer.getvalue()


def lines_of(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


MANY = [f"text {row}" for row in range(400)]
CONTENTS = {
    "a.txt": lambda texts: "\n".join(texts).encode(),
    "a.jsonl": lines_of,
    "a.json": lambda texts: json.dumps([{"text": text} for text in texts]).encode(),
    "a.jsonl.gz": lambda texts: compressed(lines_of(texts)),
    "a.jsonl.zst": lambda texts: zstandard.compress(lines_of(texts)),
    "a.txt.gz": lambda texts: compressed("\n".join(texts).encode()),
    "a.parquet": parquet_of,
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("change", ["grow", "shrink", "replace", "same size and time"])
def test_a_source_that_changes_after_its_hash_is_refused(tmp_path, name, change, monkeypatch):
    path, out = write(tmp_path / name, CONTENTS[name](MANY)), tmp_path / "out"
    other = {"grow": [*MANY, "text x"], "shrink": MANY[:-1]}.get(change, [*MANY[:-1], "text x99"])
    save = prepare_module.save_tokenizer

    def edit(*arguments):
        save(*arguments)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        if change == "replace":
            write(tmp_path / "other", CONTENTS[name](other)).replace(path)
        else:
            write(path, CONTENTS[name](other))
        os.utime(path, ns=times)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "save_tokenizer", edit)
        with pytest.raises(UserError, match=f"{name} changed while it was prepared; wait until"):
            prepare([str(path)], "bytes", out, split="tail")
    assert not [*out.glob("*.bin"), *out.glob("unit-*.json"), *out.glob("*.partial")]
    manifest = prepare([str(path)], "bytes", out, split="tail")  # and nothing is in its way
    assert manifest.splits["train"].tokens


def test_a_source_that_grows_without_end_is_not_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.txt", b"text")
    source = find_sources(path)[0].hashed()
    write(path, b"text " * 10_000_000)
    counts: list[int] = []
    with pytest.raises(UserError, match=r"a\.txt changed while it was prepared"):
        list(read_documents(source, counts.append))
    assert sum(counts) < 4 << 20


def bomb(name: str, size: int) -> bytes:
    """A file whose content has that size."""
    if name.endswith(".parquet"):
        texts = pa.array(["x" * (size // 1000)] * 1000).dictionary_encode()
        buffer = io.BytesIO()
        pq.write_table(pa.table({"text": texts}), buffer)
        return buffer.getvalue()
    content = (
        b"\0" * size if "zeros" in name else (b'{"text": "%s"}\n' % (b"x" * 1000)) * (size // 1014)
    )
    if name.endswith(".gz"):
        return compressed(content)
    return zstandard.compress(content)


@pytest.mark.parametrize(
    "name",
    ["a.txt.gz", "a.txt.zst", "a.jsonl.gz", "zeros.jsonl.zst", "zeros.json.gz", "a.parquet"],
)
def test_bombs_are_refused(tmp_path, name, monkeypatch, capfd):
    monkeypatch.setattr(streams, "UNLIMITED_BYTES", 1 << 20)
    monkeypatch.setattr(streams, "MAX_EXPANSION", 10)
    path, out = write(tmp_path / name, bomb(name, 8 << 20)), tmp_path / "out"
    code, errors = command(monkeypatch, capfd, path, "--output", out)
    assert code == 2
    assert errors.startswith(f"error: {path} expands to more than 10 times its size")
    assert "if it is text, decompress it by hand, or set the environment variable" in errors
    assert errors.count("\n") == 1
    if "zeros" not in name:
        monkeypatch.setenv(streams.MAX_EXPANSION_VARIABLE, "100000")
        assert sum(map(len, texts_of(path))) > 7 << 20


def test_a_long_text_in_a_dictionary_is_held_once(tmp_path):
    """A batch of 1,024 rows would otherwise have 16 GiB before any of it is counted."""
    texts = pa.DictionaryArray.from_arrays(np.zeros(1024, np.int32), ["x" * (16 << 20)])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    assert path.stat().st_size < 4096
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        texts_of(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_bombs_in_corpora_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "UNLIMITED_BYTES", 1 << 20)
    path, text = tmp_path / "w.zip", "x" * (8 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wiki.train.raw", text)
        archive.writestr("wiki.valid.raw", text)
    pages = io.BytesIO()
    with tarfile.open(fileobj=pages, mode="w") as archive:
        member = tarfile.TarInfo("1.txt")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    subset = lzma.compress(pages.getvalue())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("0.xz")
        member.size = len(subset)
        archive.addfile(member, io.BytesIO(subset))
    other = write(tmp_path / "o.tar.xz", lzma.compress(packed.getvalue()))
    cases: tuple[tuple[Kind, Path], ...] = (("wikitext", path), ("openwebtext", other))
    for kind, file in cases:
        source = Source("a", file, kind, file.stat().st_size)
        with pytest.raises(UserError, match=f"{file.name} expands to more than"):
            list(read_documents(source, lambda count: None))


def test_a_bomb_is_refused_at_its_beginning(tmp_path, monkeypatch):
    """A long file would otherwise permit a long expansion."""
    monkeypatch.setattr(streams, "UNLIMITED_BYTES", 1 << 20)
    row = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    noise = json.dumps({"text": os.urandom(200_000).hex()}).encode()
    path = write(tmp_path / "a.jsonl.gz", compressed(row * 5000) + compressed(noise))
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        texts_of(path)


def test_small_files_may_expand(tmp_path):
    text = b"word " * 1_000_000
    for name, pack in {"a.txt.gz": compressed, "a.txt.zst": zstandard.compress}.items():
        assert texts_of(write(tmp_path / name, pack(text))) == [text.decode()]


@pytest.mark.parametrize("value", ["0", "-1", "many", "", "1.5"])
def test_an_invalid_limit_is_refused(tmp_path, value, monkeypatch):
    monkeypatch.setenv(streams.MAX_EXPANSION_VARIABLE, value)
    with pytest.raises(UserError, match=r"HEINSEN_JAX_MAX_EXPANSION=.* positive integer"):
        texts_of(write(tmp_path / "a.txt.gz", compressed(b"text")))


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("rest", [b"x", b"garbage after the end"])
def test_bytes_after_the_end_of_a_compressed_file_are_damage(tmp_path, kind, rest):
    pack = {"gz": compressed, "zst": zstandard.compress}[kind]
    with pytest.raises(UserError, match=r"is (damaged|truncated)"):
        texts_of(write(tmp_path / f"a.jsonl.{kind}", pack(LINES) + rest))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, bound, device])
def test_what_is_no_file_is_refused_unread(tmp_path, make, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    folder = tmp_path / "in"
    write(folder / "a.txt", b"text " * 100)
    make(Path("in") / "b.txt")
    for name in ("in/b.txt", "in"):
        code, errors = command(monkeypatch, capfd, name, "--output", "out")
        assert (code, errors) == (
            2,
            "error: in/b.txt is a pipe or a device, not a file; give a file\n",
        )
    make(Path("manifest.json"))
    with pytest.raises(UserError, match="is a pipe or a device"):
        Manifest.load(tmp_path)
    with pytest.raises(UserError, match="is a pipe or a device"):
        ensure_downloaded(Remote("http://none", 1, ""), folder / "b.txt")


def test_links_to_nothing_are_named(tmp_path):
    write(tmp_path / "in" / "a.txt", b"text")
    (tmp_path / "in" / "b.txt").symlink_to("gone")
    with pytest.raises(UserError, match=r"b\.txt is a broken link; restore its target"):
        find_sources(tmp_path / "in")


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for name in ("in/a.txt", "in/b/c.txt", "in/.hidden/d.txt"):
        write(tmp_path / name, b"text")
    scan = os.scandir

    def refuse(path):
        if Path(path).name in ("b", ".hidden"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="in/b cannot be read: Permission denied"):
        find_sources(tmp_path / "in")


def test_a_run_s_folder_keeps_its_tokenizer(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    save_tokenizer(byte_tokenizer("bytes"), run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    text = write(tmp_path / "a.txt", b"text " * 100)
    with pytest.raises(UserError, match="give the name of a new folder"):
        prepare([str(text)], "bytes", run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_links_to_folders_are_followed(tmp_path):
    write(tmp_path / "in" / "a.txt", b"text")
    write(tmp_path / "other" / "b.txt", b"text")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "other")
    assert [x.name for x in find_sources(tmp_path / "in")] == ["in/a.txt", "in/more/b.txt"]
    (tmp_path / "other" / "back").symlink_to(tmp_path / "in")
    with pytest.raises(UserError, match="in/more/back is a link to a folder that contains it"):
        find_sources(tmp_path / "in")


def test_names_may_be_no_utf8(tmp_path):
    path = write(tmp_path / os.fsdecode(b"caf\xe9.txt"), b"to be " * 100)
    assert prepare([str(path)], "bytes", tmp_path / "out").inputs[0].name == r"caf\udce9.txt"


def test_results_are_not_written_among_texts(tmp_path, monkeypatch):
    """They would be texts of the next start."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / "a.txt", b"to be " * 100)
    with pytest.raises(UserError, match=r"data\.cache data is inside data, .* next start"):
        load(DataConfig(corpus="data"))
    with pytest.raises(UserError, match="output data/out is inside data"):
        prepare(["data"], "bytes", Path("data/out"))
    load(DataConfig(corpus="data", cache="data/.cache"))
    load(DataConfig(corpus="data/a.txt"))
