"""Chat with a trained model, line by line.

python -m heinsen_jax.chat --workdir runs/quickstart

The conversation so far is the model's state and is never processed again, unless the chat template
of a pretrained model changes it. /save FILE writes the state to a file, /load FILE resumes from
one, /reset starts over, /quit or the end of input ends the chat. Ctrl-C stops an answer. After any
error the conversation continues as it was before the line; the part of an answer that was printed
stays in it.
"""

import io
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from heinsen_jax import data
from heinsen_jax.data import start_ids
from heinsen_jax.errors import (
    UserError,
    command_line,
    failure,
    first_line,
    printable,
    wants_tracebacks,
)
from heinsen_jax.generate.engine import Engine
from heinsen_jax.generate.options import TextOptions
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.generate.states import check_one
from heinsen_jax.generate.text import check_text, decode_stream, until_end
from heinsen_jax.generate.tokens import continued
from heinsen_jax.models import LanguageModelState
from heinsen_jax.runtime.arguments import parse
from heinsen_jax.typing import JSON

HELP = "/save FILE   /load FILE   /reset   /quit"


class Position(NamedTuple):
    """Position in a conversation, immutable, so that an interruption cannot leave it inconsistent.

    Attributes:
      state: the model's state; None at the start.
      read: the tokens in the state.
      unread: the last sampled token, which is not in the state yet.
    """

    state: LanguageModelState | None = None
    read: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()


@dataclass
class Chat:
    """A conversation of a person and a model. If the tokenizer has a chat template, each line is a
    message; else the text continues, and answers end with a line.

    Attributes:
      engine: the model and its tokenizer.
      max_new_tokens: maximum number of tokens of an answer.
      temperature, top_k, seed, top_p: as for `generate`.
      decoding_errors: how bytes of an answer that are not UTF-8 are decoded.

    Raises:
      UserError: the model cannot generate, or an option is out of its range.
    """

    engine: Engine
    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int
    top_p: float | None = None
    decoding_errors: str = "replace"

    def __post_init__(self) -> None:
        self.reset()
        self.tokenizer = tokenizer = self.engine.tokenizer
        is_pretrained = isinstance(tokenizer, data.PretrainedTokenizer)
        self.template = tokenizer if is_pretrained and tokenizer.templates else None
        self.turns = 0
        self.saved: dict[Path, tuple[int, ...]] = {}  # files that /save may replace
        self.sampler = Sampler.of(
            self.engine.config,
            self.temperature,
            self.top_k,
            jax.random.key(self.seed),
            tokenizer.vocab_size,
            self.top_p,
        )

    def reset(self) -> None:
        """Start over."""
        self.position = Position()
        self.messages: list[dict[str, JSON]] = []

    @property
    def state(self) -> LanguageModelState | None:
        """The model's state; None at the start."""
        return self.position.state

    @property
    def read(self) -> list[int]:
        """The tokens in the state."""
        return [*self.position.read]

    @property
    def unread(self) -> list[int]:
        """The last sampled token, which is not in the state yet."""
        return [*self.position.unread]

    def answer(self, line: str) -> Iterator[str]:
        """Yield the answer of the model to a line. An interrupted answer is kept as far as it was
        generated; if an error precedes its first token, the line is not kept either."""
        check_text(line, "message")
        before = self.position
        messages = [*self.messages, {"role": "user", "content": line}]
        answer = ""
        try:
            tokens = self._tokens(self._after(messages))
            new = until_end(tokens, self.tokenizer, self.max_new_tokens)
            texts = decode_stream(self.tokenizer, new, self.decoding_errors)
            for text in self._without_first_space(texts):
                answer += text
                content = answer.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                self.messages = [*messages, {"role": "assistant", "content": content}]
                yield text
        except BaseException:
            if len(self.messages) < len(messages):  # no answer yet
                self.position = before
            raise

    def _without_first_space(self, texts: Iterator[str]) -> Iterator[str]:
        """The parts of an answer, which begins a text if it is a message."""
        for first in itertools.islice(texts, 1):
            yield first if self.template is None else self.template.without_first_space(first)
        yield from texts

    def _after(self, messages: list[dict[str, JSON]]) -> list[int]:
        """The tokens to be processed before the answer to the last message."""
        if self.template is None:
            start = start_ids(self.tokenizer) if self.state is None else ()
            line = f"{messages[-1]['content']}\n"
            return [*start, *self.unread, *self.tokenizer.encode(line)]
        tokens = self.template.apply_chat_template(messages, add_generation_prompt=True)
        if tokens[: len(self.read)] != self.read:  # the template has changed earlier messages
            self.position = Position()
        return tokens[len(self.read) :]

    def _tokens(self, tokens: list[int]) -> Iterator[int]:
        key = jax.random.fold_in(self.sampler.key, self.turns)
        self.turns += 1
        state = self.engine.init_state() if self.state is None else self.state
        left = self.engine.remaining(state)
        if left < len(tokens):
            raise UserError(
                f"{len(tokens)} tokens precede the answer, and the model has {left} positions left "
                f"(model.max_length={self.engine.config.max_length}): /reset starts over"
            )
        number = int(min(self.max_new_tokens, left - len(tokens) + 1))  # the last is not fed
        needed = len(tokens) + number - 1
        self.engine.config.warn_beyond_trained_length(len(self.position.read) + needed)
        written, sampler = b"", replace(self.sampler, key=key)
        state = self.engine.reserve(state, needed)  # in one call, not per token
        new = continued(self.engine, np.asarray(tokens, np.int32), sampler, state, needed)
        for token, after in itertools.islice(new, number):
            self.position = Position(after, (*self.position.read, *tokens), (token,))
            tokens = [token]
            yield token
            written += self.tokenizer.token_bytes(token)
            if self.template is None and written.strip() and written.endswith(b"\n"):
                break

    def command(self, line: str) -> str:
        """Execute a line that begins with /, and return a message."""
        name, _, file = line.partition(" ")
        match name, file.strip():
            case "/reset", "":
                self.reset()
                return "the state is reset"
            case (("/save" | "/load"), _) if self.template is not None:
                raise UserError(
                    f"{name}: a conversation in a chat template cannot be saved or loaded; use "
                    "heinsen_jax.generate.save_state"
                )
            case "/save", path if path:
                self._save(Path(path))
                return f"saved in {path}"
            case "/load", path if path:
                state = self.engine.load(path)
                check_one(self.engine, state)
                self.reset()
                self.position = Position(state)
                return f"loaded {path}"
        raise UserError(f"{line!r}: unknown command; choose from {HELP}")

    def _save(self, path: Path) -> None:
        """Write the state to a new file, or to one that this conversation has written.

        Raises:
          UserError: the conversation is empty, or another file exists.
        """
        if self.state is None:
            raise UserError("/save: the conversation is empty; write something first")
        if os.path.lexists(path) and self.saved.get(path.absolute()) != _identity(path):
            raise UserError(
                f"/save: {path} exists, and this conversation has not saved it; give a new name"
            )
        _, state = self.engine.feed(np.asarray(self.unread, np.int32), self.state)
        self.position = Position(state, (*self.read, *self.unread))
        self.engine.save(path, state)
        self.saved[path.absolute()] = _identity(path)


