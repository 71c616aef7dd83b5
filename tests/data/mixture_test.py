"""Mixtures of corpora: proportions, stages, and evaluation by corpus."""

import dataclasses
from itertools import chain, islice

import numpy as np
import pydantic
import pytest

from heinsen_jax import data
from heinsen_jax.data import Batch, DataConfig, MixedDataset
from heinsen_jax.data.mixture import of_corpus
from heinsen_jax.data.prepare import prepare
from heinsen_jax.errors import UserError

BATCH, LENGTH = 8, 16


@pytest.fixture
def config(tmp_path):
    """Texts of a single letter each, so that a row tells its corpus."""
    for name in "abc":
        (tmp_path / name).write_text(name * 2000)
    return DataConfig(
        mixture={str(tmp_path / "a"): 3.0, str(tmp_path / "b"): 1.0},
        cache=str(tmp_path / "cache"),
        sequence_length=LENGTH,
        batch_size=BATCH,
    )


def letters(config, steps, start=0, seed=0, share=(0, 1)):
    """The corpus of each row, step by step."""
    dataset = data.load(config)
    parts = {"process_index": share[0], "process_count": share[1]}
    batches = data.train_batches(dataset, config, seed=seed, start_step=start, **parts)
    return [["".join(map(chr, np.unique(row))) for row in x.tokens] for x in islice(batches, steps)]


def test_rows_have_the_proportions_of_the_weights(config):
    rows = [*chain(*letters(config, 20))]
    assert rows.count("a") == 120
    assert rows.count("b") == 40


def test_a_batch_depends_only_on_the_seed_and_the_step(config, tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(1, 128)) * 20)  # whose rows differ
    dataset = data.load(config)
    assert isinstance(dataset, MixedDataset)

    def tokens(start, steps, **share):
        batches = data.train_batches(dataset, config, seed=3, start_step=start, **share)
        return np.stack([batch.tokens for batch in islice(batches, steps)])

    whole = tokens(0, 6)
    np.testing.assert_array_equal(tokens(4, 2), whole[4:])
    shares = [tokens(0, 6, process_index=i, process_count=2) for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(shares, 1), whole)


def test_stages_change_weights_and_corpora_at_their_step(config, tmp_path):
    a, b, c = (str(tmp_path / name) for name in "abc")
    stages = (2, {a: 0.0, b: 1.0, c: 1.0}), (4, {c: 1.0})
    staged = dataclasses.replace(config, mixture_stages=stages)
    rows = letters(staged, 6)
    assert rows[:2] == letters(config, 2)
    assert [*chain(*rows[2:4])].count("b") == [*chain(*rows[2:4])].count("c") == BATCH
    assert set([*chain(*rows[4:])]) == {"c"}
    assert letters(staged, 2, start=3) == rows[3:5]


def test_a_corpus_continues_in_its_order_across_stages(config, tmp_path):
    """No row of an epoch is repeated: the windows of a corpus are disjoint but for their shifts."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{number:07d} " for number in range(1000)))
    name = str(path)
    staged = dataclasses.replace(
        config, mixture={name: 1.0}, mixture_stages=((2, {name: 1.0}), (5, {name: 2.0}))
    )
    single = dataclasses.replace(config, mixture=None, corpus=name)
    rows = [
        np.concatenate([x.tokens for x in islice(data.train_batches(data.load(c), c, seed=0), 8)])
        for c in (staged, single)
    ]
    np.testing.assert_array_equal(*rows)


def test_no_row_is_drawn_twice_whatever_the_weights(config, tmp_path):
    """Also with weights of which one is hardly larger than another."""
    a, b = (str(tmp_path / name) for name in "ab")
    mixture = {a: 1.0, b: 1.009}
    staged = dataclasses.replace(
        config, batch_size=1, mixture=mixture, mixture_stages=((4000, mixture),)
    )
    drawn = []

    def recorded(name):
        def row(number):
            drawn.append((name, number))
            return Batch(np.zeros(1), np.ones(1, bool))

        return lambda config, seed: row

    dataset = data.load(staged)
    for name, source in dataset.sources.items():
        source.train_row = recorded(name)
    row = dataset.train_row(staged, 0)
    for number in range(4100):
        row(number)
    assert len({*drawn}) == len(drawn) == 4100
    assert [name for name, _ in drawn].count("b") == pytest.approx(4100 * 1.009 / 2.009, abs=2)


def test_documents_are_separate_in_all_corpora_or_in_none(config, tmp_path):
    """A folder has separate documents, if no setting says otherwise, and so has a file with it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "cde":
        (folder / f"{name}.txt").write_text(name * 500)
    mixed = dataclasses.replace(config, mixture={str(tmp_path / "a"): 1.0, str(folder): 1.0})
    dataset = data.load(mixed)
    batch = next(data.train_batches(dataset, mixed, seed=0))
    assert batch.segment_ids.shape == batch.tokens.shape
    for batch in data.validation_batches(dataset, mixed):
        assert batch.segment_ids.shape == batch.tokens.shape


