"""What every source of data promises to training."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import tiktoken

from heinsen_jax.typing import Array


class Batch(NamedTuple):
    """Rows of tokens, or a single one; in NumPy's arrays, and on devices in JAX's."""

    tokens: np.ndarray | Array
    """int32 [*B, T+1]: predict `tokens[..., 1:]` from `tokens[..., :-1]`."""
    mask: np.ndarray | Array
    """bool [*B, T]: which of these predictions count."""


@runtime_checkable
class DataSettings(Protocol):
    """Fields that the configuration of every data source has."""

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
    """What can be learned, and what shows whether it was."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def tokenizer(self) -> tiktoken.Encoding | None:
        """What turns text into tokens; None if these are of no text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""
        ...

    @property
    def train_tokens(self) -> int | None:
        """How many there are to learn from; None if without end."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Of the validation text; None if there is none."""
        ...

    def train_row(self, config: Settings_contra, seed: int) -> Callable[[int], Batch]:
        """What gives single rows to learn from, by their numbers, without end: each is a function
        of the seed and its number alone."""
        ...

    def validation_rows(self, config: Settings_contra) -> Mapping[str, Sequence[Batch]]:
        """Rows to measure on, always the same: those like the ones to learn from are named "", and
        there may be others, of other lengths. Of one name all have one length: shorter ones are
        padded, which the mask leaves out."""
        ...
