"""Generate text: continue a prompt with a trained model, and print text as it is sampled.

python -m heinsen_jax.generate --workdir runs/quickstart --prompt "def main("
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from heinsen_jax.data import start_ids
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.generate.options import TextOptions, check_count
from heinsen_jax.generate.text import check_text, complete, decode_stream, until_end
from heinsen_jax.generate.tokens import stream
from heinsen_jax.runtime.arguments import parse
from heinsen_jax.runtime.signals import exit_immediately
from heinsen_jax.typing import config_dataclass


@config_dataclass
class PromptOptions(TextOptions):
    """Continue a prompt with a trained model, and print text as it is sampled."""

    prompt: str
    """Text to continue; at least one character."""
    num_samples: int = 1
    """Number of continuations; several are printed when all are complete."""


@command_line
def main() -> None:
    options = parse(PromptOptions, prog="python -m heinsen_jax.generate", description=__doc__)
    check_count("--num-samples", options.num_samples)
    with exit_immediately():
        for text in _continuations(options):
            options.print_part(text)
    print()


def _continuations(options: PromptOptions) -> Iterator[str]:
    """The prompt and its continuation, as it is sampled; or all samples, one after another."""
    check_text(options.prompt, "--prompt")
    engine = options.load()
    tokenizer = engine.tokenizer
    prompt, number, key = options.prompt, options.max_new_tokens, jax.random.key(options.seed)
    tokens = [*start_ids(tokenizer), *tokenizer.encode(prompt)]
    if not tokens:
        raise UserError("--prompt is empty; give at least one character")
    if options.num_samples > 1:
        (texts,) = complete(
            engine,
            tokenizer,
            [tokens],
            number,
            num_samples=options.num_samples,
            decoding_errors=options.decoding_errors,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=key,
        )
        yield "\n\n".join(f"--- sample {i} ---\n{prompt}{x}" for i, x in enumerate(texts, start=1))
        return
    sampled = stream(
        engine,
        jnp.asarray(tokens, jnp.int32),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        key=key,
        num_tokens=tokenizer.vocab_size,
    )
    yield prompt
    yield from decode_stream(
        tokenizer, until_end(sampled, tokenizer, number), options.decoding_errors
    )


if __name__ == "__main__":
    raise SystemExit(main())
