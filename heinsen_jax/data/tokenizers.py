"""Tokenizers: their interface, and tokenizers by name or from files.

    get_tokenizer("bytes")                     every UTF-8 byte is a token: no file, no download
    get_tokenizer("gpt2")                      an encoding that tiktoken publishes
    get_tokenizer("folder/mine.tiktoken")      a local file of ranks
    get_tokenizer("folder/tokenizer.json")     a tokenizer of Hugging Face, or a folder that has one

Prepared data sets and run folders contain their tokenizer (`save_tokenizer`, `load_tokenizer`), so
that it is never downloaded again.
"""

import difflib
from pathlib import Path

import tiktoken

from heinsen_jax.data.tokenizer_json import (
    JsonTokenizer,
    read_json,
    read_optional_json,
    tokenizer_of_json,
)
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer
from heinsen_jax.data.tokenizer_protocol import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    has_name,
    start_ids,
    stop_ids,
)
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
    "has_name",
    "load_tokenizer",
    "save_tokenizer",
    "saved_name",
    "start_ids",
    "stop_ids",
    "tokenizer_name",
    "tokenizer_version",
]


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


def saved_name(folder: str | Path) -> str | None:
    """Return the name of the tokenizer in `folder`; `None` if it has none."""
    return load_tokenizer(folder).name if (Path(folder) / TOKENIZER_FILE).exists() else None
