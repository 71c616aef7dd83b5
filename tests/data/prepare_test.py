import base64
import gzip
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from heinsen_jax.data import DataConfig
from heinsen_jax.data import prepare as prepare_module
from heinsen_jax.data import units as units_module
from heinsen_jax.data.documents import Document
from heinsen_jax.data.manifest import Manifest, numpy_dtype
from heinsen_jax.data.prepare import SplitChoice, prepare
from heinsen_jax.data.sources import SplitName
from heinsen_jax.data.text import TokenDataset
from heinsen_jax.data.tokenizer_pretrained import pretrained_tokenizer
from heinsen_jax.data.tokenizers import (
    get_tokenizer,
    load_tokenizer,
    save_tokenizer,
    start_ids,
    tokenizer_version,
)
from heinsen_jax.data.units import SplitRule
from heinsen_jax.errors import UserError
from tests.conftest import GOLDEN_FOLDER
from tests.data.tokenizer_json_test import byte_level, write


def make_folder(path: Path, count: int = 40) -> Path:
    path.mkdir()
    for index in range(count):
        (path / f"{index:03d}.txt").write_text(f"document {index} says é\n" * (index + 1))
    return path


def tokens(output: Path, split: SplitName) -> list[int]:
    manifest = Manifest.load(output)
    dtype = numpy_dtype(manifest.dtype)
    return [
        int(token)
        for shard in manifest.splits[split].shards
        for token in np.fromfile(output / shard.file, dtype)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents_of(output: Path, split: SplitName) -> list[bytes]:
    ids = tokens(output, split)
    ends = [index for index, token in enumerate(ids) if token == 256]
    starts = [0, *(end + 1 for end in ends)]
    return [bytes(ids[start:end]) for start, end in zip(starts, ends, strict=False)]


def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "UNIT_BYTES", 2000)


