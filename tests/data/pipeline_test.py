import base64
import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax import data
from heinsen_jax.data import text
from heinsen_jax.data.config import DataConfig
from heinsen_jax.data.manifest import Manifest, Shard, Split
from heinsen_jax.data.pipeline import train_batches, validation_batches
from heinsen_jax.data.prepare import prepare
from heinsen_jax.data.text import TokenDataset
from heinsen_jax.data.tokenizers import get_tokenizer, save_tokenizer
from heinsen_jax.errors import UserError
from tests.data.tokenizer_json_test import byte_level, write

BYTES = get_tokenizer("bytes")
CONFIG = DataConfig(sequence_length=7, batch_size=6)


def make_dataset(folder: Path, train: list[int], validation: list[int]) -> TokenDataset:
    """Return a data set of shards with these lengths, in which every token encodes its position."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(BYTES, folder)
    Manifest(
        tokenizer="bytes",
        tokenizer_fingerprint=BYTES.fingerprint,
        split="document",
        validation_fraction=0.1,
        inputs=(),
        dtype="uint32",
        vocab_size=10_000,
        splits={
            "train": write_shards(folder, "train", train),
            "validation": write_shards(folder, "validation", validation),
        },
    ).write(folder / "manifest.json")
    return TokenDataset(folder)


def write_shards(folder: Path, name: str, lengths: list[int]) -> Split:
    shards = []
    for index, length in enumerate(lengths):
        file = f"{name}-{index:05d}.bin"
        (1000 * index + np.arange(length)).astype("<u4").tofile(folder / file)
        shards.append(Shard(file=file, tokens=length, bytes=length, documents=1, sha256=""))
    return Split.of(tuple(shards))


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    return make_dataset(tmp_path / "set", [100, 5, 333, 8], [50, 9])


def take(count: int, dataset: TokenDataset, config: DataConfig = CONFIG, **options) -> np.ndarray:
    options = {"seed": 0, **options}
    batches = list(itertools.islice(train_batches(dataset, config, **options), count))
    assert all(batch.loss_mask.all() for batch in batches)
    return np.stack([batch.tokens for batch in batches])


def test_windows_are_runs_of_one_shard(dataset: TokenDataset) -> None:
    batches = take(100, dataset)
    assert batches.shape == (100, 6, 8)
    assert batches.dtype == np.int32
    np.testing.assert_array_equal(np.diff(batches, axis=-1), 1)
    shards, last = batches[..., 0] // 1000, batches[..., -1] % 1000
    lengths = np.array([100, 5, 333, 8])
    assert (last < lengths[shards]).all()
    assert set(shards.flatten()) == {0, 2, 3}  # shard 1 is too short for a window


def test_every_token_is_visited(dataset: TokenDataset) -> None:
    expected = {*range(100), *range(2000, 2333), *range(3000, 3008)}
    assert set(take(200, dataset).flatten()) == expected


def test_epoch_visits_every_window_once(dataset: TokenDataset) -> None:
    windows = 99 // 7 + 332 // 7 + 1
    config = dataclasses.replace(CONFIG, batch_size=windows)
    for epoch in take(5, dataset, config):
        starts = np.sort(epoch[:, 0])
        first_shard = starts[starts < 1000]
        assert len(first_shard) == 14
        # Each start has moved by less than a window, and never past the end of the shard.
        base = 7 * np.arange(14)
        assert ((first_shard >= base) & (first_shard < base + 7) & (first_shard <= 92)).all()


def test_epochs_differ_in_order_and_in_offsets(dataset: TokenDataset) -> None:
    windows = 99 // 7 + 332 // 7 + 1
    config = dataclasses.replace(CONFIG, batch_size=windows)
    first, second = take(2, dataset, config)[..., 0]
    # A window that starts at 7 k moves by less than 7, so the order can be inferred.
    first_order, second_order = (first % 1000 // 7).tolist(), (second % 1000 // 7).tolist()
    assert first_order != sorted(first_order)
    assert first_order[:20] != second_order[:20]
    assert set(first.tolist()) != set(second.tolist())


def test_seeds_differ_and_repeat(dataset: TokenDataset) -> None:
    np.testing.assert_array_equal(take(20, dataset, seed=3), take(20, dataset, seed=3))
    assert (take(20, dataset, seed=3) != take(20, dataset, seed=4)).any()


@pytest.mark.parametrize("start", [1, 9, 10, 11, 57])
def test_batch_does_not_depend_on_where_iteration_starts(dataset: TokenDataset, start: int) -> None:
    np.testing.assert_array_equal(
        take(60, dataset)[start:], take(60 - start, dataset, start_step=start)
    )


@pytest.mark.parametrize("count", [2, 3, 6])
def test_processes_share_the_same_global_batch(dataset: TokenDataset, count: int) -> None:
    whole = take(30, dataset)
    parts = [take(30, dataset, process_index=i, process_count=count) for i in range(count)]
    assert {part.shape for part in parts} == {(30, 6 // count, 8)}
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_batch_size_must_be_divisible(dataset: TokenDataset) -> None:
    for batches in (
        lambda: train_batches(dataset, CONFIG, seed=0, process_count=4),
        lambda: next(validation_batches(dataset, CONFIG, process_count=4)),
    ):
        with pytest.raises(UserError, match="batch_size=6 cannot be shared by 4"):
            batches()


def test_too_little_text(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [7, 3], [1])
    with pytest.raises(UserError, match=r"sequence_length=7 needs 8 tokens .* has 7; give more"):
        train_batches(dataset, CONFIG, seed=0)
    with pytest.raises(UserError, match="validation"):
        next(validation_batches(dataset, CONFIG))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    sequence_length=st.integers(1, 12),
    batch_size=st.sampled_from([2, 4, 6]),
    process_count=st.sampled_from([1, 2]),
)
def test_validation_predicts_every_token_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    sequence_length: int,
    batch_size: int,
    process_count: int,
) -> None:
    dataset = make_dataset(tmp_path_factory.mktemp("set"), [1], [*lengths, 2])
    config = DataConfig(sequence_length=sequence_length, batch_size=batch_size)
    processes = [
        list(validation_batches(dataset, config, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert len({len(batches) for batches in processes}) == 1
    predicted: list[int] = []
    for batch in itertools.chain(*processes):
        assert batch.tokens.shape == (batch_size // process_count, sequence_length + 1)
        assert batch.loss_mask.shape == (batch_size // process_count, sequence_length)
        inputs, targets = (
            batch.tokens[:, :-1][batch.loss_mask],
            batch.tokens[:, 1:][batch.loss_mask],
        )
        np.testing.assert_array_equal(inputs + 1, targets)
        predicted.extend(targets.tolist())
    expected = [
        1000 * shard + i for shard, length in enumerate([*lengths, 2]) for i in range(1, length)
    ]
    assert sorted(predicted) == expected


def test_validation_goes_in_order_and_may_stop_early(dataset: TokenDataset) -> None:
    config = DataConfig(sequence_length=7, batch_size=2)
    batches = list(validation_batches(dataset, config))
    assert [batch.tokens[0, 0] for batch in batches] == [0, 14, 28, 42, 1007]
    assert batches[0].tokens.dtype == np.int32
    assert batches[0].loss_mask.dtype == bool
    assert len(list(validation_batches(dataset, config, max_batches=2))) == 2
    assert len(list(validation_batches(dataset, config, max_batches=99))) == 5


def test_longer_windows_predict_the_same_tokens_from_more(dataset: TokenDataset) -> None:
    config = DataConfig(sequence_length=7, batch_size=2, test_lengths=(20, 100))
    assert config.longest == 100
    assert list(dataset.held_out_rows(config)) == ["", "20", "100"]
    predicted = {}
    for name in ("", "20", "100"):
        batches = list(validation_batches(dataset, config, name=name))
        assert batches[0].loss_mask.shape == (2, int(name or 7))
        predicted[name] = sorted(t for b in batches for t in b.tokens[:, 1:][b.loss_mask].tolist())
    assert predicted[""] == predicted["20"] == predicted["100"]


@pytest.mark.usefixtures("unchecked")  # which reads a row at random, perhaps the damaged one
def test_token_outside_the_vocabulary_is_detected(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [80], [80])
    for name in ("train", "validation"):
        shard = np.memmap(tmp_path / f"{name}-00000.bin", "<u4", "r+")
        shard[40] = 10_000
        shard.flush()
    message = r"{}-00000\.bin is damaged: token 10000 .* vocabulary of 10000"
    with pytest.raises(UserError, match=message.format("train")):
        take(20, dataset)
    with pytest.raises(UserError, match=message.format("validation")):
        list(validation_batches(dataset, CONFIG))


def test_exchanged_tokenizer_is_detected(tmp_path: Path) -> None:
    make_dataset(tmp_path, [80], [80])
    ranks = "".join(
        f"{base64.b64encode(bytes([byte])).decode()} {255 - byte}\n" for byte in range(256)
    )
    (tmp_path / "other.tiktoken").write_text(ranks)
    save_tokenizer(get_tokenizer(str(tmp_path / "other.tiktoken")), tmp_path)
    with pytest.raises(UserError, match="its tokens were made with another tokenizer"):
        TokenDataset(tmp_path)


def test_load_prepares_once_and_returns_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = "".join(f"line {i}: to be, or not to be\n" for i in range(100))
    (tmp_path / "My play.txt").write_text(play)
    config = DataConfig(
        corpus=str(tmp_path / "My play.txt"), cache=str(tmp_path / "cache"), sequence_length=16
    )
    dataset = data.load(config)
    assert dataset.folder.name.startswith("my-play-")
    assert dataset.folder.name.endswith("-bytes")
    assert dataset.manifest.splits["train"].tokens == int(0.9 * len(play))
    for batch in itertools.islice(data.train_batches(dataset, config, seed=1), 3):
        for row in batch.tokens:
            assert dataset.tokenizer.decode(row.tolist()) in play
    monkeypatch.setattr(text, "prepare", lambda *_, **__: None)
    assert data.load(config).manifest == dataset.manifest


def test_train_and_validation_do_not_overlap(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(
        corpus=str(tmp_path / "a.txt"), cache=str(tmp_path), sequence_length=30, batch_size=8
    )
    dataset = data.load(config)
    rows = take(60, dataset, config).reshape(-1, 31).tolist()
    train = {char for row in rows for char in dataset.tokenizer.decode(row)}
    held_out = dataset.split("validation").read(0, 0, 10**6).tolist()
    assert len(train) > 2000
    assert train <= {*text[:2700], "�"}  # of characters that are cut
    assert dataset.tokenizer.decode(held_out) == text[2700:]


def test_prepared_folder_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be, or not to be\n" * 100)
    made = data.load(DataConfig(corpus=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")))
    used = data.load(DataConfig(corpus=str(made.folder), cache=str(tmp_path / "none")))
    assert used.manifest == made.manifest
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="set tokenizer=bytes"):
        data.load(DataConfig(corpus=str(made.folder), tokenizer="gpt2"))
    with pytest.raises(UserError, match=r"validation_fraction=0\.3, but"):
        data.load(DataConfig(corpus=str(made.folder), validation_fraction=0.3))


def test_a_text_that_was_edited_is_prepared_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    config = DataConfig(corpus=str(path), cache=str(tmp_path / "cache"))
    before = data.load(config)
    path.write_text("y" * 100)  # has the same size
    os.utime(path, ns=(0, 1))
    after = data.load(config)
    assert set(after.split("train").read(0, 0, 99).tolist()) == {ord("y")}
    assert after.manifest.inputs[0].fingerprint != before.manifest.inputs[0].fingerprint
    assert set(before.split("train").read(0, 0, 99).tolist()) == {ord("x")}  # mapped by a reader
    other = data.load(DataConfig(**(dataclasses.asdict(config) | {"validation_fraction": 0.5})))
    assert other.manifest.splits["train"].tokens == 50


def test_tokenizers_of_one_name_do_not_share_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 50)
    found = []
    for order in (range(256), range(255, -1, -1)):
        path = tmp_path / str(len(found)) / "mine.tiktoken"
        path.parent.mkdir()
        codes = [base64.b64encode(bytes([i])).decode() for i in order]
        path.write_text("".join(f"{code} {rank}\n" for rank, code in enumerate(codes)))
        os.utime(path, ns=(0, 1))
        cache = str(tmp_path / "cache")
        config = DataConfig(corpus=str(tmp_path / "a.txt"), tokenizer=str(path), cache=cache)
        found.append(data.load(config).split("train").read(0, 0, 3).tolist())
    assert found == [[97, 98, 99], [255 - 97, 255 - 98, 255 - 99]]


@pytest.mark.usefixtures("unchecked")
def test_another_column_is_another_data_set(tmp_path: Path) -> None:
    path, options = tmp_path / "a.jsonl", {"cache": str(tmp_path / "cache")}
    path.write_text("".join(f'{{"text": "a{i}", "body": "b{i}"}}\n' for i in range(40)))
    options |= {"corpus": str(path), "validation_fraction": 0.5}
    one, other = (data.load(DataConfig(text_column=x, **options)) for x in ("text", "body"))
    assert one.folder != other.folder
    assert chr(one.split("train").read(0, 0, 1)[0]) == "a"
    assert chr(other.split("train").read(0, 0, 1)[0]) == "b"
    assert data.load(DataConfig(corpus=str(other.folder))).manifest == other.manifest
    with pytest.raises(UserError, match=r"text_column=body, but .* was prepared with text"):
        data.load(DataConfig(corpus=str(one.folder), text_column="body"))


@pytest.mark.parametrize("form", ["folder", "file"])
def test_tokenizers_of_hugging_face_do_not_share_a_data_set(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.txt").write_text("the theory " * 50)
    folder, found = tmp_path / "mine", []
    for merges in (0, 5):
        document = json.loads(byte_level().to_str())
        del document["model"]["merges"][merges:]
        write(folder, document)
        tokenizer = str(folder if form == "folder" else folder / "tokenizer.json")
        config = DataConfig(
            corpus=str(tmp_path / "a.txt"), tokenizer=tokenizer, cache=str(tmp_path / "cache")
        )
        found.append(data.load(config))
    assert found[0].folder != found[1].folder
    assert found[0].train_tokens > found[1].train_tokens
    config = DataConfig(corpus=str(found[1].folder), tokenizer=tokenizer)
    assert data.load(config).manifest == found[1].manifest


def test_a_text_for_validation_alone_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    text.prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out", split="validation")
    config = DataConfig(corpus=str(tmp_path / "out"), sequence_length=2)
    with pytest.raises(UserError, match=r"data\.corpus: it has no text for training"):
        data.load(config).train_row(config, 0)


@pytest.mark.usefixtures("unchecked")
def test_an_output_of_a_text_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    text.prepare([str(path)], "bytes", tmp_path / "out")
    os.utime(path, ns=(0, 1))
    text.prepare([str(path)], "bytes", tmp_path / "out")  # touched, and the same
    path.write_text("y" * 100)
    with pytest.raises(UserError, match=r"differs in inputs \(a.txt: 1 files, 100 bytes, hash"):
        text.prepare([str(path)], "bytes", tmp_path / "out")


def test_a_whole_text_can_be_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    config = DataConfig(corpus=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    dataset = text.load_text(config, split="validation")
    assert dataset.train_tokens == 0
    found = dataset.split("validation").read(0, 0, 9).tolist()
    assert dataset.tokenizer.decode(found) == f"to be{data.END_OF_TEXT}"


def test_equal_file_names_do_not_share_a_data_set(tmp_path: Path) -> None:
    folders = set()
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name * 50)
        config = DataConfig(corpus=str(tmp_path / name / "a.txt"), cache=str(tmp_path / "cache"))
        dataset = data.load(config)
        folders.add(dataset.folder)
        assert set(dataset.split("train").read(0, 0, 99).tolist()) == {ord(name)}
    assert len(folders) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence_length": 0},
        {"batch_size": -1},
        {"validation_fraction": 1.0},
        {"sequence_lenght": 8},
        {"batch_size": "many"},
    ],
)
def test_wrong_field_is_named(wrong: dict) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(wrong))):
        DataConfig(**wrong)


def test_package_exports_its_public_names() -> None:
    for name in data.__all__:
        assert getattr(data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        data.nothing  # noqa: B018


def test_the_cache_may_be_deleted_once_data_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be " * 100)
    cache = tmp_path / "cache"
    config = DataConfig(corpus=str(tmp_path / "a.txt"), cache=str(cache), sequence_length=8)
    dataset = data.load(config)
    before = dataset.held_out_rows(config)[""][0].tokens
    shutil.rmtree(cache)
    np.testing.assert_array_equal(dataset.held_out_rows(config)[""][0].tokens, before)


def test_prepared_data_of_another_tokenizer_with_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the theory " * 50)
    for parent, merges in (("a", 0), ("b", 5)):
        document = json.loads(byte_level().to_str())
        del document["model"]["merges"][merges:]
        write(tmp_path / parent / "mine", document)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "a/mine"), tmp_path / "out")
    config = DataConfig(corpus=str(tmp_path / "out"), tokenizer=str(tmp_path / "a/mine"))
    data.load(config)
    with pytest.raises(UserError, match=r"tokenizer=.*b/mine differs from the mine with which"):
        data.load(dataclasses.replace(config, tokenizer=str(tmp_path / "b/mine")))
