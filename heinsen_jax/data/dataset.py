"""The interface between data sets and training."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import numpy as np

from heinsen_jax.data.sources import HeldOut
from heinsen_jax.data.tokenizer_protocol import Tokenizer
from heinsen_jax.typing import Array


class Batch(NamedTuple):
    """A batch of sequences, or a single one, as NumPy arrays, or as JAX arrays on devices."""

    tokens: np.ndarray | Array
    """int32 [*B, T+1]: predict `targets` from `tokens[..., :-1]`."""
    loss_mask: np.ndarray | Array
    """bool [*B, T]: the predictions that count in the loss."""
    segment_ids: np.ndarray | Array | None = None
    """int32 [*B, T+1]: the segment of each token, such as a document, to which it may attend; None
    if tokens attend to the whole row."""
    labels: np.ndarray | Array | None = None
    """int32 [*B, T]: labels to predict from `tokens[..., :-1]`; None for the next tokens."""

    @property
    def input_segments(self) -> np.ndarray | Array | None:
        """int32 [*B, T]: the segments of `tokens[..., :-1]`; None if tokens attend to the whole
        row."""
        return None if self.segment_ids is None else self.segment_ids[..., :-1]

    @property
    def targets(self) -> np.ndarray | Array:
        """int32 [*B, T]: the labels, or the next tokens."""
        return self.tokens[..., 1:] if self.labels is None else self.labels


class RowSequence(Sequence[Batch]):
    """Rows that are computed on access. Subclasses have `__len__` and `row`."""

    def row(self, index: int) -> Batch:
        """The row at an index from 0."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        places = range(len(self))[index]
        return self.row(places) if isinstance(places, int) else [self.row(i) for i in places]


class MixedRows(RowSequence):
    """Held-out rows of several sources. Their metrics are means of the sources' metrics by
    weight, whatever the sizes of the sources.

    The rows alternate between the sources in proportion to their sizes, so that the first ones are
    a sample of all.

    Attributes:
      sources: the rows of each source by its name.
      weights: the weight of each source; their sum is 1.
    """

    def __init__(
        self, sources: Mapping[str, Sequence[Batch]], weights: Mapping[str, float]
    ) -> None:
        self.sources = sources
        self.weights = weights
        places = [(name, row) for name, rows in sources.items() for row in range(len(rows))]
        self._order = sorted(places, key=lambda x: (x[1] + 0.5) / len(sources[x[0]]))

    def __len__(self) -> int:
        return len(self._order)

    def row(self, index: int) -> Batch:
        name, row = self._order[index]
        return self.sources[name][row]


@runtime_checkable
class DataSettings(Protocol):
    """Fields that the configuration of every data set has."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def test_lengths(self) -> tuple[int, ...]: ...
    @property
    def longest(self) -> int: ...


Settings = TypeVar("Settings", bound=DataSettings)
Settings_contra = TypeVar("Settings_contra", bound=DataSettings, contravariant=True)


@runtime_checkable
class Dataset(Protocol[Settings_contra]):
    """A data set for training and validation."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the tokens are not of text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        ...

    @property
    def train_tokens(self) -> int | None:
        """Number of training tokens; None if unlimited."""
        ...

    def bytes_per_token(
        self, config: Settings_contra, split: HeldOut = "validation"
    ) -> float | None:
        """Bytes per token of the text of a split, without start tokens that are never predicted;
        None without text."""
        ...

    @property
    def has_labels(self) -> bool:
        """Whether rows have labels, instead of the next tokens."""
        ...

    @property
    def has_test(self) -> bool:
        """Whether the data set has a test split."""
        ...

    def train_row(self, config: Settings_contra, seed: int) -> Callable[[int], Batch]:
        """Return a function from row numbers, without limit, to training rows; a row depends only
        on the seed and its number."""
        ...

    def held_out_rows(
        self, config: Settings_contra, split: HeldOut = "validation"
    ) -> Mapping[str, Sequence[Batch]]:
        """Rows of a split that training does not use, always the same, by name: "" for rows of the
        training length, others for further lengths. All rows of a name have one length; padding is
        masked. `MixedRows` are measured source by source.

        Raises:
          UserError: the data set has no such split.
        """
        ...
