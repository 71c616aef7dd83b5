"""Texts of the adapter to the lm-evaluation-harness: tokens, and conversations."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from lm_eval.api.model import TemplateLM

from heinsen_jax.data import start_ids
from heinsen_jax.data.tokenizer_pretrained import DEFAULT, PretrainedTokenizer
from heinsen_jax.data.tokenizer_protocol import Tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.typing import JSON

logger = logging.getLogger(__name__)


class HarnessTexts(TemplateLM):
    """Encoding of requests as the harness's own Hugging Face model does.

    Attributes:
      folder: the model's folder, for messages.
      encoding: its tokenizer.
      add_bos_token: whether texts begin with the start token; None: as the tokenizer does.
    """

    folder: str | None
    encoding: Tokenizer
    add_bos_token: bool | None = None

    @property
    def eot_token_id(self) -> int:
        return self.encoding.end_of_text_id

    @property
    def prefix_token_id(self) -> int:
        """The token before empty contexts, and before documents whose complete likelihood is
        measured: the start token if the tokenizer has one, or else the end of text."""
        return next(iter((*self._bos, *start_ids(self.encoding), self.eot_token_id)))

    @property
    def _bos(self) -> list[int]:
        """The tokenizer's start token, whether or not texts begin with it."""
        tokenizer = self.encoding
        if not isinstance(tokenizer, PretrainedTokenizer):
            return []
        return tokenizer.encode_with_special_tokens(tokenizer.special_tokens.get("bos_token", ""))

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer and its chat templates, for the harness's cache of requests."""
        content = json.dumps([self.encoding.fingerprint, {**self._templates}])
        return f"{self.encoding.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation in the template of the tokenizer, for `--apply_chat_template`.

        Without a generation prompt, the last message is the beginning of an answer, and is not
        ended. If a template refuses the conversation, system messages are left out.

        Raises:
          UserError: the tokenizer has no template, or the template refuses the conversation.
        """
        if DEFAULT not in self._templates:
            raise UserError(
                f"--apply_chat_template: the tokenizer of {self.folder} has no chat template; "
                "leave it out"
            )
        assert isinstance(self.encoding, PretrainedTokenizer)
        render = partial(
            self.encoding.render_chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return render(chat_history)
        except UserError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            logger.warning("%s; rendered without system messages", error)
            return render(rest)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, for the record of the harness."""
        if chat_template not in (True, False, DEFAULT):
            raise UserError(
                f"--apply_chat_template {chat_template}: templates cannot be chosen by name; leave "
                "the name out"
            )
        return self._templates.get(DEFAULT) if chat_template else None

    @property
    def _templates(self) -> Mapping[str, str]:
        tokenizer = self.encoding
        return tokenizer.templates if isinstance(tokenizer, PretrainedTokenizer) else {}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: JSON
    ) -> list[int]:
        """Encode a text as transformers does: special tokens of an imported model may be written in
        it, and those with which documents start precede it, unless it begins with them."""
        tokenizer = self.encoding
        if isinstance(tokenizer, PretrainedTokenizer):
            ids = tokenizer.encode_with_special_tokens(string)
        else:
            ids = [*tokenizer.encode(string)]
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
        if add_special_tokens is False:
            return ids
        start = [*start_ids(tokenizer)] or (self._bos if add_special_tokens else [])
        return ids if ids[: len(start)] == start else [*start, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both as one text. White space between them belongs to the continuation.

        If one token covers the end of the context and the whole continuation, the continuation is
        encoded apart. A blank context is the prefix token.

        Raises:
          UserError: the continuation has no tokens.
        """
        if context:
            before, after = super()._encode_pair(context, continuation)
        else:
            before, after = [], self.tok_encode(continuation, add_special_tokens=False)
        if not after:
            after = self.tok_encode(continuation, add_special_tokens=False)
        if not before and after[:1] == [self.prefix_token_id]:
            before, after = after[:1], after[1:]
        if not after:
            raise UserError(
                f"continuation {continuation!r} after context {context!r}: it has no tokens, so "
                "that it would be certain; correct the task's choices"
            )
        return before or [self.prefix_token_id], after
