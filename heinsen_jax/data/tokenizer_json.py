"""Tokenizers of Hugging Face's library `tokenizers`: files `tokenizer.json`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from heinsen_jax.data.tokenizer_protocol import SETTINGS_FILE, TOKENIZER_FILE
from heinsen_jax.errors import UserError, check_regular, parse_json, refusing_panics
from heinsen_jax.storage.files import write_atomically

ENDS_OF_TEXT = {
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]"),
    *("<｜end▁of▁sentence｜>", "<|endofdocument|>", "<|end_of_document|>"),
}
"""Special tokens with which published tokenizers end a document."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
"""Bytes of an id without a token."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes_of_characters() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE: printable ones for themselves."""
    printable = [byte for byte in range(0x21, 0x100) if chr(byte).isprintable()]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(x): x for x in printable} | {chr(256 + i): x for i, x in enumerate(others)}


_BYTES = _bytes_of_characters()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}


def spelled(token: bytes) -> str:
    """The spelling of a token in byte-level BPE."""
    return "".join(map(_CHARACTERS.__getitem__, token))


def bpe_model(vocab: Mapping[str, int], merges: Sequence[Any]) -> dict[str, Any]:
    """The model of a `tokenizer.json` of BPE, by the ids and merges of its tokens."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {**vocab},
        "merges": [*merges],
    }


class JsonTokenizer:
    """A tokenizer that a `tokenizer.json` defines.

    Args:
      name: its name.
      path: its file, for messages.
      document: the content of the file.
      config: the content of `tokenizer_config.json`, whose `eos_token` ends a document.

    Attributes:
      special_tokens: special tokens by name, such as `bos_token`.

    Raises:
      UserError: the file is damaged or unsupported.
    """

    def __init__(
        self, name: str, path: Path, document: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        self.name, self._document = name, document
        self.special_tokens = special_tokens_of(config)
        self.end_of_text = self.special_tokens["eos_token"]
        content = json.dumps([document, self.end_of_text], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._tokenizer, self.end_of_text_id = _build(path, document, self.end_of_text)
        decoders = _decoders(path, document)
        self._decoders = {decoder["type"] for decoder in decoders}
        spaces = [decoder.get("replacement", " ") for decoder in decoders]
        self._strips_space = not all(self._tokenizer.decoder.decode([space]) for space in spaces)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._added = self._tokenizer.get_added_tokens_decoder()

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids that no text contains. Unknown characters and single bytes are parts of texts."""
        model = self._document["model"]
        unknown = {model.get("unk_id"), self._tokenizer.token_to_id(model.get("unk_token") or "")}
        unknown -= {self.end_of_text_id}
        return frozenset(
            token
            for token, added in self._added.items()
            if added.special and token not in unknown and not _BYTE_TOKEN.fullmatch(added.content)
        )

    def encode(self, text: str) -> list[int]:
        try:  # the method for batches is three times as fast
            with refusing_panics(*self._refusal(text)):
                (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # unpaired surrogates, which tiktoken replaces, too
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        ids = encoding.ids
        if self._special.isdisjoint(ids):
            return ids
        return [x for token in ids for x in self._without_special(token)]

    def _refusal(self, text: str) -> tuple[str, str]:
        return (
            f"tokenizer {self.name} cannot encode a text of {len(text)} characters",
            "shorten the text, or choose another tokenizer",
        )

    def _without_special(self, token: int) -> list[int]:
        """The token; or its characters if it is special, since Unigram and word-level models find
        literal special tokens in a text as words."""
        if token not in self._special:
            return [token]
        model = self._tokenizer.model
        return [x.id for char in self._added[token].content for x in model.tokenize(char)]

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return self.without_first_space(text)

    def without_first_space(self, text: str) -> str:
        """The beginning of a text, from the bytes of its tokens: without the space before its first
        word that is part of a token of SentencePiece."""
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token: int) -> bytes:
        content = self._tokenizer.id_to_token(token)
        if content is None:
            return UNKNOWN
        if "ByteLevel" in self._decoders:
            is_spelled = token not in self._added and _BYTES.keys() >= {*content}
            return bytes(map(_BYTES.__getitem__, content)) if is_spelled else content.encode()
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(content)):
            return bytes.fromhex(byte[1])
        return self._tokenizer.decoder.decode(["x", content])[1:].encode()  # as within a text

    def config(self) -> dict[str, Any]:
        """The content of `tokenizer_config.json`."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_of_text,
            "heinsen_jax": {"name": self.name, "fingerprint": self.fingerprint},
        }

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which other libraries read, too."""
        for file, content in ((TOKENIZER_FILE, self._document), (SETTINGS_FILE, self.config())):
            write_atomically(folder / file, as_json(content))

    @classmethod
    def load(cls, folder: Path) -> "JsonTokenizer":
        """Read the files of `save`, and check that they are unchanged."""
        path, config_path = folder / TOKENIZER_FILE, folder / SETTINGS_FILE
        config = read_json(config_path)
        try:
            name, fingerprint = (config["heinsen_jax"][key] for key in ("name", "fingerprint"))
            tokenizer = cls(name, path, read_json(path), config)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{config_path} is damaged ({error!r}); restore the file") from None
        check_unchanged(tokenizer.fingerprint, fingerprint, path)
        return tokenizer