def test_every_document_lands_once_in_one_split(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    manifest = prepare([str(folder)], "bytes", tmp_path / "out", validation_fraction=0.3)
    train = documents_of(tmp_path / "out", "train")
    validation = documents_of(tmp_path / "out", "validation")
    originals = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert sorted(train + validation) == sorted(originals)
    assert [text for text in originals if text in set(train)] == train
    assert 0 < len(validation) < 25
    for split, texts in zip(manifest.splits.values(), (train, validation), strict=True):
        assert split.documents == len(texts)
        assert split.bytes == sum(map(len, texts))
        assert split.tokens == split.bytes + split.documents


def test_manifest_describes_the_data(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    out = tmp_path / "out"
    manifest = prepare([str(folder)], "bytes", out, validation_fraction=0.3)
    assert manifest == Manifest.load(out)
    assert (manifest.tokenizer, manifest.vocab_size, manifest.dtype) == ("bytes", 257, "uint16")
    assert [(i.name, i.files) for i in manifest.inputs] == [("in", 40)]
    assert manifest.split == "document"
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    assert load_tokenizer(out).encode("é") == [195, 169]


@given(st.lists(st.text(max_size=4), max_size=30), st.floats(0.01, 0.99))
def test_equal_documents_are_in_the_same_split(texts: list[str], fraction: float) -> None:
    rule = SplitRule("document", fraction)
    ways: dict[str, set[str]] = {}
    for text in texts:
        ((split, part),) = rule.divide(Document(text))
        assert part == text
        ways.setdefault(text, set()).add(split)
    assert all(len(way) == 1 for way in ways.values())


def test_fractions_of_the_documents_are_for_validation_and_tests() -> None:
    def splits(rule: SplitRule) -> list[str]:
        return [next(rule.divide(Document(f"document {i}")))[0] for i in range(5000)]

    rules = SplitRule("document", 0.1), SplitRule("document", 0.1, 0.2)
    without, with_tests = map(splits, rules)
    assert 400 < without.count("validation") < 600
    assert 900 < with_tests.count("test") < 1100
    pairs = {*zip(without, with_tests, strict=True)}
    assert pairs == {("validation", "validation"), ("train", "train"), ("train", "test")}


@pytest.mark.parametrize("split", ["tail", "document"])
def test_a_test_split_is_prepared_as_validation_is(tmp_path: Path, split: SplitChoice) -> None:
    folder, out = make_folder(tmp_path / "in"), tmp_path / "out"
    options: dict = {"validation_fraction": 0.25, "test_fraction": 0.25, "split": split}
    manifest = prepare([str(folder)], "bytes", out, **options)
    parts = [documents_of(out, name) for name in ("train", "validation", "test")]
    originals = [path.read_bytes() for path in sorted(folder.iterdir())]
    if split == "tail":
        assert [b"".join(texts) for texts in zip(*parts, strict=True)] == originals
        assert sum(map(len, parts[2])) == pytest.approx(0.25 * sum(map(len, originals)), rel=0.1)
    else:
        assert sorted(itertools.chain(*parts)) == sorted(originals)
    assert manifest == prepare([str(folder)], "bytes", out, **options)
    with pytest.raises(UserError, match=r"differs in test_fraction \(0\.25, not 0\.5\)"):
        prepare([str(folder)], "bytes", out, **{**options, "test_fraction": 0.5})


def test_fractions_leave_text_for_training(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    with pytest.raises(UserError, match=r"test_fraction=0\.5 must be .* less than 1 with .*=0\.5"):
        prepare([str(folder)], "bytes", tmp_path, validation_fraction=0.5, test_fraction=0.5)
    few: dict = {"split": "document", "validation_fraction": 0.3, "test_fraction": 1e-5}
    with pytest.raises(UserError, match="no text is left for test with test_fraction=1e-05"):
        prepare([str(folder)], "bytes", tmp_path / "out", **few)


@pytest.mark.parametrize("fraction", [None, 0.25])
def test_single_text_is_split_at_its_tail(tmp_path: Path, fraction: float | None) -> None:
    text = "".join(chr(200 + index % 90) for index in range(1001))
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out"
    manifest = prepare([str(tmp_path / "a.txt")], "bytes", out, validation_fraction=fraction)
    cut = 750 if fraction else 900
    assert manifest.split == "tail"
    assert bytes(tokens(out, "train")).decode() == text[:cut]
    assert bytes(tokens(out, "validation")).decode() == text[cut:]


def test_tiny_shakespeare_has_the_usual_token_counts(published_data: Path, tmp_path: Path) -> None:
    ranks, text = published_data / "gpt2.tiktoken", published_data / "tinyshakespeare.txt"
    splits = prepare([str(text)], str(ranks), tmp_path / "out").splits
    assert (splits["train"].tokens, splits["validation"].tokens) == (301_966, 36_059)


def test_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    extra = [bytes(pair) for pair in np.ndindex(256, 256)]
    ranks = [bytes([byte]) for byte in range(256)] + extra
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (tmp_path / "big.tiktoken").write_text("".join(lines))
    (tmp_path / "a.txt").write_text("~~~~~~~~ ~~" * 20)
    out = tmp_path / "out"
    manifest = prepare([str(tmp_path / "a.txt")], str(tmp_path / "big.tiktoken"), out)
    assert manifest.dtype == "uint32"
    expected = get_tokenizer(str(tmp_path / "big.tiktoken")).encode("~~~~~~~~ ~~" * 18)
    assert tokens(out, "train") == expected


def test_all_kinds_of_inputs_can_be_combined(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", 5)
    row = json.dumps({"text": "a row"}).encode()
    (tmp_path / "a.jsonl").write_bytes(row)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(row.replace(b"row", b"zst")))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(row.replace(b"row", b"gz")))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"a text"))
    pq.write_table(pa.table({"text": ["a table"]}), tmp_path / "e.parquet")
    names = ["a.jsonl", "b.jsonl.zst", "c.jsonl.gz", "d.txt.gz", "e.parquet"]
    inputs = [str(folder), *(str(tmp_path / name) for name in names)]
    out = tmp_path / "out"
    manifest = prepare(inputs, "bytes", out, validation_fraction=0.5)
    assert [i.name for i in manifest.inputs] == ["in", *names]
    everything = documents_of(out, "train") + documents_of(out, "validation")
    assert {b"a row", b"a zst", b"a gz", b"a text", b"a table"} < set(everything)
    assert len(everything) == 10


def test_same_inputs_elsewhere_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_units(monkeypatch)
    (tmp_path / "x").mkdir()
    for parent in (tmp_path, tmp_path / "x"):
        folder = make_folder(parent / "in")
        prepare([str(folder)], "bytes", parent / "out", validation_fraction=0.2)
    assert contents(tmp_path / "out") == contents(tmp_path / "x" / "out")
    assert len(list((tmp_path / "out").glob("unit-*.json"))) > 3


