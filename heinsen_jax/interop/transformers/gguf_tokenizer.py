"""Tokenizers of files of llama.cpp, as `tokenizer.json`."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from heinsen_jax.data.tokenizer_files import DEFAULT, GENERATION_FILE
from heinsen_jax.data.tokenizer_json import SETTINGS_FILE, TOKENIZER_FILE, bpe_model
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer, pretrained_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.gguf import Gguf, reading
from heinsen_jax.typing import JSON

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are matched before pre-tokenization."""
ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>"),
    "<｜end▁of▁sentence｜>",
}
"""Tokens that end generation in llama.cpp by their text, whatever their type."""

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


class PreTokenizer(NamedTuple):
    """Pre-tokenization of a byte-level BPE.

    Attributes:
      components: the components of the pre-tokenizer.
      normalizer: the normalizer of `tokenizer.json`, if any.
      ignore_merges: whether words that are tokens are not merged from bytes.
      adds_start: whether texts begin with a token by default.
    """

    components: list[JSON]
    normalizer: JSON = None
    ignore_merges: bool = False
    adds_start: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer([_byte_level(True)]),
    "smollm": PreTokenizer([{"type": "Digits", "individual_digits": True}, _byte_level(True)]),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        PreTokenizer(_split(r"\p{N}{1,3}"), ignore_merges=True, adds_start=True),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez"),
        PreTokenizer(_split(r"\p{N}"), normalizer={"type": "NFC"}),
    ),
}
"""By `tokenizer.ggml.pre`."""


def tokenizer_of(file: Gguf, name: str) -> PretrainedTokenizer | None:
    """The tokenizer of a file, by a name.

    Raises:
      UserError: it is of an unsupported kind, or damaged.
    """
    with reading(file.path):
        return _tokenizer(file, name)


def _tokenizer(file: Gguf, name: str) -> PretrainedTokenizer | None:
    tokens: list[str] = file.field("tokenizer.ggml.tokens")
    if len({*tokens}) != len(tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.tokens has equal tokens; fetch it again")
    kinds = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **flags, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    names = ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")
    ids = {ours: _id(file, theirs, len(tokens)) for ours, theirs in names}
    model = file.field("tokenizer.ggml.model")
    if model not in (makers := {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}):
        raise UserError(
            f"{file.path}: tokenizer.ggml.model={model!r} is unsupported; choose one of "
            f"{', '.join(makers)}"
        )
    document, adds_start = makers[model](file, tokens)
    document |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    start = ids["bos"] if file.field("tokenizer.ggml.add_bos_token", adds_start) else None
    document["post_processor"] = (
        None if start is None else _bos_post_processor(tokens[start], start)
    )
    settings: dict[str, JSON] = {
        "add_prefix_space": model == "llama" and _has_prefix(file),
        **{f"{x}_token": tokens[i] for x, i in ids.items() if i is not None},
    }
    templates = {DEFAULT: "tokenizer.chat_template"}
    further = file.field("tokenizer.chat_templates", [])
    templates |= {name: f"tokenizer.chat_template.{name}" for name in further}
    settings["chat_template"] = [
        {"name": name, "template": template}
        for name, field in templates.items()
        if (template := file.field(field, None))
    ]
    ends = [_id(file, x, len(tokens)) for x in ("eos", "eot", "eom")]
    ends += [i for i, token in enumerate(tokens) if token in ENDS]
    generation = {"eos_token_id": [*dict.fromkeys(x for x in ends if x is not None)]}
    with tempfile.TemporaryDirectory() as folder:
        contents = {TOKENIZER_FILE: document, SETTINGS_FILE: settings}
        for place, content in (contents | {GENERATION_FILE: generation}).items():
            (Path(folder) / place).write_text(json.dumps(content), encoding="utf-8")
        try:
            return pretrained_tokenizer(Path(folder), name)
        except UserError as error:
            raise UserError(str(error).replace(folder, f"{file.path}, as files")) from None


def _id(file: Gguf, name: str, number: int) -> int | None:
    """The id of a special token, if any, of a number of tokens."""
    field = f"tokenizer.ggml.{name}_token_id"
    value = file.field(field, None)
    if value is not None and not (isinstance(value, int) and 0 <= value < number):
        raise UserError(f"{file.path}: {field}={value!r} must be below {number}; fetch it again")
    return value


def _byte_level_bpe(file: Gguf, tokens: list[str]) -> tuple[dict[str, JSON], bool]:
    """Fields of a `tokenizer.json` of byte-level BPE, and whether texts begin with a token."""
    pre = file.field("tokenizer.ggml.pre", "gpt-2" if file.architecture == "gpt2" else None)
    if pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is unsupported; choose one of "
            f"{', '.join(PRE_TOKENIZERS)}, or the files of the original model"
        )
    words = PRE_TOKENIZERS[pre]
    model = _model(tokens, file.field("tokenizer.ggml.merges"))
    document: dict[str, JSON] = {
        "normalizer": words.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words.components},
        "decoder": _byte_level(True),
        "model": model | {"ignore_merges": words.ignore_merges},
    }
    return document, words.adds_start


def _has_prefix(file: Gguf) -> bool:
    """Whether SentencePiece adds a space before texts."""
    return file.field("tokenizer.ggml.add_space_prefix", True)


def _sentencepiece_bpe(file: Gguf, tokens: list[str]) -> tuple[dict[str, JSON], bool]:
    """The same for BPE of SentencePiece, which merges by scores."""
    scores = file.field("tokenizer.ggml.scores")
    prefix = _has_prefix(file)
    replace: JSON = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizers: list[JSON] = [{"type": "Prepend", "prepend": "\u2581"}] if prefix else []
    decoders: list[JSON] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _id(file, "unknown", len(tokens))
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


def _bos_post_processor(token: str, number: int) -> JSON:
    """The post-processor that begins texts with a token."""
    start: JSON = {"SpecialToken": {"id": token, "type_id": 0}}
    one, other = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, one],
        "pair": [start, one, other],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _model(tokens: list[str], merges: Sequence[JSON]) -> dict[str, JSON]:
    """The model of a `tokenizer.json`."""
    return bpe_model({token: i for i, token in enumerate(tokens)}, merges)


def _merges_of(tokens: list[str], scores: list[float]) -> list[JSON]:
    """All pairs of tokens that make a token, the highest score of the result first."""
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-score, i, ids[token[:cut]], ids[token[cut:]])
        for i, (token, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [[tokens[left], tokens[right]] for *_, left, right in sorted(pairs)]
