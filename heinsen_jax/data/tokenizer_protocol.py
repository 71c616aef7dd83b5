"""The interface of tokenizers, with functions that need no library of tokenizers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from heinsen_jax.errors import extra_module

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"


@runtime_checkable
class Tokenizer(Protocol):
    """Conversion of text to token ids and back."""

    @property
    def name(self) -> str:
        """Name in records and messages."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids; some of them may have no token."""
        ...

    @property
    def end_of_text_id(self) -> int:
        """The token after each document."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines token ids; not of the name."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are treated like any other text."""
        ...

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Encode a text, faster than `encode`, into an array of unsigned integers."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens; invalid UTF-8 becomes the replacement character."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 of a token within a text, perhaps a part of a character; the replacement
        character for an id without a token."""
        ...

    def save(self, folder: Path) -> None:
        """Write files to a folder for `load_tokenizer`."""
        ...


def start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens before each document, such as <s>, that a pretrained model expects; none for other
    models."""
    return getattr(tokenizer, "start_ids", ())


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end generation: the end of text, and others that a pretrained model has, such
    as the end of a message."""
    return getattr(tokenizer, "stop_ids", (tokenizer.end_of_text_id,))


def has_name(name: str) -> bool:
    """Whether this is the name of a known tokenizer, and not a path."""
    return name == "bytes" or name in extra_module("tiktoken").list_encoding_names()