def test_interrupted_preparation_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_units(monkeypatch)
    folder = make_folder(tmp_path / "in")
    arguments = ([str(folder)], "bytes")
    prepare(*arguments, tmp_path / "whole", validation_fraction=0.2)

    done: list[int] = []
    process = prepare_module.process_unit

    def stop_in_the_fourth(unit, output, on_read):
        def interrupt(count: int) -> None:
            if len(done) == 3:
                raise KeyboardInterrupt
            on_read(count)

        process(unit, output, interrupt)
        done.append(unit.index)

    monkeypatch.setattr(prepare_module, "process_unit", stop_in_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        prepare(*arguments, tmp_path / "out", validation_fraction=0.2)
    assert done == [0, 1, 2]
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        Manifest.load(tmp_path / "out")
    again: list[int] = []

    def count(unit, output, on_read):
        again.append(unit.index)
        process(unit, output, on_read)

    monkeypatch.setattr(prepare_module, "process_unit", count)
    prepare(*arguments, tmp_path / "out", validation_fraction=0.2)
    assert again[0] == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_killed_preparation_resumes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    code = (
        "import os, signal, sys\n"
        "from heinsen_jax.data import prepare, units\n"
        "import heinsen_jax.data.prepare as prepare\n"
        "units.UNIT_BYTES = 2000\n"
        "real = prepare.process_unit\n"
        "def die(unit, output, on_read):\n"
        "    kill = lambda n: os.kill(os.getpid(), signal.SIGKILL) if unit.index == 2 else None\n"
        "    return real(unit, output, kill)\n"
        "prepare.process_unit = die\n"
        "prepare.prepare([sys.argv[1]], 'bytes', sys.argv[2], validation_fraction=0.2)\n"
    )
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", code, str(folder), str(out)], check=False)
    assert killed.returncode == -9
    assert (out / "unit-00001.json").exists()
    assert not (out / "unit-00002.json").exists()
    prepare([str(folder)], "bytes", out, validation_fraction=0.2)
    everything = documents_of(out, "train") + documents_of(out, "validation")
    assert sorted(everything) == sorted(path.read_bytes() for path in folder.iterdir())


def test_finished_data_set_is_not_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "in")
    first = prepare([str(folder)], "bytes", tmp_path / "out", validation_fraction=0.2)
    monkeypatch.setattr(prepare_module, "process_unit", None)
    monkeypatch.setattr(prepare_module, "save_tokenizer", None)  # and nothing is written
    again = prepare([str(folder)], "bytes", tmp_path / "out", validation_fraction=0.2)
    assert again == first


def test_units_are_pure_and_can_be_sent_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "in")
    units: list[units_module.Unit] = []
    process = prepare_module.process_unit
    monkeypatch.setattr(
        prepare_module,
        "process_unit",
        lambda unit, output, on_read: (units.append(unit), process(unit, output, on_read)),
    )
    out = tmp_path / "out"
    prepare([str(folder)], "bytes", out, validation_fraction=0.2)
    before = contents(out)
    (out / "train-00000.bin").unlink()
    function, unit = pickle.loads(pickle.dumps((process, units[0])))
    function(unit, out)
    assert contents(out) == before


def write_tables(folder: Path, count: int = 6) -> Path:
    """Write a folder of Parquet files, with texts in two columns."""
    folder.mkdir()
    for number in range(count):
        texts = [f"{number} {row} é" for row in range(20)]
        table = pa.table({"text": texts, "title": [f"title {text}" for text in texts]})
        pq.write_table(table, folder / f"{number:03d}.parquet")
    return folder


def test_interrupted_preparation_of_tables_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_units(monkeypatch)
    folder, out = write_tables(tmp_path / "in"), tmp_path / "out"
    options = {"validation_fraction": 0.2, "text_column": "title"}
    manifest = prepare([str(folder)], "bytes", tmp_path / "whole", **options)
    assert manifest.text_column == "title"
    everything = documents_of(tmp_path / "whole", "train")
    everything += documents_of(tmp_path / "whole", "validation")
    assert len({*everything}) == len(everything) == 120
    assert all(text.startswith(b"title ") for text in everything)

    process = prepare_module.process_unit

    def stop_in_the_third(unit, output, on_read):
        if unit.index == 2:
            raise KeyboardInterrupt
        return process(unit, output, on_read)

    monkeypatch.setattr(prepare_module, "process_unit", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(folder)], "bytes", out, **options)
    assert (out / "unit-00001.json").exists()
    monkeypatch.setattr(prepare_module, "process_unit", process)
    with pytest.raises(UserError, match=r"differs in text_column \(title, not text\)"):
        prepare([str(folder)], "bytes", out, validation_fraction=0.2)
    prepare([str(folder)], "bytes", out, **options)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_tokenizer_of_hugging_face_is_saved_with_the_tokens(tmp_path: Path) -> None:
    write(tmp_path / "mine", json.loads(byte_level().to_str()))
    folder, out = make_folder(tmp_path / "in", 5), tmp_path / "out"
    arguments = [str(folder)], str(tmp_path / "mine"), out
    options = {"validation_fraction": 0.5, "split": "document"}
    manifest = prepare(*arguments, **options)
    tokenizer = load_tokenizer(out)
    assert (manifest.tokenizer, manifest.vocab_size) == ("mine", tokenizer.vocab_size)
    ids = [*tokens(out, "train"), *tokens(out, "validation")]
    assert ids.count(tokenizer.end_of_text_id) == 5
    texts = tokenizer.decode(ids).split("<|endoftext|>")
    assert sorted(texts) == sorted(["", *(path.read_text() for path in folder.iterdir())])
    assert prepare(*arguments, **options) == manifest


