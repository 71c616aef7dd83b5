"""Synthetic tasks that test what a mechanism can recall from its state, and compute in it.

The number of examples is unlimited; example i of a seed is always the same. Only answers count in
the loss and the accuracy: models never have to predict random tokens.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import pydantic

from heinsen_jax.data.dataset import Batch, RowSequence
from heinsen_jax.data.groups import Group, cyclic_group, symmetric_group
from heinsen_jax.data.sources import HeldOut
from heinsen_jax.errors import UserError
from heinsen_jax.typing import config_dataclass

PADDING = 0


@config_dataclass
class Task:
    """Base class of tasks, which also have a name `task`, a `vocab_size` and a `sequence_length` in
    tokens."""

    batch_size: pydantic.PositiveInt = 64
    """Global batch size, in sequences."""
    validation_examples: pydantic.PositiveInt = 1024
    """Number of examples of an evaluation."""
    test_examples: pydantic.NonNegativeInt = 0
    """Number of examples of the test split, separate from the validation examples."""
    test_lengths: tuple[pydantic.PositiveInt, ...] = ()
    """Further lengths at which to evaluate."""
    has_labels: ClassVar[bool] = False
    """Whether examples have labels, instead of the next tokens."""

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens `[n]`, at most sequence_length + 1, and the mask of answers among them."""
        raise NotImplementedError

    def example(self, rng: np.random.Generator) -> Batch:
        """Draw an example, padded to sequence_length."""
        drawn, answers = self.draw(rng)
        length = cast("AnyTask", self).sequence_length
        tokens, loss_mask = np.full(length + 1, PADDING, np.int32), np.zeros(length, bool)
        tokens[: len(drawn)], loss_mask[: len(drawn) - 1] = drawn, answers[1:]
        return Batch(tokens, loss_mask)

    def at_length(self, length: int) -> "AnyTask":
        """Return the same task at one of the `test_lengths`."""
        return replace(cast("AnyTask", self), test_lengths=(), sequence_length=length)

    def tests(self) -> dict[str, "AnyTask"]:
        """Return tasks for further evaluations, by the last part of the names of their metrics."""
        return {str(length): self.at_length(length) for length in self.test_lengths}

    @property
    def longest(self) -> int:
        """Maximum sequence length, including test lengths."""
        return max(task.sequence_length for task in (cast("AnyTask", self), *self.tests().values()))


