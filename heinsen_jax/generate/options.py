"""Options of the commands that generate text."""

import sys

from heinsen_jax.errors import UserError, printable
from heinsen_jax.generate.engine import Engine
from heinsen_jax.runs.load import InferenceOptions, load_text_run
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.compilation import cache_compilations
from heinsen_jax.typing import config_dataclass


def check_count(option: str, number: int | None) -> None:
    """Raise UserError if a number of tokens, samples or batches is below 1 or too large."""
    if number is not None and number < 1:
        raise UserError(f"{option} {number} must be at least 1")
    if number is not None and number >= 2**31:
        raise UserError(f"{option} {number} is too large; give less than {2**31:,}")


@config_dataclass
class TextOptions(InferenceOptions):
    """Options of commands that load a model and sample text from it."""

    max_new_tokens: int = 256
    """Maximum number of tokens to generate."""
    temperature: float = 0.8
    """Divides the logits, above 0; lower is more deterministic."""
    top_k: int | None = None
    """Sample from the k most probable tokens; 1 is greedy; all when None."""
    top_p: float | None = None
    """Sample from the fewest tokens with this total probability; all when None."""
    seed: int = 0
    """Seed of the samples."""
    raw: bool = False
    """Print control characters, which can control a terminal, unescaped."""

    def load(self) -> Engine:
        """Load the model and its tokenizer.

        Raises:
          UserError: an option is out of its range, or the folder has no model of text.
        """
        check_count("--max-new-tokens", self.max_new_tokens)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed} is out of range; give one in 0 .. {2**32 - 1:,}")
        keep_freed_memory()
        cache_compilations()
        chosen = {"best": not self.latest, "precision": self.model}
        model, tokenizer, _ = load_text_run(self.workdir, on_host=True, **chosen)
        return Engine(model, tokenizer)

    def print_part(self, text: str) -> None:
        """Print a part of a text, with control characters escaped; with --raw its exact bytes. In
        the text, surrogates stand for bytes that are not UTF-8."""
        if not self.raw:
            print(printable(text, lines=True), end="", flush=True)
            return
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()

    @property
    def decoding_errors(self) -> str:
        """Treatment of bytes that are not UTF-8, as in `bytes.decode`, for `print_part`."""
        return "surrogateescape" if self.raw else "replace"
