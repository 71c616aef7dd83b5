"""Speed of generation with a pretrained model: prompts, and tokens after them, by batch size.

    pip install torch transformers        # for the comparison only
    python benchmarks/generation.py --model FOLDER [--output benchmarks/results/generation.json]

FOLDER is a checkpoint in the format of transformers, such as SmolLM2-135M. Times are medians of
interleaved calls in one process, float32, on a CPU. `prompt` is the time until the logits of the
first new token are known; `decoding`, the time per token of 32 greedy tokens after a prompt of
four, in one compiled loop; `streaming`, the time per token on request, as in a chat.
For transformers, `decoding` is `model.generate`, with the prompt of four.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # waiting threads of one library slow down the others

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, interleaved_medians
from rich.console import Console
from rich.table import Table

from heinsen_jax.generate import Engine
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.generate.tokens import further_tokens
from heinsen_jax.interop.transformers import from_pretrained
from heinsen_jax.runtime.environment import environment

torch: Any = importlib.import_module("torch")
FED, NEW = 4, 32
Cases = dict[tuple[str, str, int, int], Callable[[], Any]]


@dataclass(frozen=True)
class Options:
    """Measure generation.

    Attributes:
      model: folder of a checkpoint.
      output: path of the JSON record.
      prompts: lengths of prompts, in tokens.
      batches: numbers of sequences.
      repeats: number of rounds.
    """

    model: Path
    output: Path = ROOT / "benchmarks/results/generation.json"
    prompts: tuple[int, ...] = (16, 127, 128, 512)
    batches: tuple[int, ...] = (1, 8)
    repeats: int = 3


def ours(options: Options) -> Cases:
    """Calls by measure, implementation, tokens and batch."""
    model, _ = from_pretrained(options.model, on_host=True)
    engine = Engine(model)
    sampler = Sampler.of(engine.config, 1.0, 1, None, None)
    cases: Cases = {}
    for length in options.prompts:
        tokens = np.arange(length) % engine.config.vocab_size
        cases["prompt", "heinsen_jax", length, 1] = partial(engine.feed, tokens)
    for batch in options.batches:
        fed = np.ones((batch, FED), np.int32)
        state = engine.reserve(engine.init_state((batch,)), FED + NEW)
        logits, state = engine.feed(fed, state)
        token = jnp.argmax(logits, -1)

        def decode(token: Any, state: Any) -> Any:
            carry = jax.tree.map(jnp.copy, (token, state))  # the loop reuses its memory
            return further_tokens(engine.structure, NEW, engine.weights, sampler, carry, 1, NEW)[1]

        cases["decoding", "heinsen_jax", NEW, batch] = partial(decode, token, state)
        cases["streaming", "heinsen_jax", 1, batch] = partial(engine.step, token, state)
    return cases


def peers(options: Options) -> Cases:
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32
    ).eval()
    cases: Cases = {}

    def prompt(tokens: Any) -> Any:
        with torch.no_grad():
            return model(tokens, use_cache=True, logits_to_keep=1).logits.numpy()

    def decode(fed: Any, count: int) -> Any:
        with torch.no_grad():
            return model.generate(
                fed, max_new_tokens=count, min_new_tokens=count, do_sample=False
            ).numpy()

    for length in options.prompts:
        tokens = torch.arange(length)[None] % model.config.vocab_size
        cases["prompt", "transformers", length, 1] = partial(prompt, tokens)
    for batch in options.batches:
        fed = torch.ones((batch, FED), dtype=torch.long)
        cases["decoding", "transformers", NEW, batch] = partial(decode, fed, NEW)
    return cases


def main(options: Options) -> int:
    seconds = interleaved_medians(ours(options) | peers(options), options.repeats, 0.0, 3)
    rows = [
        {"measure": measure, "library": name, "tokens": tokens, "batch": batch, "seconds": x}
        for (measure, name, tokens, batch), x in sorted(seconds.items())
    ]
    for row in rows:
        if row["measure"] != "prompt":
            row["seconds"] /= row["tokens"]
    record = {
        "environment": environment(),
        "model": options.model.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    table = Table("measure", "library", "tokens", "batch", "ms")
    for row in rows:
        cells = row["measure"], row["library"], str(row["tokens"]), str(row["batch"])
        table.add_row(*cells, f"{1e3 * row['seconds']:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
