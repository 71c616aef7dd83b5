"""Tokenizers of tiktoken: ranks of byte strings and a pattern that splits the text first."""

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext import openai_public

from heinsen_jax.errors import UserError, check_regular, parse_json, refusing_panics
from heinsen_jax.storage.files import write_atomically

END_OF_TEXT = "<|endoftext|>"
SUFFIX = ".tiktoken"

_RANKS_FILE = "tokenizer.tiktoken"
_DEFINITION_FILE = "tokenizer.json"
_BYTE_RANKS = {bytes([byte]): byte for byte in range(256)}
_BYTE_PATTERN = "(?s:.)"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


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
            return _UNKNOWN

    def save(self, folder: Path) -> None:
        definition = {
            "name": self.name,
            "pattern": self._pattern,
            "special_tokens": self._special_tokens,
            "fingerprint": self.fingerprint,
        }
        write_atomically(folder / _RANKS_FILE, _rank_lines(self._ranks))
        text = json.dumps(definition, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / _DEFINITION_FILE, text.encode())

    @classmethod
    def load(cls, folder: Path) -> "TiktokenTokenizer":
        """Read the files of `save`, and check that they are unchanged."""
        path = folder / _DEFINITION_FILE
        ranks, _ = _read_ranks(folder / _RANKS_FILE)
        try:
            definition = parse_json(path.read_bytes())
            tokenizer = cls(
                definition["name"],
                definition["pattern"],
                ranks,
                definition["special_tokens"],
            )
            unchanged = definition["fingerprint"] == tokenizer.fingerprint
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); restore the file") from None
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{path} is damaged ({error!r}); restore the file") from None
        if not unchanged:
            raise UserError(
                f"the tokenizer in {folder} is not the one that was saved; restore {path}"
            )
        return tokenizer


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
    return TiktokenTokenizer(
        name, definition["pat_str"], definition["mergeable_ranks"], definition["special_tokens"]
    )


def tokenizer_of_ranks(path: Path) -> TiktokenTokenizer:
    """Return the tokenizer of a `.tiktoken` file, named after it."""
    ranks, digest = _read_ranks(path)
    if path.stem in PUBLISHED:
        published = PUBLISHED[path.stem]
        if digest != published.ranks_sha256:
            raise UserError(
                f"{path} is not the published {path.stem}; download it again, "
                "or rename the file if it is a vocabulary of your own"
            )
        return TiktokenTokenizer(path.stem, published.pattern, ranks, published.special_tokens)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path} is damaged: its ranks are not 0 to {len(ranks) - 1}, each once")
    special_tokens = {END_OF_TEXT: len(ranks)}
    return TiktokenTokenizer(path.stem, openai_public.r50k_pat_str, ranks, special_tokens)


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


@dataclass(frozen=True)
class Published:
    """Definition of a published encoding without its ranks, for use with a local file of ranks.

    (The constructors in `tiktoken_ext.openai_public` download the ranks.)
    """

    ranks_sha256: str
    pattern: str
    special_tokens: dict[str, int]


_R50K_RANKS = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_P50K_RANKS = "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
_CL100K_RANKS = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
_O200K_RANKS = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FILL = {"<|fim_prefix|>": 0, "<|fim_middle|>": 1, "<|fim_suffix|>": 2}
_R50K = Published(_R50K_RANKS, openai_public.r50k_pat_str, {END_OF_TEXT: 50256})
_HARMONY = {
    END_OF_TEXT: 199999,
    "<|endofprompt|>": 200018,
    "<|startoftext|>": 199998,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
    **{f"<|reserved_{i}|>": i for i in (200000, 200001, 200004, *range(200009, 200012))},
    **{f"<|reserved_{i}|>": i for i in range(200013, 201088)},
}
PUBLISHED = {
    "gpt2": _R50K,  # published in another format, with the ranks of r50k_base
    "r50k_base": _R50K,
    "p50k_base": Published(_P50K_RANKS, openai_public.r50k_pat_str, {END_OF_TEXT: 50256}),
    "p50k_edit": Published(
        _P50K_RANKS,
        openai_public.r50k_pat_str,
        {END_OF_TEXT: 50256, **{token: 50281 + i for token, i in _FILL.items()}},
    ),
    "cl100k_base": Published(
        _CL100K_RANKS,
        _CL100K_PATTERN,
        {
            END_OF_TEXT: 100257,
            **{token: 100258 + i for token, i in _FILL.items()},
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": Published(
        _O200K_RANKS, _O200K_PATTERN, {END_OF_TEXT: 199999, "<|endofprompt|>": 200018}
    ),
    "o200k_harmony": Published(_O200K_RANKS, _O200K_PATTERN, _HARMONY),
}
