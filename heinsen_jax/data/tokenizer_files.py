"""Files of a pretrained model that define its tokenizer, merged as transformers 5 reads them."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from heinsen_jax.data.tokenizer_json import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    added_tokens,
    parsed,
    read_json,
    read_optional_json,
    special_tokens_of,
)
from heinsen_jax.errors import UserError, check_regular

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
DEFAULT = "default"
FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"
"""Flags of an added token."""
CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5Tokenizer"),
}
"""Tokenizer classes by model type, whose `add_prefix_space` precedes `tokenizer.json`."""
LISTS = "additional_special_tokens", "extra_special_tokens"
"""Fields with several special tokens."""


def merged_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`, each completed by the other
    files of a folder. The normalizer and the pre-tokenizer come from `tokenizer.json`, except for
    `add_prefix_space`.

    `special_tokens_map.json` and `added_tokens.json` count only if `tokenizer_config.json` has no
    `added_tokens_decoder`. The post-processor of `tokenizer.json` precedes `add_bos_token` and
    `add_eos_token`. Template files replace the templates in `tokenizer_config.json`.

    Raises:
      UserError: a file is damaged, or contradicts another one.
    """
    path, config_path = folder / TOKENIZER_FILE, folder / SETTINGS_FILE
    config = read_optional_json(config_path)
    document = read_json(path)
    tokens = {int(token["id"]): token for token in added_tokens(document, path)}
    if config.get("added_tokens_decoder") is None:
        config |= read_optional_json(folder / SPECIAL_TOKENS_FILE)
        others = _legacy_tokens(folder / ADDED_TOKENS_FILE, config)
        others = {number: token for number, token in others.items() if number not in tokens}
        source = folder / ADDED_TOKENS_FILE
    else:
        others, source = _decoder_tokens(config["added_tokens_decoder"], config_path), config_path
    document = _with_tokens(document, tokens, others, path, source)
    document = _with_special_tokens(document, config, path)
    document = _with_prefix_space(document, config, folder)
    config = {k: v for k, v in config.items() if k not in ("add_bos_token", "add_eos_token")}
    templates = _template_files(folder) or templates_of(config.get("chat_template"), config_path)
    pairs = [{"name": name, "template": template} for name, template in templates.items()]
    return document, config | {"chat_template": pairs or None}


def without_tokens_beyond(
    document: dict[str, Any],
    config: Mapping[str, Any],
    vocab_size: int,
    stops: Collection[int],
    path: Path,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of both files without the added tokens whose ids are not below `vocab_size`, if
    no text has them: neither at its start or end nor in `stops`. Gemma 3's models of text lack the
    token of an image, which their tokenizer has. A warning names the tokens."""
    special = special_tokens_of(config)
    ends = {special.get("bos_token"), special.get("eos_token")}
    added = document.get("added_tokens") or []
    lacking = [x for x in added if x["id"] >= vocab_size and x["id"] not in stops]
    names = {token["content"] for token in lacking} - ends
    if not names:
        return document, {**config}
    listed = ", ".join(sorted(names))
    warnings.warn(
        f"{path}: the model has vocab_size={vocab_size} and lacks {listed}; left out of the "
        "tokenizer",
        stacklevel=2,
    )
    kept = [token for token in added if token["content"] not in names]
    others = {name: value for name, value in config.items() if special.get(name) not in names}
    return {**document, "added_tokens": kept}, others


def stop_ids_of(folder: Path) -> list[int]:
    """The tokens that end generation by the files of a model, if any: `generation_config.json`
    precedes `config.json`, and there a model of text and images its `text_config`."""
    for path in (folder / GENERATION_FILE, folder / CONFIG_FILE):
        fields = read_optional_json(path)
        given = fields.get("eos_token_id")
        if given is None and isinstance(text := fields.get("text_config"), dict):
            given = text.get("eos_token_id")
        match given:
            case None:
                continue
            case int(token) if not isinstance(token, bool):
                return [token]
            case [*tokens] if tokens and all(type(token) is int for token in tokens):
                return tokens
            case other:
                raise UserError(
                    f"{path}: eos_token_id={other!r} must be an id or a list of ids; correct it"
                )
    return []


def templates_of(given: Any, path: Path) -> dict[str, str]:
    """Chat templates by name."""
    match given:
        case None:
            return {}
        case str(template):
            return {DEFAULT: template}
        case [*several]:
            templates = {}
            for one in several:
                match one:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
            if len(templates) == len(several):
                return templates
    raise UserError(f"{path}: chat_template must be a text, or texts with names; correct it")


def _decoder_tokens(tokens: Any, path: Path) -> dict[int, dict[str, Any]]:
    """Added tokens by id, from the field `added_tokens_decoder`."""
    if not isinstance(tokens, Mapping):
        raise UserError(f"{path}: added_tokens_decoder must map ids to objects; correct it")
    by_id = {}
    for number, token in tokens.items():
        match token:
            case {"content": str(content)} if number.isdecimal():
                flags = {name: bool(token[name]) for name in FLAGS if name in token}
                by_id[int(number)] = {"id": int(number), "content": content, **flags}
            case _:
                raise UserError(
                    f"{path}: added_tokens_decoder[{number!r}]={token!r} does not map an id to an "
                    "object with content; correct it"
                )
    return by_id


def _legacy_tokens(path: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Added tokens by id, from `added_tokens.json`."""
    by_id, special = {}, {token["content"] for token in _named(config)}
    for content, number in read_optional_json(path).items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path}: {content!r} has no id but {number!r}; correct it")
        flags = dict.fromkeys(FLAGS, False)
        flags |= {"special": content in special, "normalized": content not in special}
        by_id[number] = {"id": number, "content": content, **flags}
    return by_id