def _identity(path: Path) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written."""
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@command_line
def main() -> None:
    options = parse(TextOptions, prog="python -m heinsen_jax.chat", description=__doc__)
    chat = Chat(
        options.load(),
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.seed,
        options.top_p,
        options.decoding_errors,
    )
    if isinstance(sys.stdin, io.TextIOWrapper):  # so that `check_text` names an invalid byte
        sys.stdin.reconfigure(errors="surrogateescape")
    print(HELP)
    is_open = True
    while is_open:
        try:
            is_open = _turn(chat, options)
        except KeyboardInterrupt:
            print()
        except (SystemExit, BrokenPipeError):
            raise
        except BaseException as error:  # also PanicException: nothing may end the conversation
            if wants_tracebacks():
                traceback.print_exc()
            unknown = f"{type(error).__name__}: {printable(first_line(error))}"
            print(f"error: {failure(error) or unknown}")


def _turn(chat: Chat, options: TextOptions) -> bool:
    """Process a line of the user; return whether the chat continues."""
    line = _line()
    if line is None or line.strip() == "/quit":
        return False
    if line.startswith("/"):
        print(printable(chat.command(line)))
        return True
    for text in chat.answer(line):
        options.print_part(text)
    print()
    return True


def _line() -> str | None:
    """The next line; None at the end of input, or after Ctrl-C twice."""
    for _ in range(2):
        try:
            return input("> ")
        except KeyboardInterrupt:
            print("\nCtrl-C again, or /quit, ends the chat")
        except UnicodeDecodeError:
            raise
        except (EOFError, OSError, RuntimeError, ValueError):  # also a closed or lost stdin
            return None
    return None


if __name__ == "__main__":
    raise SystemExit(main())