def test_validation_has_all_corpora_together_and_each(config):
    dataset = data.load(config)
    rows = dataset.held_out_rows(config)
    assert [*rows] == ["", "a", "b"]
    assert len(rows[""]) == len(rows["a"]) + len(rows["b"])
    together = [chr(row.tokens[0]) for row in rows[""][:6]]
    assert sorted(together) == ["a"] * 3 + ["b"] * 3  # so that the first rows are a sample of all
    assert dataset.validation_weights == {"a": 0.75, "b": 0.25}
    assert dataset.bytes_per_token(config) == 1
    assert b"inputs" in dataset.content


def test_a_test_split_needs_one_of_every_corpus(config):
    tested = dataclasses.replace(config, test_fraction=0.2)
    dataset = data.load(tested)
    assert dataset.has_test
    assert [*dataset.held_out_rows(tested, "test")] == ["", "a", "b"]
    assert dataset.bytes_per_token(config, "test") == 1
    lacking = data.load(config)
    assert not lacking.has_test
    with pytest.raises(UserError, match=r"data\.mixture: no test split of a, b; train with"):
        lacking.held_out_rows(config, "test")


def test_corpora_need_names_of_their_own(config, tmp_path):
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a").write_text("a" * 100)
    twice = {str(tmp_path / "a"): 1.0, str(tmp_path / "few" / "a"): 1.0}
    with pytest.raises(UserError, match=r"data\.mixture: the name of .*few/a is in use"):
        data.load(dataclasses.replace(config, mixture=twice))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixture": {"a": 0.0}}, "no weight is above 0; give at least one"),
        ({"mixture_stages": ((3, {"a": 1.0}),)}, "mixture_stages without mixture"),
        (
            {"mixture": {"a": 1.0}, "mixture_stages": ((3, {"a": 1.0}), (2, {"a": 1.0}))},
            r"mixture_stages: steps \[3, 2\] do not",
        ),
        ({"mixture": {"a": -1.0}}, "greater than or equal to 0"),
    ],
)
def test_invalid_mixtures_are_refused(fields, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        DataConfig(**fields)


def test_corpora_ignore_fields_that_only_others_need(config, tmp_path):
    rows = "".join(f'{{"body": "row {i}"}}\n' for i in range(400))
    (tmp_path / "rows.jsonl").write_text(rows)
    prepared = prepare([str(tmp_path / "b")], "bytes", tmp_path / "prepared")
    assert prepared.text_column == "text"
    names = [str(tmp_path / name) for name in ("a", "prepared", "rows.jsonl")]
    mixed = dataclasses.replace(
        config, mixture=dict.fromkeys(names, 1.0), text_column="body", validation_fraction=0.3
    )
    with pytest.raises(UserError, match=r"validation_fraction=0\.3, but .* prepared with"):
        data.load(mixed)
    dataset = data.load(dataclasses.replace(mixed, validation_fraction=None))
    assert [*dataset.sources] == ["a", "prepared", "rows.jsonl"]
    assert chr(dataset.sources["rows.jsonl"].split("train").read(0, 0, 1)[0]) == "r"
    single = of_corpus(mixed, names[0])
    assert (single.corpus, single.text_column, single.mixture) == (names[0], "text", None)
