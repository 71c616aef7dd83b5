"""Tokenizers of pretrained models: with special tokens and a chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from heinsen_jax.data.tokenizer_files import (
    DEFAULT,
    merged_files,
    stop_ids_of,
    templates_of,
    without_tokens_beyond,
)
from heinsen_jax.data.tokenizer_json import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    JsonTokenizer,
    parsed,
    special_tokens_of,
    tokenizer_of_json,
)
from heinsen_jax.errors import UserError, check_regular, extra_module, refusing_panics
from heinsen_jax.storage.files import write_atomically

SENTENCEPIECE_FILE = "tokenizer.model"
WITH_TOOLS = "tool_use"
MARK = "\ufdd0"
"""End of a message to be continued: a code point that no text contains."""
REASONING = "reasoning_content", "thinking", "reasoning"
"""Fields of a message for the reasoning before its content; templates read the first two."""
_NO_VARIABLES: Mapping[str, Any] = {}


class PretrainedTokenizer(JsonTokenizer):
    """The tokenizer of a pretrained model.

    `encode` treats special tokens in a text like other text, as with every tokenizer of this
    package; `encode_with_special_tokens` and chats produce them.

    Args:
      name: its name.
      path: its file, for messages; a `tokenizer.model` beside it is saved, too.
      document: the content of `tokenizer.json`.
      config: the content of `tokenizer_config.json`.

    Attributes:
      templates: chat templates by name.
      start_ids: tokens before each document, such as <s>.
      stop_ids: tokens that end generation, the end of text first.

    Raises:
      UserError: a file is damaged or unsupported.
    """

    def __init__(
        self, name: str, path: Path, document: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        self._config = {k: v for k, v in config.items() if k != "chat_template"}
        super().__init__(name, path, document, config)
        self._path = path
        self.templates = templates_of(config.get("chat_template"), path.with_name(SETTINGS_FILE))
        self.start_ids = self._start_ids(config.get("add_bos_token"))
        others = config.get("heinsen_jax", {}).get("stop_ids", ())
        self.stop_ids = tuple(dict.fromkeys([self.end_of_text_id, *others]))
        self._sentencepiece = None
        if (original := path.with_name(SENTENCEPIECE_FILE)).exists():
            check_regular(original)
            self._sentencepiece = original.read_bytes()

    def config(self) -> dict[str, Any]:
        """The content of `tokenizer_config.json`, with all fields of the original."""
        own = super().config()
        fields = own | self._config | {"heinsen_jax": own["heinsen_jax"]}
        fields["heinsen_jax"] |= {"is_pretrained": True, "stop_ids": [*self.stop_ids]}
        fields |= self.special_tokens | {"add_bos_token": bool(self.start_ids)}
        if self.templates:
            pairs = [{"name": k, "template": v} for k, v in self.templates.items()]
            is_one = {*self.templates} == {DEFAULT}
            fields["chat_template"] = self.templates[DEFAULT] if is_one else pairs
        return fields

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self._sentencepiece is not None:  # llama.cpp reads it, not tokenizer.json
            write_atomically(folder / SENTENCEPIECE_FILE, self._sentencepiece)

    def _start_ids(self, add_bos_token: bool | None) -> tuple[int, ...]:
        """Tokens before a document, by the configuration or else as the file adds them."""
        if add_bos_token is False:
            return ()
        encoding = self._with_special.encode(self.end_of_text)
        is_added = encoding.special_tokens_mask  # 0 at the tokens of the text
        start = tuple(encoding.ids[: is_added.index(0)]) if 0 in is_added else ()
        bos = self._with_special.token_to_id(self.special_tokens.get("bos_token", ""))
        return (bos,) if add_bos_token and bos is not None and not start else start

    @cached_property
    def _with_special(self) -> RustTokenizer:
        """The tokenizer that finds special tokens in texts."""
        return parsed(self._path, self._document)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Encode a text in which special tokens may be written, such as <|im_end|>."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with refusing_panics(*self._refusal(text)):
            return self._with_special.encode(text, add_special_tokens=False).ids

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, as left out with `skip_special_tokens` of transformers."""
        return frozenset(number for number, token in self._added.items() if token.special)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """The text of a conversation; arguments as for `apply_chat_template`.

        With `continue_final_message`, it ends with the content of the last message, which the model
        continues.
        """
        if continue_final_message:
            *_, last = messages
            content = last["content"]
            marked = [*messages[:-1], {**last, "content": f"{content}{MARK} "}]
            text = self.render_chat_template(marked, tools=tools, variables=variables)
            before, mark, after = text.rpartition(MARK)
            if not mark or content.strip() not in before:
                raise UserError(
                    f"{self.name}: the chat template changes the last message, {content!r}, so "
                    "that it cannot be continued; leave the beginning of the answer out"
                )
            return before if after.startswith(" ") else before.rstrip()
        has_own = tools is not None and WITH_TOOLS in self.templates
        template = self.templates.get(WITH_TOOLS if has_own else DEFAULT)
        if template is None:
            raise UserError(f"{self.name}: the tokenizer has no chat template; give texts instead")
        given: dict[str, Any] = {
            **self.special_tokens,
            "messages": [_fields_of(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return extra_module("heinsen_jax.data.chat_template").render(template, given)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> list[int]:
        """Encode a conversation for the model. Special tokens within messages are not escaped.

        Args:
          messages: objects with `role` and `content`, and other fields of the template.
          tools: JSON schemas of functions that the model may call.
          add_generation_prompt: whether to end with the start of an answer of the model.
          variables: further variables of the template, such as `{"enable_thinking": False}`.

        Raises:
          UserError: the tokenizer has no template, or the template refuses the messages.
        """
        text = self.render_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.encode_with_special_tokens(text)


def _fields_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message as in transformers: without those that are None, and with the
    reasoning under each of its names."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def pretrained_tokenizer(
    folder: Path, name: str, vocab_size: int | None = None
) -> PretrainedTokenizer | None:
    """The tokenizer in the folder of a pretrained model, without the added tokens that a model of
    `vocab_size` lacks, such as for images; None without `tokenizer.json`.

    Its files are merged as in transformers 5. Its end of text is their `eos_token`, or else as for
    `tokenizer_of_json`. Its other stop tokens are the `eos_token_id` in `generation_config.json`,
    or else in the model's `config.json`.
    """
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return None
    document, config = merged_files(folder)
    if "eos_token" not in special_tokens_of(config):
        config = config | {"eos_token": tokenizer_of_json(path, name).end_of_text}
    stops = stop_ids_of(folder)
    if vocab_size is not None:
        document, config = without_tokens_beyond(document, config, vocab_size, stops, path)
    config = config | {"heinsen_jax": {"stop_ids": stops}}
    return PretrainedTokenizer(name, path, document, config)
