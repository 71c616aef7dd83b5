"""Tokenizers: their interface, and tokenizers by name or from files.

    get_tokenizer("bytes")                     every UTF-8 byte is a token: no file, no download
    get_tokenizer("gpt2")                      an encoding that tiktoken publishes
    get_tokenizer("folder/mine.tiktoken")      a local file of ranks
    get_tokenizer("folder/tokenizer.json")     a tokenizer of Hugging Face, or a folder that has one

Prepared data sets and run folders contain their tokenizer (`save_tokenizer`, `load_tokenizer`), so
that it is never downloaded again.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tiktoken

from heinsen_jax.data.tokenizer_json import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    JsonTokenizer,
    read_json,
    read_optional_json,
    tokenizer_of_json,
)
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer
from heinsen_jax.data.tokenizer_tiktoken import (
    END_OF_TEXT,
    SUFFIX,
    TiktokenTokenizer,
    byte_tokenizer,
    published_tokenizer,
    tokenizer_of_ranks,
)
from heinsen_jax.errors import UserError

__all__ = [
    "END_OF_TEXT",
    "PretrainedTokenizer",
    "Tokenizer",
    "get_tokenizer",
    "load_tokenizer",
    "save_tokenizer",
    "saved_name",
    "start_ids",
    "stop_ids",
    "tokenizer_name",
    "tokenizer_version",
]


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


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`.

    Args:
      name: `"bytes"`; the name of an encoding that tiktoken publishes (it downloads that once);
        the path of a `.tiktoken` file: a line for each token, its bytes in base64 and its rank; or
        the path of a `tokenizer.json` or of a folder that has one. A `.tiktoken` file named after a
        published encoding, such as `gpt2.tiktoken`, must be that encoding; any other is split by
        GPT-2's pattern and gets `<|endoftext|>` as its last id. A folder that `save_tokenizer`
        wrote, such as a run's folder, gives the saved tokenizer under its name. The folder of a
        Hugging Face model gives its tokens only; for the tokens that start documents and for chat
        templates, use `interop.transformers.from_pretrained`.
    """
    path = Path(name)
    if name == "bytes":
        return byte_tokenizer(name)
    if name in tiktoken.list_encoding_names():
        return published_tokenizer(name)
    if name.endswith(SUFFIX):
        return tokenizer_of_ranks(path)
    if _is_saved(path):
        return load_tokenizer(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.suffix == ".json":
        return tokenizer_of_json(file, tokenizer_name(name))
    names = tiktoken.list_encoding_names()
    close = difflib.get_close_matches(name, ["bytes", *names], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(
        f"tokenizer {name!r} is unknown: {hint}choose one of bytes, {', '.join(names)}, "
        f"or the path of a {SUFFIX} file, of a {TOKENIZER_FILE} or of a folder that has one"
    )


def has_name(name: str) -> bool:
    """Whether this is the name of a known tokenizer, and not a path."""
    return name == "bytes" or name in tiktoken.list_encoding_names()


def tokenizer_name(name: str) -> str:
    """Return the name that `get_tokenizer(name)` gives its result; a `tokenizer.json` is named
    after its folder."""
    if has_name(name):
        return name
    if _is_saved(Path(name)):
        return load_tokenizer(name).name
    path = Path(name).resolve()
    if path.name == TOKENIZER_FILE:
        return path.parent.name
    return path.stem if path.suffix in (SUFFIX, ".json") else path.name


def tokenizer_version(name: str) -> str:
    """Return a string that changes with the tokens of a local tokenizer; "" for others."""
    if has_name(name):
        return ""
    tokenizer = get_tokenizer(name)
    return " ".join([tokenizer.fingerprint, *map(str, start_ids(tokenizer))])


def _is_saved(folder: Path) -> bool:
    """Whether `save_tokenizer` wrote the tokenizer of a folder."""
    path = folder / TOKENIZER_FILE
    return path.exists() and (
        "heinsen_jax" in read_optional_json(folder / SETTINGS_FILE)
        or "model" not in read_json(path)
    )


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write the files of a tokenizer, among them `tokenizer.json`, to `folder`."""
    tokenizer.save(Path(folder))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the files of `save_tokenizer`, and check that they are unchanged."""
    folder = Path(folder)
    if "model" not in read_json(folder / TOKENIZER_FILE):
        return TiktokenTokenizer.load(folder)
    match read_optional_json(folder / SETTINGS_FILE):
        case {"heinsen_jax": {"is_pretrained": True}}:
            return PretrainedTokenizer.load(folder)
    return JsonTokenizer.load(folder)


def start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens before each document, such as <s>, that a pretrained model expects; none for other
    models."""
    return tokenizer.start_ids if isinstance(tokenizer, PretrainedTokenizer) else ()


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end generation: the end of text, and others that a pretrained model has, such
    as the end of a message."""
    is_pretrained = isinstance(tokenizer, PretrainedTokenizer)
    return tokenizer.stop_ids if is_pretrained else (tokenizer.end_of_text_id,)


def saved_name(folder: str | Path) -> str | None:
    """Return the name of the tokenizer in `folder`; `None` if it has none."""
    return load_tokenizer(folder).name if (Path(folder) / TOKENIZER_FILE).exists() else None
