"""Continue a prompt with a trained model, and print text as it is sampled.

python -m heinsen_jax.generate --workdir runs/quickstart --prompt "def main("
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

from heinsen_jax.errors import UserError, command_line
from heinsen_jax.generate.text import decode_stream, until_end
from heinsen_jax.generate.tokens import stream
from heinsen_jax.training.checkpoint import load_run


@command_line
def main() -> None:
    def run(
        workdir: str,
        prompt: str,
        max_new_tokens: int = 256,
        temperature: Annotated[float, tyro.conf.arg(help="above 0; lower is safer")] = 0.8,
        top_k: Annotated[int | None, tyro.conf.arg(help="candidates; 1 is greedy")] = None,
        seed: int = 0,
        latest: Annotated[bool, tyro.conf.arg(help="the latest checkpoint, not the best")] = False,
    ) -> None:
        """Continue a prompt with a trained model, and print text as it is sampled."""
        if max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {max_new_tokens} must be at least 1")
        model, tokenizer, _ = load_run(workdir, best=not latest)
        if tokenizer is None:
            raise UserError(
                f"{workdir}: the model is trained on a synthetic task; choose a run trained on text"
            )
        tokens = tokenizer.encode_ordinary(prompt)
        if not tokens:
            raise UserError("--prompt is empty: give at least one character")
        sampled = stream(
            model,
            jnp.asarray(tokens, jnp.int32),
            temperature=temperature,
            top_k=top_k,
            key=jax.random.key(seed),
            num_tokens=tokenizer.n_vocab,
        )
        print(prompt, end="", flush=True)
        for text in decode_stream(tokenizer, until_end(sampled, tokenizer, max_new_tokens)):
            print(text, end="", flush=True)
        print()

    tyro.cli(run, prog="python -m heinsen_jax.generate")


if __name__ == "__main__":
    raise SystemExit(main())
