"""Tasks can be solved from the tokens before each answer, and only from these."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig, as_json, load_config, override
from heinsen_jax.data import (
    Copying,
    Induction,
    Needle,
    Recall,
    SelectiveCopying,
    StateTracking,
    TaskDataset,
)
from heinsen_jax.errors import UserError


def follower(before: list[int], token: int) -> int:
    """Return the token after the first occurrence of a token."""
    return before[before.index(token) + 1]


def solve_recall(task, before):
    return follower(before, before[-1])


def solve_copying(task, before):
    again = before.index(2)
    string, copied = before[1:again], len(before) - again - 1
    return [*string, 3][copied]


def solve_selective_copying(task, before):
    again = before.index(1)
    letters = [token for token in before[:again] if token != 2]
    return letters[len(before) - again - 1]


def solve_induction(task, before):
    return follower(before, 1)


def solve_needle(task, before):
    last = max(i for i, token in enumerate(before) if token <= task.num_keys)
    first = before.index(before[last])
    return before[first + len(before) - last]


def solve_sum(task, before):
    return 1 + sum(token - 1 for token in before) % (task.vocab_size - 1)


def solve_permutations(task, before):
    """Rearrange five items by one permutation after another."""
    permutations, items = [*itertools.permutations(range(5))], tuple(range(5))
    for token in before:
        items = tuple(items[place] for place in permutations[token - 1])
    return 1 + permutations.index(items)


@dataclass(frozen=True)
class Case:
    """A small task, and what tests need to know of it.

    Attributes:
      task: the task.
      solve: function (task, tokens before an answer) -> answer.
      first_answers: number of possible first answers.
      length: sequence length of a test at length n.
    """

    task: Any
    solve: Callable[[Any, list[int]], int]
    first_answers: int
    length: Callable[[int], int] = lambda n: n


CASES = {
    "recall": Case(
        Recall(vocab_size=40, num_pairs=4, sequence_length=20, test_lengths=(16, 64)),
        solve_recall,
        20,
    ),
    "copying": Case(
        Copying(num_letters=5, shortest_string=1, longest_string=6, test_lengths=(6, 15)),
        solve_copying,
        5,
        lambda n: 2 * n + 2,
    ),
    "selective_copying": Case(
        SelectiveCopying(num_letters=3, num_copied=5, input_length=9, test_lengths=(5, 31)),
        solve_selective_copying,
        3,
        lambda n: n + 5,
    ),
    "induction": Case(
        Induction(num_letters=4, sequence_length=9, test_lengths=(3, 50)), solve_induction, 4
    ),
    "needle": Case(
        Needle(
            num_words=6,
            num_keys=5,
            num_needles=3,
            needle_length=2,
            sequence_length=20,
            test_lengths=(12, 40),
        ),
        solve_needle,
        6,
    ),
    "parity": Case(StateTracking(sequence_length=9, test_lengths=(1, 30)), solve_sum, 2),
    "modular": Case(
        StateTracking(group="modular", modulus=7, sequence_length=9, test_lengths=(5, 20)),
        solve_sum,
        7,
    ),
    "s5": Case(
        StateTracking(group="s5", generators=True, sequence_length=9, test_lengths=(5, 20)),
        solve_permutations,
        3,
    ),
}
NAMES = list(CASES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_answer_follows_from_the_tokens_before_it(name, seed):
    task = CASES[name].task
    row = TaskDataset(task).train_row(task, seed)(seed % 1000)
    tokens, mask = row.tokens, row.loss_mask
    assert tokens.shape == (task.sequence_length + 1,)
    assert tokens.min() >= 0
    assert tokens.max() < task.vocab_size
    assert mask.any()
    for place in np.flatnonzero(mask):
        before = tokens[: place + 1].tolist()
        assert CASES[name].solve(task, before) == row.targets[place]


@pytest.mark.parametrize("name", NAMES)
def test_answers_differ_from_example_to_example(name):
    """The first answer is uniformly distributed, so that it cannot be guessed."""
    task = CASES[name].task
    rows = map(TaskDataset(task).train_row(task, 0), range(600))
    firsts = [row.targets[row.loss_mask][0] for row in rows]
    counts = np.unique(firsts, return_counts=True)[1]
    expected = 600 / CASES[name].first_answers
    assert len(counts) == CASES[name].first_answers
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected))


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_functions_of_seed_and_step_and_shared_by_processes(name):
    task = CASES[name].task
    dataset = data.load(task)

    def take(count, **options):
        batches = data.train_batches(dataset, task, **{"seed": 3, **options})
        return [x for batch in itertools.islice(batches, count) for x in batch[:2]]

    whole = take(4)
    for a, b in zip(whole[4:], take(2, start_step=2), strict=True):
        np.testing.assert_array_equal(a, b)
    shares = [take(4, process_index=i, process_count=2) for i in range(2)]
    for a, *parts in zip(whole, *shares, strict=True):
        np.testing.assert_array_equal(a, np.concatenate(parts))
    assert any((a != b).any() for a, b in zip(whole, take(4, seed=4), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_test_sets_have_their_lengths_and_are_deterministic(name):
    task = CASES[name].task
    rows = TaskDataset(task).held_out_rows(task)
    assert list(rows) == ["", *map(str, task.test_lengths)]
    lengths = {key: len(value[0].loss_mask) for key, value in rows.items()}
    for length in task.test_lengths:
        assert lengths[str(length)] == CASES[name].length(length)
    assert max(lengths.values()) == task.longest
    assert len(rows[""]) == task.validation_examples
    again = TaskDataset(task).held_out_rows(task)
    train = TaskDataset(task).train_row(task, 0)
    np.testing.assert_array_equal(rows[""][5].tokens, again[""][5].tokens)
    same = [np.array_equal(rows[""][i].tokens, train(i).tokens) for i in range(20)]
    assert not all(same)


def test_a_test_split_has_examples_of_its_own():
    task = replace(CASES["recall"].task, test_examples=30)
    rows, others = (TaskDataset(task).held_out_rows(task, x) for x in ("test", "validation"))
    assert list(rows) == list(others)
    assert [len(x) for x in rows.values()] == [30] * len(rows)
    for name in rows:
        same = [np.array_equal(rows[name][i].tokens, others[name][i].tokens) for i in range(20)]
        assert not any(same)
    without = CASES["recall"].task
    with pytest.raises(UserError, match=r"no test split; set data\.test_examples"):
        TaskDataset(without).held_out_rows(without, "test")


def test_copied_strings_have_all_lengths():
    task = CASES["copying"].task
    rows = map(TaskDataset(task).train_row(task, 0), range(200))
    assert {int(row.loss_mask.sum()) for row in rows} == {2, 3, 4, 5, 6, 7}  # with their end
    tested = TaskDataset(task).held_out_rows(task)["15"]
    assert {int(tested[i].loss_mask.sum()) for i in range(50)} == {16}


def test_distant_queries_are_rarer():
    """A power law: with power 0.01, the n-th place in proportion to n^-0.99."""
    task = Recall(vocab_size=40, num_pairs=1, sequence_length=128, power=0.01)
    rows = map(TaskDataset(task).train_row(task, 0), range(4000))
    places = np.array([np.flatnonzero(row.loss_mask)[0] for row in rows])
    assert set((places - 2) % 2) == {0}
    counts = np.bincount((places - 2) // 2, minlength=63)
    law = np.arange(1, 64) ** -0.99
    expected = 4000 * law / law.sum()
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected) + 3)


def pairs_of(row):
    return int(row.loss_mask.sum())


def test_examples_have_different_numbers_of_pairs():
    """Each power of two from 2 to 16 with equal probability; in `test_pairs` a fixed number."""
    task = Recall(vocab_size=64, num_pairs=16, min_pairs=2, sequence_length=80, test_pairs=(4, 20))
    row = TaskDataset(task).train_row(task, 0)
    counts = Counter(pairs_of(row(i)) for i in range(400))
    assert sorted(counts) == [2, 4, 8, 16]
    assert all(abs(count - 100) < 6 * np.sqrt(75) for count in counts.values())
    rows = TaskDataset(task).held_out_rows(task)
    assert list(rows) == ["", "4_pairs", "20_pairs"]
    assert {pairs_of(row) for row in rows[""][:50]} == {2, 4, 8, 16}
    for count in task.test_pairs:
        assert {pairs_of(row) for row in rows[f"{count}_pairs"][:50]} == {count}
        assert len(rows[f"{count}_pairs"][0].loss_mask) == 80


def test_a_fraction_of_the_examples_repeats_queries():
    """As often as fits for all keys: 4 pairs leave space for 37 queries, 9 per key."""
    task = Recall(
        vocab_size=64, num_pairs=4, repeated_fraction=0.25, sequence_length=82, test_pairs=(4,)
    )
    rows = list(map(TaskDataset(task).train_row(task, 0), range(400)))
    counts = Counter(map(pairs_of, rows))
    assert sorted(counts) == [4, 36]
    assert abs(counts[36] - 100) < 6 * np.sqrt(75)
    for row in rows[:20]:
        tokens = row.tokens.tolist()
        answers = np.flatnonzero(row.loss_mask) + 1
        assert set(Counter(tokens[i] for i in answers).values()) == {pairs_of(row) // 4}
        assert all(tokens[i] == solve_recall(task, tokens[:i]) for i in answers)
    tests = TaskDataset(task).held_out_rows(task)["4_pairs"]
    assert {pairs_of(tests[i]) for i in range(50)} == {4}


def test_recorded_examples_stay_the_same():
    """Results of studies are on these examples."""
    task = Recall(vocab_size=12, num_pairs=2, sequence_length=10)
    row = TaskDataset(task).train_row(task, 1)(7)
    assert row.tokens.tolist() == [3, 8, 5, 11, 3, 8, 0, 0, 5, 11, 0]


def test_words_of_permutations_reach_all():
    """Tokens are three elements, or all 120; products are all 120 in both cases."""
    for generators, elements in ((True, 3), (False, 120)):
        task = StateTracking(group="s5", generators=generators, sequence_length=3000)
        row = TaskDataset(task).train_row(task, 0)(0)
        assert len(set(row.tokens[:-1])) == elements
        assert len(set(row.targets)) == 120


def test_published_settings_are_valid():
    for pairs, length in ((4, 64), (8, 128), (16, 256), (64, 512)):
        task = Recall(num_pairs=pairs, sequence_length=length)
        assert task.vocab_size == 8192
        tokens, mask = TaskDataset(task).train_row(task, 0)(0)[:2]
        assert mask.sum() == pairs
        assert len(set(tokens[: 2 * pairs])) == 2 * pairs
        assert np.count_nonzero(tokens) == 4 * pairs  # no other tokens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recall(num_pairs=9, sequence_length=34), "at least 4 times the pairs"),
        (lambda: Recall(num_pairs=4, sequence_length=31), "must be even"),
        (lambda: Recall(num_pairs=4, test_lengths=(8,)), "num_pairs=4 at length 8"),
        (lambda: Recall(num_pairs=8, vocab_size=16), "vocab_size above 17"),
        (lambda: Copying(shortest_string=9, longest_string=3), "shortest_string=9 is more than"),
        (lambda: SelectiveCopying(num_copied=9, input_length=8), "in 8 tokens"),
        (lambda: SelectiveCopying(num_copied=9, test_lengths=(5,)), "in 5 tokens"),
        (lambda: Induction(test_lengths=(2,)), "at least 3"),
        (lambda: Needle(num_needles=3, num_keys=2), "more than num_keys=2"),
        (lambda: Needle(num_needles=3, test_lengths=(19,)), "make it at least 20"),
        (lambda: Recall(num_pair=3), "num_pair"),
        (lambda: Recall(num_pairs=12, min_pairs=2), "must be min_pairs times a power of two"),
        (lambda: Recall(num_pairs=2, min_pairs=4), "must be min_pairs times a power of two"),
        (lambda: Recall(num_pairs=8, test_pairs=(40,)), "test_pairs=40 at length 128"),
        (lambda: Recall(vocab_size=20, test_pairs=(16,)), "test_pairs=16 needs a vocab_size"),
        (lambda: StateTracking(modulus=7), "modulus=7 with group=parity"),
    ],
)
def test_invalid_settings_are_named(make, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        make()


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_survives_saving_and_loading(name, tmp_path):
    config = ExperimentConfig(data=CASES[name].task)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(as_json(config)))
    assert load_config(path) == config


def test_a_task_is_changed_from_the_command_line():
    config = ExperimentConfig(data=CASES["recall"].task)
    changed = override(config, ["--data.num_pairs", "2", "--data.test-lengths", "8", "12"])
    assert (changed.data.num_pairs, changed.data.test_lengths) == (2, (8, 12))
    with pytest.raises(UserError, match=r"Unrecognized options: --data\.corpus"):
        override(config, ["--data.corpus", "x"])
    with pytest.raises(UserError, match="num_pairs=6 at length 20"):
        override(config, ["--data.num_pairs", "6"])
