"""Serving a linearized model and its teacher: time and state by context.

    python benchmarks/linearized_serving.py

The model of Python code (configs/python_code.py) with softmax attention, and its linearizations,
with random weights: a prompt of each length in chunks of 1024 tokens, then generation of 64
tokens, in interleaved runs. Needs about 5 minutes on 2 cores of an AMD EPYC. Writes a JSON record.
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, interleaved_medians
from flax import nnx
from rich.console import Console
from rich.table import Table

from heinsen_jax.config import load_config
from heinsen_jax.environment import environment
from heinsen_jax.generate import generate
from heinsen_jax.linearize import linear_layers
from heinsen_jax.models import LanguageModel, LanguageModelConfig

CHUNK = 1024
NEW = 64  # generated tokens
MODELS = {
    "teacher": None,
    "log, Hedgehog": ("log:features=hedgehog", ()),
    "log_window, 64": ("log_window:window_size=64", ()),
    "log_window, 64, 1 in 4 kept": ("log_window:window_size=64", ("3::4",)),
}


@dataclass(frozen=True)
class Options:
    """Serve a linearized model and its teacher.

    Attributes:
      contexts: lengths of the prompts, multiples of 1024.
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    output: Path = ROOT / "benchmarks/results/linearized_serving.json"
    repeats: int = 5


class Served:
    """A model after a prompt."""

    def __init__(self, config: LanguageModelConfig, context: int) -> None:
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        graph, parameters = nnx.split(model)
        rng = np.random.default_rng(0)
        tokens = jnp.asarray(rng.integers(0, config.vocab_size, (context // CHUNK, CHUNK)))

        @partial(jax.jit, donate_argnums=1)
        def advance(parameters: nnx.State, state: Any, tokens: jax.Array) -> Any:
            return nnx.merge(graph, parameters)(tokens, state=state, return_state=True)[1]

        self.model, self.state_bytes = model, model.state_size(context)
        state = model.init_state((), capacity=context + NEW)
        jax.block_until_ready(advance(parameters, state, tokens[0]))  # compiled
        state = jax.block_until_ready(model.init_state((), capacity=context + NEW))
        start = time.perf_counter()
        for chunk in tokens:
            state = advance(parameters, state, chunk)
        self.state = jax.block_until_ready(state)
        self.prompt_seconds = time.perf_counter() - start

    def __call__(self) -> jax.Array:
        """Generate `NEW` tokens after the prompt."""
        return generate(self.model, jnp.zeros(1, jnp.int32), NEW, top_k=1, state=self.state)


def main(options: Options) -> int:
    base = load_config("python_code").model
    teacher = replace(base, attention="softmax")
    configs = {
        name: teacher if chosen is None else linear_layers(teacher, *chosen)
        for name, chosen in MODELS.items()
    }
    rows: list[dict[str, Any]] = []
    table = Table("context", "model", "prompt s", "ms/token", "state bytes")
    for context in options.contexts:
        served = {name: Served(config, context) for name, config in configs.items()}
        seconds = interleaved_medians({**served}, options.repeats)
        for name, each in served.items():
            row: dict[str, Any] = {"context": context, "model": name}
            row |= {"prompt_seconds": each.prompt_seconds, "seconds_per_token": seconds[name] / NEW}
            rows.append(row | {"state_bytes": each.state_bytes})
            times = f"{each.prompt_seconds:.2f}", f"{1e3 * seconds[name] / NEW:.2f}"
            table.add_row(f"{context:,}", name, *times, f"{each.state_bytes:,}")
    Console().print(table)
    record = {"environment": environment(), "rows": rows}
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