def test_a_manifest_of_earlier_versions_is_loaded(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "in"), tmp_path / "out"
    manifest = prepare([str(folder)], "bytes", out, validation_fraction=0.3)
    for name in ("manifest.json", "recipe.json"):
        content = json.loads((out / name).read_text())
        del content["text_column"]
        (out / name).write_text(json.dumps(content))
    assert Manifest.load(out) == manifest
    assert prepare([str(folder)], "bytes", out, validation_fraction=0.3) == manifest


@pytest.mark.parametrize("change", ["tokenizer", "validation_fraction", "inputs"])
def test_folder_with_another_data_set_is_refused(tmp_path: Path, change: str) -> None:
    folder = make_folder(tmp_path / "in")
    out = tmp_path / "out"
    prepare([str(folder)], "bytes", out, validation_fraction=0.2)
    before = contents(out)
    tokenizer, fraction = "bytes", 0.2
    if change == "tokenizer":
        lines = (out / "tokenizer.tiktoken").read_text() + "YWI= 256\n"
        (tmp_path / "mine.tiktoken").write_text(lines)
        tokenizer = str(tmp_path / "mine.tiktoken")
    elif change == "validation_fraction":
        fraction = 0.3
    else:
        (folder / "000.txt").write_text("longer than it was")
    with pytest.raises(UserError, match=f"differs in {change} .*another output or delete"):
        prepare([str(folder)], tokenizer, out, validation_fraction=fraction)
    assert contents(out) == before


@pytest.mark.parametrize(("fraction", "split"), [(1e-9, "validation"), (1 - 1e-9, "train")])
def test_empty_split_is_named_with_its_remedy(tmp_path: Path, fraction: float, split: str) -> None:
    folder = make_folder(tmp_path / "in")
    out = tmp_path / "out"
    with pytest.raises(UserError, match=f"no text is left for {split} .*make validation_fraction"):
        prepare([str(folder)], "bytes", out, validation_fraction=fraction, split="document")
    prepare([str(folder)], "bytes", out, validation_fraction=0.3)
    assert len(documents_of(out, "train") + documents_of(out, "validation")) == 40


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_must_lie_between_0_and_1(tmp_path: Path, fraction: float) -> None:
    folder = make_folder(tmp_path / "in", 3)
    with pytest.raises(UserError, match=r"validation_fraction=.* between 0 and 1"):
        prepare([str(folder)], "bytes", tmp_path / "out", validation_fraction=fraction)


def test_invalid_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    folder = str(make_folder(tmp_path / "in", 3))
    problems = {
        ("nowhere.txt",): r"input nowhere\.txt does not exist; give one of python-stdlib",
        (str(tmp_path / "empty"),): "empty contains no text",
        (str(tmp_path / "empty.txt"),): "contains no text",
        (folder, folder): "given twice",
        (): "give a corpus",
    }
    for inputs, problem in problems.items():
        with pytest.raises(UserError, match=problem):
            prepare(inputs, "bytes", tmp_path / "out")


