"""Tokenizers of tiktoken: ranks of byte strings and a pattern that splits the text first."""

import base64
import binascii
import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tiktoken_ext import openai_public

from heinsen_jax.data.tokenizer_json import (
    TOKENIZER_FILE,
    UNKNOWN,
    JsonTokenizer,
    bpe_model,
    check_unchanged,
    read_json,
    spelled,
)
from heinsen_jax.errors import UserError, check_regular, refusing_panics
from heinsen_jax.storage.files import write_atomically

END_OF_TEXT = "<|endoftext|>"
SUFFIX = ".tiktoken"

_RANKS_FILE = "tokenizer.tiktoken"
_BYTE_RANKS = {bytes([byte]): byte for byte in range(256)}
_BYTE_PATTERN = "(?s:.)"


class TiktokenTokenizer:
    """A tokenizer that tiktoken computes.

    Args:
      name: its name.
      pattern: regular expression that splits a text before its parts are encoded.
      ranks: ids of byte strings, in the order in which they are merged.
      special_tokens: ids of special tokens.
    """

    def __init__(
        self, name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]
    ) -> None:
        if END_OF_TEXT not in special_tokens:
            raise UserError(f"tokenizer {name} has no {END_OF_TEXT}; give it that special token")
        self.name = name
        self._pattern, self._ranks, self._special_tokens = pattern, ranks, special_tokens
        with refusing_panics(f"tokenizer {name} cannot be built", "restore its files"):
            self._encoding = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        self._is_bytes = (pattern, ranks) == (_BYTE_PATTERN, _BYTE_RANKS)
        self.vocab_size = self._encoding.max_token_value + 1
        self.end_of_text_id = special_tokens[END_OF_TEXT]
        digest = hashlib.sha256(json.dumps(pattern).encode())
        digest.update(_rank_lines(ranks))
        digest.update(json.dumps(special_tokens, sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        with refusing_panics(*self._refusal(text)):
            return self._encoding.encode_ordinary(text)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        if self._is_bytes:
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        with refusing_panics(*self._refusal(text)):
            return self._encoding.encode_to_numpy(text, disallowed_special=())

    def _refusal(self, text: str) -> tuple[str, str]:
        return (
            f"tokenizer {self.name} cannot encode a document of {len(text)} characters",
            "break up its long runs of white space or choose another tokenizer",
        )

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:
            return UNKNOWN

    def save(self, folder: Path) -> None:
        definition = {
            "name": self.name,
            "pattern": self._pattern,
            "special_tokens": self._special_tokens,
            "fingerprint": self.fingerprint,
        }
        write_atomically(folder / _RANKS_FILE, _rank_lines(self._ranks))
        text = json.dumps(definition, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / TOKENIZER_FILE, text.encode())

    def to_json(self) -> JsonTokenizer:
        """Return the same tokenizer as a `tokenizer.json` of byte-level BPE.

        Raises:
          UserError: a token is not the merge of two others.
        """
        options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        components: list[dict[str, Any]] = [{"type": "ByteLevel", **options}]
        if not self._is_bytes:
            pattern = {"Regex": _as_oniguruma(self._pattern)}
            split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            components.insert(0, split)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = {rank: token for token, rank in reversed(self._special_tokens.items())}
        vocab = {spelled(token): rank for token, rank in self._ranks.items()}
        # ids of added tokens outside of the vocabulary would have no gaps
        vocab |= {token: rank for rank, token in special.items()}
        document = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": rank, "content": special[rank], **flags, "special": True}
                for rank in sorted(special)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": components},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **options},
            "model": bpe_model(vocab, self._merges()) | {"ignore_merges": not self._is_bytes},
        }
        return JsonTokenizer(self.name, Path(self.name), document, {"eos_token": END_OF_TEXT})

    def _merges(self) -> list[list[str]]:
        """The pairs of tokens that make each token, in the order of ranks."""
        merges = []
        for token, rank in sorted(self._ranks.items(), key=lambda item: item[1]):
            if len(token) == 1:
                continue
            parts = _parts(token, rank, self._ranks)
            if len(parts) != 2:
                raise UserError(
                    f"tokenizer {self.name}: its token {token!r} is not the merge of two others, "
                    "which tokenizer.json needs; choose another tokenizer"
                )
            merges.append([spelled(part) for part in parts])
        return merges

    @classmethod
    def load(cls, folder: Path) -> "TiktokenTokenizer":
        """Read the files of `save`, and check that they are unchanged."""
        path = folder / TOKENIZER_FILE
        ranks, _ = _read_ranks(folder / _RANKS_FILE)
        definition = read_json(path)
        try:
            name, pattern, special_tokens, fingerprint = (
                definition[key] for key in ("name", "pattern", "special_tokens", "fingerprint")
            )
            tokenizer = cls(name, pattern, ranks, special_tokens)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{path} is damaged ({error!r}); restore the file") from None
        check_unchanged(tokenizer.fingerprint, fingerprint, path)
        return tokenizer


def _parts(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The parts of a token after all merges of lower rank."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        pairs = (ranks.get(left + right, rank) for left, right in itertools.pairwise(parts))
        lowest, place = min((pair, i) for i, pair in enumerate(pairs))
        if lowest >= rank:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _as_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken in the syntax of the library `tokenizers`, in which `$` also matches
    before the end of a line, and `{m,n}+` repeats."""
    return re.sub(r"(\{\d+,\d+\})\+(?=\||$)", r"\1", pattern).replace("$", r"\z")


def byte_tokenizer(name: str) -> TiktokenTokenizer:
    """Return the tokenizer whose tokens are bytes."""
    return TiktokenTokenizer(name, _BYTE_PATTERN, _BYTE_RANKS, {END_OF_TEXT: len(_BYTE_RANKS)})


def published_tokenizer(name: str) -> TiktokenTokenizer:
    """Return one of `tiktoken.list_encoding_names()`, which tiktoken downloads once."""
    constructors = tiktoken.registry.ENCODING_CONSTRUCTORS or openai_public.ENCODING_CONSTRUCTORS
    try:
        definition = constructors[name]()
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(
            f"tokenizer {name} could not be downloaded ({type(error).__name__}); give the path of "
            f"a local file instead, such as {name}{SUFFIX}, or choose bytes"
        ) from error
    return _tokenizer(name, definition)


def _tokenizer(name: str, definition: Mapping[str, Any]) -> TiktokenTokenizer:
    return TiktokenTokenizer(
        name, definition["pat_str"], definition["mergeable_ranks"], definition["special_tokens"]
    )


def tokenizer_of_ranks(path: Path) -> TiktokenTokenizer:
    """Return the tokenizer of a `.tiktoken` file, named after it."""
    ranks, digest = _read_ranks(path)
    if path.stem in openai_public.ENCODING_CONSTRUCTORS:

        def local_ranks(url: str, expected_hash: str) -> dict[bytes, int]:
            if digest != expected_hash:
                raise UserError(
                    f"{path} is not the published {path.stem}; download it again, "
                    "or rename the file if it is a vocabulary of your own"
                )
            return ranks

        return _tokenizer(path.stem, _definition(path.stem, local_ranks))
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path} is damaged: its ranks are not 0 to {len(ranks) - 1}, each once")
    special_tokens = {END_OF_TEXT: len(ranks)}
    return TiktokenTokenizer(path.stem, openai_public.r50k_pat_str, ranks, special_tokens)


def _definition(name: str, load_ranks: Callable[..., dict[bytes, int]]) -> dict[str, Any]:
    """The definition of a published encoding, from a copy of tiktoken's module that calls
    `load_ranks(url, expected_hash=...)` instead of downloading the ranks."""
    spec = importlib.util.find_spec(openai_public.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(load_tiktoken_bpe=load_ranks)
    # The ranks of gpt2 are published in another format. They equal the ranks of r50k_base.
    return module.ENCODING_CONSTRUCTORS["r50k_base" if name == "gpt2" else name]()


def _read_ranks(path: Path) -> tuple[dict[bytes, int], str]:
    """Return the ranks in a `.tiktoken` file, and the SHA-256 of its content.

    (`tiktoken.load.load_tiktoken_bpe` caches by path and may return older content.)
    """
    check_regular(path)
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
