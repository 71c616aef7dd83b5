"""Tokenizers: `tiktoken.Encoding`s by name, from a file, or of bytes; saving and loading them.

    get_tokenizer("bytes")                     every UTF-8 byte is a token: no file, no download
    get_tokenizer("gpt2")                      an encoding that tiktoken publishes
    get_tokenizer("folder/mine.tiktoken")      a local file of ranks

Prepared data sets and run folders contain their tokenizer (`save_tokenizer`, `load_tokenizer`), so
that it is never downloaded again.
"""

import base64
import binascii
import difflib
import hashlib
import json
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext import openai_public

from heinsen_jax.data.files import write_atomically
from heinsen_jax.errors import UserError

END_OF_TEXT = "<|endoftext|>"

_SUFFIX = ".tiktoken"
_RANKS_FILE = "tokenizer.tiktoken"
_DEFINITION_FILE = "tokenizer.json"
_BYTE_RANKS = {bytes([byte]): byte for byte in range(256)}
_BYTE_PATTERN = "(?s:.)"


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer called `name`.

    Args:
      name: `"bytes"`, the name of an encoding that tiktoken publishes (it downloads that once),
        or the path of a `.tiktoken` file: a line for each token, its bytes in base64 and its
        rank. A file named after a published encoding, such as `gpt2.tiktoken`, must be that
        encoding; any other is split by GPT-2's pattern and gets `<|endoftext|>` as its last id.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            pat_str=_BYTE_PATTERN,
            mergeable_ranks=_BYTE_RANKS,
            special_tokens={END_OF_TEXT: len(_BYTE_RANKS)},
        )
    if name.endswith(_SUFFIX):
        return _from_file(Path(name))
    return _published(name)


def tokenizer_name(name: str) -> str:
    """Return the name that `get_tokenizer(name)` gives its result."""
    return Path(name).stem if name.endswith(_SUFFIX) else name


def end_of_text_id(encoding: tiktoken.Encoding) -> int:
    """Return the id of `<|endoftext|>`."""
    try:
        return encoding._special_tokens[END_OF_TEXT]
    except KeyError:
        raise UserError(
            f"tokenizer {encoding.name} has no {END_OF_TEXT}: give it that special token"
        ) from None