def _with_tokens(
    document: dict[str, Any],
    known: Mapping[int, Mapping[str, Any]],
    others: Mapping[int, dict[str, Any]],
    path: Path,
    source: Path,
) -> dict[str, Any]:
    """The content of `tokenizer.json`, with added tokens and their flags from another file.

    Raises:
      UserError: the two files have different tokens for an id.
    """
    for number, token in others.items():
        content = token["content"]
        if number in known and known[number]["content"] != content:
            raise UserError(
                f"{path}: token {number} is {known[number]['content']}, but {content} in "
                f"{source}; correct one of the two files"
            )
    if not others:
        return document
    plain = dict.fromkeys(FLAGS, False)
    completed = {number: {**plain, **known.get(number, {}), **x} for number, x in others.items()}
    merged = {**known, **completed}
    document = {**document, "added_tokens": [merged[number] for number in sorted(merged)]}
    tokenizer = parsed(path, document)
    for number, token in others.items():
        if tokenizer.token_to_id(token["content"]) != number:
            raise UserError(
                f"{source}: token {token['content']} cannot have the id {number} after the tokens "
                f"of {path}; correct one of the two files"
            )
    return document


def _named(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Special tokens of `tokenizer_config.json`: named ones, and lists."""
    values = [value for name, value in config.items() if name.endswith("_token")]
    for name in LISTS:
        match config.get(name):
            case [*several]:
                values += several
            case {**several}:
                values += several.values()
    for value in values:
        match value:
            case str(content) if content:
                yield {"content": content} | dict.fromkeys(FLAGS, False) | {"special": True}
            case {"content": str(content)} if content:
                flags = {name: bool(value.get(name)) for name in FLAGS}
                yield {"content": content, **flags, "special": True}


def _with_special_tokens(
    document: dict[str, Any], config: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """The content of `tokenizer.json`, where all special tokens of the other file are added."""
    added = [*(document.get("added_tokens") or [])]
    places = {token["content"]: i for i, token in enumerate(added)}
    named = {token["content"]: token for token in _named(config)}
    if missing := [token for content, token in named.items() if content not in places]:
        tokenizer = parsed(path, document)
        end = special_tokens_of(config).get("eos_token")  # refused later, if it has no id
        new = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        for token in missing:
            number = tokenizer.token_to_id(token["content"])
            if number is None and token["content"] == end:
                continue
            added.append({"id": new if number is None else number, **token})
            new += number is None
    for content in named.keys() & places.keys():
        added[places[content]] = {**added[places[content]], "special": True}
    return {**document, "added_tokens": sorted(added, key=lambda token: token["id"])}


def _with_prefix_space(
    document: dict[str, Any], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """The content of `tokenizer.json`, with `add_prefix_space` applied to byte-level classes.

    Raises:
      UserError: `add_prefix_space` of a Llama tokenizer contradicts the file.
    """
    model = read_optional_json(folder / CONFIG_FILE)
    given = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = given or CLASSES.get(str(model.get("model_type")))
    kind = str(kind).removesuffix("Fast")
    prefix = bool(config.get("add_prefix_space"))
    if kind in CLASSES.values():
        for part in _parts(document.get("pre_tokenizer")):
            if part.get("type") == "ByteLevel":
                part["add_prefix_space"] = prefix
        return document
    spaces = [
        part["type"] == "Prepend" or part.get("prepend_scheme", "always") != "never"
        for name in ("normalizer", "pre_tokenizer")
        for part in _parts(document.get(name))
        if part.get("type") in ("Prepend", "Metaspace")
    ]
    is_given = kind == "LlamaTokenizer" and config.get("add_prefix_space") is not None
    if is_given and spaces and any(spaces) != prefix:
        raise UserError(
            f"{folder / SETTINGS_FILE}: add_prefix_space={prefix} contradicts "
            f"{folder / TOKENIZER_FILE}; correct one of the two files"
        )
    return document


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A component of a `tokenizer.json`, and all within it."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers"):
            for inner in part.get(name) or []:
                yield from _parts(inner)


def _template_files(folder: Path) -> dict[str, str]:
    """Chat templates by name in files of their own."""
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    files |= {DEFAULT: folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).exists() else {}
    for path in files.values():
        check_regular(path)
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: a chat template cannot be read ({error}); restore it") from None
