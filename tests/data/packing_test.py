"""Rows of packed documents: segments, masks, and the plan of whole documents."""

import itertools
import time
from pathlib import Path

import numpy as np
import pydantic
import pytest

from heinsen_jax.data import DataConfig, TokenDataset, load, train_batches
from heinsen_jax.data.packing import Plan, best_fit, packed_row
from heinsen_jax.data.pipeline import validation_batches
from heinsen_jax.data.prepare import prepare
from heinsen_jax.errors import UserError

LENGTH = 16


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Documents of 1 to 60 letters, each of its own order."""
    rng = np.random.default_rng(0)
    return ["".join(rng.choice([*"abcdefgh"], size)) for size in [*range(1, 40), 60, 60]]


@pytest.fixture(scope="module")
def config(texts, tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    for index, text in enumerate(texts):
        (folder / f"{index:03d}.txt").write_text(text)
    return DataConfig(
        corpus=str(folder),
        cache=str(tmp_path_factory.mktemp("cache")),
        validation_fraction=0.3,
        sequence_length=LENGTH,
        batch_size=4,
    )


@pytest.fixture(scope="module")
def dataset(config) -> TokenDataset:
    return load(config)


def changed(config: DataConfig, **fields) -> DataConfig:
    return DataConfig(**{**vars(config), **fields})


def documents(dataset: TokenDataset, split: str) -> list[tuple[int, ...]]:
    """Return the documents of a split, with their ends, which are one shard."""
    source, end = dataset.split(split), dataset.tokenizer.end_of_text_id
    tokens = source.read(0, 0, source.lengths[0])
    parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    return [tuple(part.tolist()) for part in parts if len(part)]


def test_a_row_has_segments_and_a_mask_of_predictions_within_them():
    row = packed_row([np.array(x, np.int32) for x in ([7, 8, 9], [5], [3, 4])], 7)
    np.testing.assert_array_equal(row.tokens, [7, 8, 9, 5, 3, 4, 0, 0])
    np.testing.assert_array_equal(row.segment_ids, [0, 0, 0, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(row.loss_mask, [1, 1, 0, 0, 1, 0, 0])
    assert (row.tokens.dtype, row.segment_ids.dtype, row.loss_mask.dtype) == ("i4", "i4", bool)


def test_a_corpus_of_documents_separates_them_by_default(config, dataset, tmp_path):
    assert dataset.documents(config) == "separate"
    assert dataset.documents(changed(config, documents="continuous")) == "continuous"
    (tmp_path / "a.txt").write_text("to be, or not to be\n" * 9)
    text = DataConfig(corpus=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    assert load(text).documents(text) == "continuous"
    assert next(train_batches(load(text), changed(text, sequence_length=9), seed=0))[2] is None


def test_windows_of_training_end_segments_with_documents(config, dataset):
    end = dataset.tokenizer.end_of_text_id
    batches = itertools.islice(train_batches(dataset, config, seed=0), 50)
    tokens, mask, ids = map(np.concatenate, zip(*(batch[:3] for batch in batches), strict=True))
    is_end = tokens == end
    assert is_end.any()
    np.testing.assert_array_equal(np.diff(ids), is_end[:, :-1])  # the end belongs to its document
    np.testing.assert_array_equal(mask, ~is_end[:, :-1])
    plain = next(train_batches(dataset, changed(config, documents="continuous"), seed=0))
    np.testing.assert_array_equal(plain.tokens, tokens[:4])
    assert plain.segment_ids is None
    assert plain.loss_mask.all()


@pytest.mark.parametrize("length", [5, LENGTH, 1000])
def test_validation_predicts_every_token_but_the_first_of_documents(config, dataset, length):
    expected = sorted(t for x in documents(dataset, "validation") for t in x[1:])
    found = []
    for batch in validation_batches(dataset, changed(config, sequence_length=length)):
        found += batch.tokens[:, 1:][batch.loss_mask].tolist()
        starts = np.diff(batch.segment_ids) != 0
        assert not np.any(starts & batch.loss_mask)
    # windows that begin with the first token of a document predict the others all the same
    assert sorted(found) == expected


@pytest.mark.parametrize("length", [5, LENGTH, 100])
def test_an_epoch_of_best_fit_predicts_every_token_but_the_first_of_documents(
    config, dataset, length
):
    packed = changed(config, packing="best_fit", sequence_length=length, batch_size=1)
    whole = documents(dataset, "train")
    expected = sorted(t for x in whole for t in x[1:])
    row, count = dataset.train_row(packed, 0), len(dataset.plan(length))
    for epoch in (range(count), range(count, 2 * count)):
        predicted, segments = [], []
        for tokens, mask, ids, _ in map(row, epoch):
            assert len(tokens) == length + 1
            assert not np.any(mask & (np.diff(ids) != 0))
            predicted += tokens[1:][mask].tolist()
            bounds = np.flatnonzero(np.diff(ids, prepend=-1, append=ids[-1] + 1))
            segments += [tuple(tokens[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
        assert sorted(predicted) == expected
        for document in whole:
            assert len(document) > length + 1 or document in segments


def test_rows_of_best_fit_are_shuffled_by_seed_and_epoch(config, dataset):
    packed = changed(config, packing="best_fit", batch_size=len(dataset.plan(LENGTH)))
    first, second = (x.tokens for x in itertools.islice(train_batches(dataset, packed, seed=0), 2))
    other = next(train_batches(dataset, packed, seed=1)).tokens
    resumed = next(train_batches(dataset, packed, seed=0, start_step=1)).tokens
    np.testing.assert_array_equal(resumed, second)
    for epoch in (second, other):
        assert np.any(epoch != first)
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, first))


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_covers_each_document(seed):
    """Every prediction inside a document is made once, in rows of limited size; documents that fit
    a row are whole."""
    rng = np.random.default_rng(seed)
    sizes, length = rng.integers(1, 31, rng.integers(1, 60)), int(rng.integers(1, 21))
    ends = np.cumsum(sizes)
    plan = Plan([ends, ends], length)
    found: dict[int, list[int]] = {0: [], 1: []}
    tokens = 0
    for shard, segments in (plan[index] for index in range(len(plan))):
        in_row = sum(segment.size for segment in segments)
        assert 0 < in_row <= length + 1
        tokens += in_row
        for start, size in segments:
            found[shard] += range(start + 1, start + size)
            document = int(np.searchsorted(ends, start, side="right"))
            assert size == length + 1 or start + size == ends[document]
            assert size == min(sizes[document], length + 1) or sizes[document] > length + 1
    expected = sorted({*range(ends[-1])} - {*(ends - sizes).tolist()})
    assert sorted(found[0]) == sorted(found[1]) == expected
    assert plan.padding == pytest.approx(1 - tokens / (max(len(plan), 1) * (length + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_decreasing_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    sizes, free = rng.integers(1, 21, rng.integers(0, 80)), []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [(space, row) for row, space in enumerate(free) if space >= size]
        if fitting:
            free[min(fitting)[1]] -= size
        else:
            free.append(20 - size)
    rows = best_fit(sizes, 20)
    assert sorted(20 - np.bincount(rows, weights=sizes)) == sorted(free)


def test_a_plan_of_many_documents_needs_seconds():
    sizes = np.random.default_rng(0).lognormal(6, 1, 200_000).astype(np.int64) + 2
    start = time.monotonic()
    plan = Plan([np.cumsum(sizes)], 1024)
    assert time.monotonic() - start < 10
    assert plan.padding < 0.01


def test_best_fit_and_continuous_are_refused_together():
    with pytest.raises(pydantic.ValidationError, match="packing='best_fit' with documents='cont"):
        DataConfig(packing="best_fit", documents="continuous")


@pytest.mark.usefixtures("unchecked")
def test_a_corpus_without_documents_to_pack_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be")
    prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out", split="validation")
    config = DataConfig(corpus=str(tmp_path / "out"), packing="best_fit", sequence_length=2)
    with pytest.raises(UserError, match=r"data\.corpus: it has no text for training"):
        load(config).train_row(config, 0)