def encoder(encoding: tiktoken.Encoding) -> Callable[[str], np.ndarray]:
    """Return a function from text to token ids, equal to `encode_ordinary` but faster."""
    if (encoding._pat_str, encoding._mergeable_ranks) == (_BYTE_PATTERN, _BYTE_RANKS):
        return lambda text: np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode(text: str) -> np.ndarray:
        try:
            return np.array(encoding.encode_ordinary(text), np.uint32)
        except BaseException as error:
            if (
                type(error).__name__ != "PanicException"
            ):  # tiktoken's panics do not derive from Exception
                raise
            raise UserError(
                f"tokenizer {encoding.name} cannot encode a document of {len(text)} characters "
                f"({error}): break up its long runs of white space or choose another tokenizer"
            ) from None

    return encode


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Return the SHA-256 of pattern, ranks and special tokens, which determine token ids; not of
    the name."""
    digest = hashlib.sha256(json.dumps(encoding._pat_str).encode())
    digest.update(_rank_lines(encoding._mergeable_ranks))
    digest.update(json.dumps(encoding._special_tokens, sort_keys=True).encode())
    return digest.hexdigest()


def save_tokenizer(encoding: tiktoken.Encoding, folder: str | Path) -> None:
    """Write `tokenizer.tiktoken` and `tokenizer.json` to `folder`."""
    definition = {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "fingerprint": fingerprint(encoding),
    }
    ranks = _rank_lines(encoding._mergeable_ranks)
    write_atomically(Path(folder) / _RANKS_FILE, ranks)
    text = json.dumps(definition, indent=2, ensure_ascii=False) + "\n"
    write_atomically(Path(folder) / _DEFINITION_FILE, text.encode())


def load_tokenizer(folder: str | Path) -> tiktoken.Encoding:
    """Read the files of `save_tokenizer`, and check that they are unchanged."""
    path = Path(folder) / _DEFINITION_FILE
    ranks, _ = _read_ranks(Path(folder) / _RANKS_FILE)
    try:
        definition = json.loads(path.read_bytes())
        encoding = tiktoken.Encoding(
            definition["name"],
            pat_str=definition["pattern"],
            mergeable_ranks=ranks,
            special_tokens=definition["special_tokens"],
        )
        unchanged = definition["fingerprint"] == fingerprint(encoding)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore the file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}): restore the file") from None
    if not unchanged:
        raise UserError(f"the tokenizer in {folder} is not the one that was saved: restore {path}")
    return encoding


def saved_name(folder: str | Path) -> str | None:
    """Return the name of the tokenizer in `folder`; `None` if it has none."""
    return load_tokenizer(folder).name if (Path(folder) / _DEFINITION_FILE).exists() else None


def _published(name: str) -> tiktoken.Encoding:
    names = tiktoken.list_encoding_names()
    if name not in names:
        close = difflib.get_close_matches(name, ["bytes", *names], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(
            f"tokenizer {name!r} is unknown: {hint}choose one of bytes, {', '.join(names)}, "
            f"or the path of a {_SUFFIX} file"
        )
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(
            f"tokenizer {name} could not be downloaded ({type(error).__name__}): give the path of "
            f"a local file instead, such as {name}{_SUFFIX}, or choose bytes"
        ) from error


def _from_file(path: Path) -> tiktoken.Encoding:
    ranks, digest = _read_ranks(path)
    if path.stem in openai_public.ENCODING_CONSTRUCTORS:
        definition = _published_definition(path.stem, ranks, digest)
        if definition is None:
            raise UserError(
                f"{path} is not the published {path.stem}: download it again, "
                "or rename the file if it is a vocabulary of your own"
            )
        return tiktoken.Encoding(**definition)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path} is damaged: its ranks are not 0 to {len(ranks) - 1}, each once")
    return tiktoken.Encoding(
        path.stem,
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def _published_definition(name: str, ranks: dict[bytes, int], digest: str) -> dict | None:
    """Return the arguments of a published encoding, without downloading it.

    Its constructors hold the pattern and the special tokens but first fetch the ranks. They run
    here on copies whose loaders return `ranks` instead, so that nothing global changes. Return
    `None` if the constructor would fetch a file with another `digest`.
    """
    expected: list[str] = []

    def given_ranks(*_: str, expected_hash: str) -> dict[bytes, int]:
        expected.append(expected_hash)
        return ranks

    namespace = {**vars(openai_public), "load_tiktoken_bpe": given_ranks}
    for constructor, function in openai_public.ENCODING_CONSTRUCTORS.items():
        namespace[constructor] = types.FunctionType(function.__code__, namespace)
    # GPT-2 is published in another format; its ranks are those of r50k_base.
    definition = namespace["r50k_base" if name == "gpt2" else name]()
    return {**definition, "name": name} if expected == [digest] else None


def _read_ranks(path: Path) -> tuple[dict[bytes, int], str]:
    """Return the ranks in a `.tiktoken` file, and the SHA-256 of its content.

    (`tiktoken.load.load_tiktoken_bpe` caches by path and may return older content.)
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer file {path} cannot be read: {error.strerror}") from None
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}:{number} is damaged: expected a token in base64 and its rank"
            ) from None
    if len(set(ranks.values())) != len(content.splitlines()):
        raise UserError(f"{path} is damaged: a token or a rank is listed twice")
    if missing := _BYTE_RANKS.keys() - ranks.keys():
        raise UserError(f"{path} is damaged: {len(missing)} of the 256 single bytes are missing")
    return ranks, hashlib.sha256(content).hexdigest()


def _rank_lines(ranks: dict[bytes, int]) -> bytes:
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ordered)
