"""Chat with a trained model, line by line.

python -m heinsen_jax.chat --workdir runs/quickstart

The conversation so far is the model's state and is never processed again, unless the chat template
of a pretrained model changes it. /save FILE writes the state to a file, /load FILE resumes from
one, /reset starts over, /quit or the end of input ends the chat.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro

from heinsen_jax.data import PretrainedTokenizer, Tokenizer, start_ids
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.generate import generate, load_state, save_state
from heinsen_jax.generate.options import TextOptions
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.generate.states import check_one
from heinsen_jax.generate.text import decode_stream, until_end
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.typing import JSON

HELP = "/save FILE   /load FILE   /reset   /quit"


@dataclass
class Chat:
    """A conversation of a person and a model. If the tokenizer has a chat template, each line is a
    message; else the text continues, and answers end with a line.

    Attributes:
      model, tokenizer: the model and its tokenizer.
      max_new_tokens: maximum number of tokens of an answer.
      temperature, top_k, seed, top_p: as for `generate`.

    Raises:
      UserError: the model cannot generate, or an option is out of its range.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int
    top_p: float | None = None

    def __post_init__(self) -> None:
        self.reset()
        tokenizer = self.tokenizer
        is_pretrained = isinstance(tokenizer, PretrainedTokenizer)
        self.template = tokenizer if is_pretrained and tokenizer.templates else None
        self.turns = 0
        key = jax.random.key(self.seed)
        num_tokens = self.tokenizer.vocab_size
        Sampler.of(self.model, self.temperature, self.top_k, key, num_tokens, self.top_p)

    def reset(self) -> None:
        """Start over."""
        self.state: LanguageModelState | None = None
        self.read: list[int] = []  # the tokens in the state
        self.unread: list[int] = []  # the last sampled token, which is not in the state yet
        self.messages: list[dict[str, JSON]] = []

    def answer(self, line: str) -> Iterator[str]:
        """Yield the answer of the model to a line. Of an interrupted one, the part that was
        generated is in the conversation."""
        messages = [*self.messages, {"role": "user", "content": line}]
        new = self._tokens(self._after(messages))
        answer = ""
        for text in decode_stream(
            self.tokenizer, until_end(new, self.tokenizer, self.max_new_tokens)
        ):
            answer += text
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            yield text

    def _after(self, messages: list[dict[str, JSON]]) -> list[int]:
        """The tokens to be processed before the answer to the last message."""
        if self.template is None:
            start = start_ids(self.tokenizer) if self.state is None else ()
            line = f"{messages[-1]['content']}\n"
            return [*start, *self.unread, *self.tokenizer.encode(line)]
        tokens = self.template.apply_chat_template(messages, add_generation_prompt=True)
        if tokens[: len(self.read)] != self.read:  # the template has changed earlier messages
            self.state, self.read = None, []
        return tokens[len(self.read) :]

    def _tokens(self, tokens: list[int]) -> Iterator[int]:
        key = jax.random.fold_in(jax.random.key(self.seed), self.turns)
        self.turns += 1
        state = self.state
        if state is None:  # on its device like later states, so that both share compiled functions
            state = jax.device_put(self.model.init_state(()), jax.devices()[0])
        if self.model.remaining(state) < (needed := len(tokens) + self.max_new_tokens):
            raise UserError("the conversation has reached model.max_length: /reset starts over")
        self.state = self.model.ensure_capacity(state, needed)  # in one call, not per token
        written = b""
        for position in range(self.max_new_tokens):
            new, self.state = generate(
                self.model,
                jnp.asarray(tokens, jnp.int32),
                1,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                key=jax.random.fold_in(key, position),
                state=self.state,
                num_tokens=self.tokenizer.vocab_size,
                return_state=True,
            )
            self.read += tokens
            tokens = self.unread = [int(new[0])]
            yield tokens[0]
            written += self.tokenizer.token_bytes(tokens[0])
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
                if self.state is None:
                    raise UserError("/save: the conversation is empty; write something first")
                unread = jnp.asarray(self.unread, jnp.int32)
                before = self.model.ensure_capacity(self.state, len(self.unread))
                _, state = self.model(unread, state=before, return_state=True)
                self.state, self.unread = state, []
                save_state(path, self.model, state)
                return f"saved in {path}"
            case "/load", path if path:
                state = load_state(path, self.model)
                check_one(self.model, state)
                self.state, self.unread = state, []
                return f"loaded {path}"
        raise UserError(f"{line!r}: unknown command; choose from {HELP}")


@command_line
def main() -> None:
    description = __doc__ or ""
    options = tyro.cli(TextOptions, prog="python -m heinsen_jax.chat", description=description)
    model, tokenizer = options.load()
    chat = Chat(
        model,
        tokenizer,
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.seed,
        options.top_p,
    )
    print(HELP)
    while (line := _line()) not in (None, "/quit"):
        try:
            if line.startswith("/"):
                print(chat.command(line))
                continue
            for text in chat.answer(line):
                print(text, end="", flush=True)
            print()
        except UserError as error:
            print(f"error: {error}")
        except KeyboardInterrupt:
            print()


def _line() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None


if __name__ == "__main__":
    raise SystemExit(main())