@config_dataclass
class Recall(Task):
    """Multi-query associative recall: pairs of a key and a value, then the keys again.

        k1 v1 k2 v2 ... 0 0 k2 [v2] 0 0 0 0 k1 [v1] ...

    Keys are distinct; keys and values have disjoint tokens. The position of a query follows a power
    law: the n-th position has probability proportional to n^(power - 1).

    Zoology has 4, 8, 16 and 64 pairs at lengths 64, 128, 256 and 512. In contrast to it, answers
    follow their queries in the sequence, and no example is repeated.

    References:
      Arora et al., 2023, Zoology, arXiv:2312.04927.
    """

    task: Literal["recall"] = "recall"
    vocab_size: Annotated[int, pydantic.Field(ge=6)] = 8192
    """Number of tokens: padding, keys, and as many values."""
    num_pairs: pydantic.PositiveInt = 8
    """Number of key/value pairs, also at test lengths."""
    min_pairs: pydantic.PositiveInt | None = None
    """Smallest number of pairs. Each example has min_pairs, 2 min_pairs, 4 min_pairs, ..., or
    num_pairs, drawn at random; num_pairs when None."""
    test_pairs: tuple[pydantic.PositiveInt, ...] = ()
    """Numbers of pairs of further evaluations, at sequence_length and with one query per key."""
    sequence_length: pydantic.PositiveInt = 128
    """Sequence length in tokens, an even number."""
    repeated_fraction: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.0
    """Fraction of the examples that query each key as often as fits for all keys, instead of once,
    so that models learn the task in fewer updates."""
    power: pydantic.PositiveFloat = 0.01
    """Exponent of the power law of query positions; distant queries are rarer if small."""

    def __post_init__(self) -> None:
        lengths = self.sequence_length, *self.test_lengths
        checked = [("num_pairs", self.num_pairs, length) for length in lengths]
        checked += [("test_pairs", pairs, self.sequence_length) for pairs in self.test_pairs]
        for name, pairs, length in checked:
            if length % 2 or length < 4 * pairs:
                raise ValueError(
                    f"{name}={pairs} at length {length}: a length must be even, and at least 4 "
                    "times the pairs"
                )
            if pairs >= self.vocab_size // 2:
                raise ValueError(f"{name}={pairs} needs a vocab_size above {2 * pairs + 1}")
        ratio, rest = divmod(self.num_pairs, self.min_pairs or self.num_pairs)
        if rest or ratio.bit_count() != 1:
            raise ValueError(
                f"min_pairs={self.min_pairs}: num_pairs={self.num_pairs} must be min_pairs times a "
                "power of two"
            )

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        half, pairs = self.vocab_size // 2, self.num_pairs
        if self.min_pairs is not None:
            counts = (pairs // self.min_pairs).bit_length()
            pairs = self.min_pairs << int(rng.integers(counts))
        keys = 1 + rng.choice(half - 1, pairs, replace=False)
        values = half + rng.choice(self.vocab_size - half, pairs, replace=False)
        places = self.sequence_length // 2 - pairs
        law = np.arange(1, places + 1) ** (self.power - 1.0)
        queries = 1
        if self.repeated_fraction and rng.random() < self.repeated_fraction:
            queries = places // pairs
        drawn = rng.choice(places, queries * pairs, replace=False, p=law / law.sum())
        asked = 2 * pairs + 2 * drawn
        tokens = np.zeros(self.sequence_length + 1, np.int32)
        tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        tokens[asked], tokens[asked + 1] = np.tile(keys, queries), np.tile(values, queries)
        return tokens, np.isin(np.arange(len(tokens)), asked + 1)

    def at_length(self, length: int) -> "Recall":
        return replace(self, test_lengths=(), test_pairs=(), sequence_length=length)

    def with_pairs(self, count: int) -> "Recall":
        """Return the same task with this number of pairs in all examples, each queried once."""
        single = replace(self, test_lengths=(), test_pairs=(), min_pairs=None, num_pairs=count)
        return replace(single, repeated_fraction=0.0)

    def tests(self) -> dict[str, "AnyTask"]:
        by_pairs = {f"{count}_pairs": self.with_pairs(count) for count in self.test_pairs}
        return {**super().tests(), **by_pairs}


@config_dataclass
class Copying(Task):
    """Copying: repeat a string of letters.

        ( a b c = [a] [b] [c] [)]

    References:
      Jelassi et al., 2024, Repeat After Me, arXiv:2402.01032: 5 to 20 of 26 letters, tested at
      longer strings.
    """

    task: Literal["copying"] = "copying"
    num_letters: pydantic.PositiveInt = 26
    """Number of distinct letters."""
    shortest_string: pydantic.PositiveInt = 5
    """Minimum length of a string."""
    longest_string: pydantic.PositiveInt = 20
    """Maximum length of a string; a test at another length has strings of exactly that length."""

    def __post_init__(self) -> None:
        if self.shortest_string > self.longest_string:
            raise ValueError(
                f"shortest_string={self.shortest_string} is more than "
                f"longest_string={self.longest_string}; make it smaller"
            )

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 4

    @property
    def sequence_length(self) -> int:
        return 2 * self.longest_string + 2

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        begin, again, end = 1, 2, 3
        count = rng.integers(self.shortest_string, self.longest_string, endpoint=True)
        string = 4 + rng.integers(self.num_letters, size=count)
        tokens = np.concatenate([[begin], string, [again], string, [end]])
        return tokens, np.arange(len(tokens)) > count + 1

    def at_length(self, length: int) -> "Copying":
        return replace(self, test_lengths=(), shortest_string=length, longest_string=length)


@config_dataclass
class SelectiveCopying(Task):
    """Selective copying: repeat letters that are mixed with noise tokens.

        . a . . b c . = [a] [b] [c]

    References:
      Gu, Dao, 2023, Mamba, arXiv:2312.00752, section 4.1.1; Jelassi et al., 2024, Repeat After Me.
    """

    task: Literal["selective_copying"] = "selective_copying"
    num_letters: pydantic.PositiveInt = 14
    """Number of distinct letters."""
    num_copied: pydantic.PositiveInt = 16
    """Number of letters to copy."""
    input_length: pydantic.PositiveInt = 256
    """Number of letters and noise tokens; test lengths refer to it."""

    def __post_init__(self) -> None:
        if (least := min((self.input_length, *self.test_lengths))) < self.num_copied:
            raise ValueError(
                f"num_copied={self.num_copied} letters do not fit in {least} tokens; "
                "copy fewer, or make input_length and all test_lengths larger"
            )

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 3

    @property
    def sequence_length(self) -> int:
        return self.input_length + self.num_copied

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        again, noise = 1, 2
        letters = 3 + rng.integers(self.num_letters, size=self.num_copied)
        text = np.full(self.input_length, noise)
        text[np.sort(rng.choice(self.input_length, self.num_copied, replace=False))] = letters
        tokens = np.concatenate([text, [again], letters])
        return tokens, np.arange(len(tokens)) > self.input_length

    def at_length(self, length: int) -> "SelectiveCopying":
        return replace(self, test_lengths=(), input_length=length)


@config_dataclass
class Induction(Task):
    """Induction: recall the token that followed a special token: a b * c a d ... b * [c]

    References:
      Fu et al., 2022, Hungry Hungry Hippos, arXiv:2212.14052, section 3.1; Gu, Dao, 2023, Mamba,
      arXiv:2312.00752, section 4.1.2: 16 tokens, trained at length 256.
    """

    task: Literal["induction"] = "induction"
    num_letters: pydantic.PositiveInt = 16
    """Number of distinct tokens besides the special one."""
    sequence_length: Annotated[int, pydantic.Field(ge=3)] = 256
    """Sequence length in tokens; test lengths refer to it."""

    def __post_init__(self) -> None:
        if min((3, *self.test_lengths)) < 3:
            raise ValueError(f"test_lengths={self.test_lengths} must be at least 3")

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 2

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        special, length = 1, self.sequence_length
        tokens = 2 + rng.integers(self.num_letters, size=length + 1)
        place = rng.integers(length - 2)
        tokens[[place, length - 1]] = special
        tokens[length] = tokens[place + 1]
        return tokens, np.arange(length + 1) == length


@config_dataclass
class Needle(Task):
    """Needle in a haystack: recall the words that followed a key among random words.

        ? ? k v1 v2 ? ? ? ... k [v1] [v2]

    Keys are distinct and have tokens that no word has. Needles are at random positions, and the
    sequence ends with the key and the words of one of them.
    """

    task: Literal["needle"] = "needle"
    num_words: Annotated[int, pydantic.Field(ge=2)] = 64
    """Number of distinct words."""
    num_keys: pydantic.PositiveInt = 16
    """Number of distinct keys."""
    num_needles: pydantic.PositiveInt = 1
    """Number of needles, one of which is queried."""
    needle_length: pydantic.PositiveInt = 4
    """Number of words of a needle."""
    sequence_length: pydantic.PositiveInt = 256
    """Sequence length in tokens; test lengths refer to it."""

    def __post_init__(self) -> None:
        if self.num_needles > self.num_keys:
            raise ValueError(
                f"num_needles={self.num_needles} is more than num_keys={self.num_keys}: each "
                "needle needs a distinct key"
            )
        least = (self.num_needles + 1) * (self.needle_length + 1)
        if (shortest := min((self.sequence_length, *self.test_lengths))) < least:
            raise ValueError(
                f"length {shortest} is too short for {self.num_needles} needle(s) and a query; "
                f"make it at least {least}"
            )

    @property
    def vocab_size(self) -> int:
        return 1 + self.num_keys + self.num_words

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size, count = self.needle_length + 1, self.num_needles
        keys = 1 + rng.choice(self.num_keys, count, replace=False)
        words = 1 + self.num_keys + rng.integers(self.num_words, size=(count, self.needle_length))
        needles = np.concatenate([keys[:, None], words], 1)
        heap = self.sequence_length + 1 - size
        tokens = 1 + self.num_keys + rng.integers(self.num_words, size=heap + size)
        free = heap - count * size  # words between needles, which are inserted in random gaps
        starts = np.sort(rng.choice(free + count, count, replace=False)) - np.arange(count)
        for number, start in enumerate(starts):
            first = start + number * size
            tokens[first : first + size] = needles[number]
        tokens[heap:] = needles[rng.integers(count)]
        return tokens, np.arange(heap + size) > heap


@config_dataclass
class StateTracking(Task):
    """State tracking: after each element of a group, the product of all elements so far.

        tokens:  a   b    c     ...
        labels: [a] [ab] [abc]  ...

    The group `parity` has bits, whose product is their sum modulo 2; `modular` has the numbers
    below `modulus`, with their sum; `s5` has the 120 permutations of five items, with
    (ab)(i) = a(b(i)). Token and label i + 1 are element i; element 0 is the identity.

    References:
      Merrill, Petty, Sabharwal, 2024, The Illusion of State in State-Space Models,
      arXiv:2404.08819; Grazzi, Siems, Zela, Franke, Hutter, Pontil, 2025, Unlocking State-Tracking
      in Linear RNNs Through Negative Eigenvalues, arXiv:2411.12537.
    """

    has_labels = True
    task: Literal["state_tracking"] = "state_tracking"
    group: Literal["parity", "modular", "s5"] = "parity"
    """The group."""
    modulus: Annotated[int, pydantic.Field(ge=2)] = 5
    """Modulus of the group `modular`."""
    generators: bool = False
    """Whether tokens are only the identity and generators of the group, which are the number 1, or
    the transposition (1 2) and the cycle (1 2 3 4 5), instead of all elements."""
    sequence_length: pydantic.PositiveInt = 64
    """Sequence length in tokens; test lengths refer to it."""

    def __post_init__(self) -> None:
        if self.group != "modular" and self.modulus != 5:
            raise ValueError(
                f"modulus={self.modulus} with group={self.group}; set group=modular, or leave out "
                "modulus"
            )
        if self.group == "parity" and self.generators:
            raise ValueError(
                "generators with group=parity: its tokens are the same; leave them out"
            )

    @property
    def _group(self) -> Group:
        if self.group == "s5":
            return symmetric_group(5)
        return cyclic_group(2 if self.group == "parity" else self.modulus)

    @property
    def vocab_size(self) -> int:
        return 1 + len(self._group.products)

    def example(self, rng: np.random.Generator) -> Batch:
        products, generators = self._group
        elements = (0, *generators) if self.generators else range(len(products))
        word = rng.choice(elements, self.sequence_length)
        labels = [*itertools.accumulate(word.tolist(), lambda a, b: products[a][b])]
        tokens = np.append(1 + word, PADDING).astype(np.int32)  # the last one is not read
        return Batch(tokens, np.ones(len(word), bool), labels=1 + np.array(labels, np.int32))


AnyTask = (
    Annotated[Recall, pydantic.Tag("recall")]
    | Annotated[Copying, pydantic.Tag("copying")]
    | Annotated[SelectiveCopying, pydantic.Tag("selective_copying")]
    | Annotated[Induction, pydantic.Tag("induction")]
    | Annotated[Needle, pydantic.Tag("needle")]
    | Annotated[StateTracking, pydantic.Tag("state_tracking")]
)
"""Tasks by the name in their field `task`."""


class TaskDataset:
    """Data set of a task."""

    tokenizer: None = None
    train_tokens: None = None

    def __init__(self, task: AnyTask) -> None:
        self.name, self.vocab_size, self.has_labels = task.task, task.vocab_size, task.has_labels
        self.has_test = task.test_examples > 0

    def bytes_per_token(self, config: AnyTask, split: HeldOut = "validation") -> None:
        """None, since a task has no text."""

    def train_row(self, config: AnyTask, seed: int) -> Callable[[int], Batch]:
        return partial(_example, config, (0, seed))

    def held_out_rows(
        self, config: AnyTask, split: HeldOut = "validation"
    ) -> dict[str, Sequence[Batch]]:
        streams = {"validation": (1, config.validation_examples), "test": (2, config.test_examples)}
        stream, count = streams[split]
        if not count:
            raise UserError("the task has no test split; set data.test_examples, such as 1024")
        tasks = {"": config, **config.tests()}
        return {name: _Examples(task, stream, count) for name, task in tasks.items()}


def _example(task: AnyTask, stream: tuple[int, ...], number: int) -> Batch:
    return task.example(np.random.default_rng((*stream, number)))


class _Examples(RowSequence):
    """The first examples of a stream."""

    def __init__(self, task: AnyTask, stream: int, count: int) -> None:
        self._task, self._stream, self._count = task, stream, count

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> Batch:
        return _example(self._task, (self._stream,), index)
