"""Tokenizers of files of llama.cpp, as `tokenizer.json`."""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from heinsen_jax.data.tokenizer_files import GENERATION_FILE
from heinsen_jax.data.tokenizer_json import SETTINGS_FILE, TOKENIZER_FILE
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer, pretrained_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.gguf import Gguf
from heinsen_jax.typing import JSON

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that are found in texts."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, JSON]:
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **options}


def _split(numbers: str) -> list[JSON]:
    """Words, with a pattern for numbers."""
    pattern: dict[str, JSON] = {"Regex": WORDS.replace("NUMBERS", numbers)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


class Words(NamedTuple):
    """Division of texts before merges of bytes.

    Attributes:
      parts: the components of the pre-tokenizer.
      normalizer: the normalizer of `tokenizer.json`, if any.
      ignore_merges: whether words that are tokens are not merged from bytes.
      adds_start: whether texts begin with a token by default.
    """

    parts: list[JSON]
    normalizer: JSON = None
    ignore_merges: bool = False
    adds_start: bool = False


WORDS_OF = {
    "gpt-2": Words([_byte_level(True)]),
    "smollm": Words([{"type": "Digits", "individual_digits": True}, _byte_level(True)]),
    "llama-bpe": Words(_split(r"\p{N}{1,3}"), ignore_merges=True, adds_start=True),
    "qwen2": Words(_split(r"\p{N}"), normalizer={"type": "NFC"}),
}
"""By `tokenizer.ggml.pre`."""


def tokenizer_of(file: Gguf, name: str) -> PretrainedTokenizer | None:
    """The tokenizer of a file, by a name.

    Raises:
      UserError: it is of an unsupported kind.
    """
    tokens: list[str] = file.field("tokenizer.ggml.tokens")
    kinds = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **flags, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    ids = {
        x: file.field(f"tokenizer.ggml.{y}_token_id", None)
        for x, y in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    model = file.field("tokenizer.ggml.model")
    if model not in (makers := {"gpt2": _of_bytes, "llama": _of_subwords}):
        raise UserError(
            f"{file.path}: tokenizer.ggml.model={model!r} is unsupported; choose one of "
            f"{', '.join(makers)}"
        )
    document, adds_start = makers[model](file, tokens)
    document |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    start = ids["bos"] if file.field("tokenizer.ggml.add_bos_token", adds_start) else None
    document["post_processor"] = None if start is None else _beginning(tokens[start], start)
    settings: dict[str, JSON] = {
        "add_prefix_space": False,
        **{f"{x}_token": tokens[i] for x, i in ids.items() if i is not None},
    }
    if template := file.field("tokenizer.chat_template", None):
        settings["chat_template"] = template
    ends = (file.field(f"tokenizer.ggml.{x}_token_id", None) for x in ("eos", "eot", "eom"))
    generation = {"eos_token_id": [*dict.fromkeys(x for x in ends if x is not None)]}
    with tempfile.TemporaryDirectory() as folder:
        contents = {TOKENIZER_FILE: document, SETTINGS_FILE: settings}
        for place, content in (contents | {GENERATION_FILE: generation}).items():
            (Path(folder) / place).write_text(json.dumps(content), encoding="utf-8")
        return pretrained_tokenizer(Path(folder), name)


def _of_bytes(file: Gguf, tokens: list[str]) -> tuple[dict[str, JSON], bool]:
    """Parts of a `tokenizer.json` that merges bytes, and whether texts begin with a token."""
    pre = file.field("tokenizer.ggml.pre", "gpt-2")
    if pre not in WORDS_OF:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is unsupported; choose one of "
            f"{', '.join(WORDS_OF)}, or the files of the original model"
        )
    words = WORDS_OF[pre]
    model = _model(tokens, file.field("tokenizer.ggml.merges"))
    document: dict[str, JSON] = {
        "normalizer": words.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words.parts},
        "decoder": _byte_level(True),
        "model": model | {"ignore_merges": words.ignore_merges},
    }
    return document, words.adds_start


def _of_subwords(file: Gguf, tokens: list[str]) -> tuple[dict[str, JSON], bool]:
    """The same for a tokenizer of SentencePiece, whose subwords are merged by their scores."""
    scores = file.field("tokenizer.ggml.scores")
    prefix = file.field("tokenizer.ggml.add_space_prefix", True)
    replace: JSON = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizers: list[JSON] = [{"type": "Prepend", "prepend": "\u2581"}] if prefix else []
    decoders: list[JSON] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.field("tokenizer.ggml.unknown_token_id", None)
    model = _model(tokens, _merges_of(tokens, scores))
    model |= {"fuse_unk": True, "byte_fallback": True}
    model["unk_token"] = None if unknown is None else tokens[unknown]
    document: dict[str, JSON] = {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return document, True


def _beginning(token: str, number: int) -> JSON:
    """The post-processor that begins texts with a token."""
    start: JSON = {"SpecialToken": {"id": token, "type_id": 0}}
    one, other = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, one],
        "pair": [start, one, other],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _model(tokens: list[str], merges: list[str]) -> dict[str, JSON]:
    """The model of a `tokenizer.json`."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [*merges],
    }


def _merges_of(tokens: list[str], scores: list[float]) -> list[str]:
    """All pairs of tokens that make a token, the highest score of the result first."""
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-score, i, ids[token[:cut]], ids[token[cut:]], f"{token[:cut]} {token[cut:]}")
        for i, (token, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [merge for *_, merge in sorted(pairs)]