def test_few_files_are_split_at_their_tails(tmp_path: Path) -> None:
    """Seven files of different sizes: a random choice of documents would be empty or large."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.txt").write_text(f"{number}" * 100 * (number + 1))
    for fraction in (None, 0.3):
        output = tmp_path / f"out{fraction}"
        manifest = prepare([str(folder)], "bytes", output, validation_fraction=fraction)
        assert manifest.split == "tails"
        train, validation = (manifest.splits[name] for name in ("train", "validation"))
        assert validation.documents == train.documents == 7
        assert validation.bytes == pytest.approx(2800 * (fraction or 0.1), abs=1)
        assert tokens(output, "train").count(256) == 7  # ends of documents


def test_published_split_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has its own validation text"):
        prepare(["wikitext-2"], "bytes", tmp_path / "out", validation_fraction=0.1)
    assert list(SplitRule("published", None).divide(Document("a", "validation"))) == [
        ("validation", "a")
    ]


def test_unwritable_output(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output .*file.* cannot be written"):
        prepare([str(folder)], "bytes", tmp_path / "file" / "out")


def test_invalid_row_stops_the_preparation_and_leaves_no_partial_shard(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UserError, match=r"a\.jsonl:2 is not JSON"):
        prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {".lock", "recipe.json", "tokenizer.json", "tokenizer.tiktoken"}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda out: (out / "manifest.json").unlink(), r"holds no manifest\.json"),
        (lambda out: (out / "manifest.json").write_text("{"), "is damaged"),
        (lambda out: (out / "manifest.json").write_text('{"format_version": 2}'), "damaged"),
        (lambda out: (out / "train-00000.bin").unlink(), r"train-00000\.bin is missing"),
        (lambda out: os.truncate(out / "train-00000.bin", 10), "has 10 bytes instead of"),
    ],
)
def test_damaged_data_set_is_detected(tmp_path: Path, damage, problem: str) -> None:
    folder = make_folder(tmp_path / "in")
    prepare([str(folder)], "bytes", tmp_path / "out", validation_fraction=0.3)
    damage(tmp_path / "out")
    with pytest.raises(UserError, match=problem):
        Manifest.load(tmp_path / "out")


@pytest.mark.nightly
def test_of_two_processes_that_prepare_the_same_folder_one_waits(tmp_path: Path) -> None:
    """As when two trainers use the same data."""
    folder, out = make_folder(tmp_path / "in", 400), tmp_path / "out"
    program = "import sys; from heinsen_jax.data.prepare import prepare"
    program += "; prepare([sys.argv[1]], 'bytes', sys.argv[2], wait=True)"
    command = [sys.executable, "-c", program, str(folder), str(out)]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    prepare([str(folder)], "bytes", tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "heinsen_jax.data.prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_line(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "in"), tmp_path / "out"
    done = run_command(str(folder), "--output", str(out), "--validation-fraction", "0.3")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{Manifest.load(out).splits['train'].tokens} tokens" in done.stdout
    failed = run_command(str(folder), "--output", str(out), "--validation-fraction", "0.2")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1


def test_preparation_does_not_import_jax() -> None:
    code = "import sys, heinsen_jax.data.prepare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_start_tokens_of_pretrained_models_precede_each_document(tmp_path: Path) -> None:
    published, model = GOLDEN_FOLDER / "transformers" / "qwen2", tmp_path / "model"
    config = json.loads((published / "tokenizer_config.json").read_text())
    folder = make_folder(tmp_path / "in", count=3)
    (tmp_path / "published").mkdir()

    def prepared(out: str, **changes: object) -> Manifest:
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir()
        path = tmp_path / "published" / "tokenizer_config.json"
        path.write_text(json.dumps(config | changes))
        shutil.copy(published / "tokenizer.json", path.parent)
        tokenizer = pretrained_tokenizer(path.parent, "tiny")
        assert tokenizer is not None
        save_tokenizer(tokenizer, model)
        saved = model / "tokenizer_config.json"
        saved.write_text(json.dumps(json.loads(saved.read_text()) | changes))
        return prepare([str(folder)], str(model), tmp_path / out, split="validation")

    manifest, tokenizer = prepared("out"), load_tokenizer(model)
    expected = []
    for path in sorted(folder.iterdir()):
        expected += [*start_ids(tokenizer), *tokenizer.encode(path.read_text())]
        expected.append(tokenizer.end_of_text_id)
    assert start_ids(tokenizer) == manifest.start_ids == (3,)
    assert tokenizer_version(str(model)) == f"{tokenizer.fingerprint} 3"  # of folders in the cache
    assert tokens(tmp_path / "out", "validation") == expected
    dataset, size = TokenDataset(tmp_path / "out"), sum(x.stat().st_size for x in folder.iterdir())
    for documents, unpredicted in (("separate", len([*folder.iterdir()])), ("continuous", 0)):
        shown = dataset.bytes_per_token(DataConfig(documents=documents))
        assert shown == pytest.approx(size / (len(expected) - unpredicted))
    manifest.model_copy(update={"start_ids": ()}).write(tmp_path / "out" / "manifest.json")
    with pytest.raises(UserError, match=r"out: its documents do not begin with .*prepare it again"):
        TokenDataset(tmp_path / "out")

    with pytest.raises(UserError, match=r"differs in .*start_ids \(3, not none\)"):
        prepared("out", add_bos_token=False)
    assert " " not in tokenizer_version(str(model))
    # An end of text that texts also start with is between documents already.
    manifest = prepared("again", eos_token=config["bos_token"])
    assert (manifest.start_ids, tokens(tmp_path / "again", "validation").count(3)) == ((), 3)