def tokenizer_of_json(path: Path, name: str) -> JsonTokenizer:
    """Return the tokenizer of a `tokenizer.json`.

    Its end of text is the only one of `ENDS_OF_TEXT` among its special tokens, or else the
    `eos_token` in `tokenizer_config.json` in the same folder.
    """
    document = read_json(path)
    if not isinstance(document.get("model"), dict):
        raise UserError(f"{path} defines no tokenizer; give a tokenizer.json of Hugging Face")
    added = added_tokens(document, path)
    ends = sorted({token["content"] for token in added if token.get("special")} & ENDS_OF_TEXT)
    config_path = path.with_name(SETTINGS_FILE)
    config = {"eos_token": ends[0]} if len(ends) == 1 else read_optional_json(config_path)
    if "eos_token" in special_tokens_of(config):
        return JsonTokenizer(name, path, document, config)
    known = ", ".join(ends) or "none that is known"
    raise UserError(
        f"{path}: exactly one special token must end a text, but it has {known}; write "
        f'{{"eos_token": "..."}} to {config_path}'
    )


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, such as `bos_token`, in a `tokenizer_config.json`."""
    tokens = {}
    for name, value in config.items():
        match value:
            case str(token) | {"content": str(token)} if name.endswith("_token"):
                tokens[name] = token
    return tokens


def check_unchanged(fingerprint: str, saved: str, path: Path) -> None:
    """Check the fingerprint of a tokenizer that is loaded from the folder of `path`."""
    if fingerprint != saved:
        raise UserError(
            f"the tokenizer in {path.parent} is not the one that was saved; restore {path}"
        )


def as_json(content: Mapping[str, Any]) -> bytes:
    """Return the content of a file."""
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    check_regular(path)
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); restore the file") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); restore the file") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (it has no JSON object); restore the file")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; without a file, return an empty one."""
    return read_json(path) if path.exists() else {}


def _build(path: Path, document: Mapping[str, Any], end_of_text: str) -> tuple[RustTokenizer, int]:
    """Build the tokenizer, in which `end_of_text` is special. Return its id, too."""
    added_tokens(document, path)
    tokenizer = parsed(path, document)
    end = tokenizer.token_to_id(end_of_text)
    if end is None:
        raise UserError(
            f"{path} has no token {end_of_text}, the eos_token of {path.with_name(SETTINGS_FILE)}; "
            "correct one of the two files"
        )
    tokenizer.add_special_tokens([AddedToken(end_of_text, normalized=False)])
    tokenizer.encode_special_tokens = True  # to split them like any other text
    return tokenizer, end


def _decoders(path: Path, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The decoders of a `tokenizer.json`, whose results for tokens can be joined."""
    decoder: dict[str, Any] = document.get("decoder") or {"type": "null"}
    decoders = decoder.get("decoders", [decoder])
    for one in decoders:
        match one:
            case (
                {"type": "ByteLevel" | "ByteFallback" | "Metaspace" | "Fuse"}
                | {"type": "Replace", "pattern": {"String": _}}
                | {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            ):
                continue
        raise UserError(
            f"{path}: its decoder {one['type']} is unsupported; choose a tokenizer of byte-level "
            "BPE or of SentencePiece"
        )
    return decoders


def added_tokens(document: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The added tokens of a `tokenizer.json`.

    Raises:
      UserError: one has no id or no content, or two have the same id.
    """
    tokens = document.get("added_tokens") or []
    by_id: dict[int, dict[str, Any]] = {}
    for token in tokens if isinstance(tokens, list) else [tokens]:
        match token:
            case {"id": int(number), "content": str()} if number not in by_id and number >= 0:
                by_id[number] = token
            case _:
                raise UserError(
                    f"{path}: added_tokens has {token!r}, which is no object with an id of its "
                    "own and content; correct it"
                )
    return [*by_id.values()]


def parsed(path: Path, document: Mapping[str, Any]) -> RustTokenizer:
    """Build the tokenizer of a document, without the parts that shorten or pad texts."""
    content = json.dumps({**document, "truncation": None, "padding": None})
    try:
        with refusing_panics(f"{path} cannot be read as a tokenizer", "restore it"):
            return RustTokenizer.from_str(content)
    except UserError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"{path} cannot be read as a tokenizer ({error}); restore it") from None
