"""Continue a prompt with a trained model, and print text as it is sampled.

python -m heinsen_jax.generate --workdir runs/quickstart --prompt "def main("
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro

from heinsen_jax.errors import UserError, command_line
from heinsen_jax.generate.options import TextOptions
from heinsen_jax.generate.text import decode_stream, until_end
from heinsen_jax.generate.tokens import stream


@dataclass(frozen=True, kw_only=True)
class PromptOptions(TextOptions):
    """Continue a prompt with a trained model, and print text as it is sampled."""

    prompt: str


@command_line
def main() -> None:
    options = tyro.cli(PromptOptions, prog="python -m heinsen_jax.generate")
    model, tokenizer = options.load()
    tokens = tokenizer.encode_ordinary(options.prompt)
    if not tokens:
        raise UserError("--prompt is empty: give at least one character")
    sampled = stream(
        model,
        jnp.asarray(tokens, jnp.int32),
        temperature=options.temperature,
        top_k=options.top_k,
        key=jax.random.key(options.seed),
        num_tokens=tokenizer.n_vocab,
    )
    print(options.prompt, end="", flush=True)
    for text in decode_stream(tokenizer, until_end(sampled, tokenizer, options.max_new_tokens)):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    raise SystemExit(main())
