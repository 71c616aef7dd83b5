"""Serving a linearized model and its teacher: time, memory and state by context.

    python benchmarks/linearized_serving.py

The model of Python code (configs/python_code.py) with softmax attention, and its linearizations,
with random weights: a prompt of each length, as generation reads it, in chunks of 1024 tokens and
with a state; the same tokens in one pass without a state; and generation after the prompt, the
time of 65 tokens less that of one, so that copies of the state do not count. Medians of interleaved
runs. Memory is what the prompt adds to the process at its peak, state included. Needs an estimated
half hour on 2 cores of an AMD EPYC. Linux only. Writes a JSON record.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, added_memory, interleaved_medians
from flax import nnx
from rich.console import Console
from rich.table import Table

from heinsen_jax.config import load_config
from heinsen_jax.environment import environment
from heinsen_jax.generate import generate
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.conversion import linear_layers

CHUNK = 1024
NEW = 64  # generated tokens that are measured
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
    repeats: int = 3


class Served:
    """A model and a prompt."""

    def __init__(self, config: LanguageModelConfig, context: int) -> None:
        self.model = LanguageModel(config, rngs=nnx.Rngs(0))
        self.capacity = context + NEW + 2
        rng = np.random.default_rng(0)
        self.tokens = jnp.asarray(rng.integers(0, config.vocab_size, context))
        graph, self.parameters = nnx.split(self.model)

        @partial(jax.jit, donate_argnums=1)
        def advance(parameters: nnx.State, state: Any, tokens: jax.Array) -> Any:
            return nnx.merge(graph, parameters)(tokens, state=state, return_state=True)[1]

        @jax.jit
        def features(parameters: nnx.State, tokens: jax.Array) -> jax.Array:
            return nnx.merge(graph, parameters).features(tokens)[0][-1]

        self.advance, self.features = advance, features

    def read(self) -> Any:
        """The state after the prompt."""
        state = self.model.init_state((), capacity=self.capacity)
        for chunk in self.tokens.reshape(-1, CHUNK):
            state = self.advance(self.parameters, state, chunk)
        return jax.block_until_ready(state)

    def read_without_state(self) -> jax.Array:
        """The last features of one pass over the prompt."""
        return self.features(self.parameters, self.tokens)

    def generate(self, state: Any, count: int) -> jax.Array:
        """Generate tokens after the prompt."""
        return generate(self.model, jnp.zeros(1, jnp.int32), count, top_k=1, state=state)


def main(options: Options) -> int:
    base = load_config("python_code").model
    teacher = replace(base, attention="softmax")
    configs = {
        name: teacher if chosen is None else linear_layers(teacher, *chosen)
        for name, chosen in MODELS.items()
    }
    rows: list[dict[str, Any]] = []
    names = "prompt s", "one pass s", "ms/token", "peak MB", "state bytes"
    table = Table("context", "model", *names)
    for context in options.contexts:
        served = {name: Served(config, context) for name, config in configs.items()}
        states = {name: each.read() for name, each in served.items()}  # compiled
        memory = {name: added_memory(each.read) for name, each in served.items()}
        prompt = interleaved_medians({x: y.read for x, y in served.items()}, options.repeats, 0, 1)
        one_pass = interleaved_medians(
            {x: y.read_without_state for x, y in served.items()}, options.repeats, 0, 1
        )
        new = interleaved_medians(
            {
                (x, count): partial(y.generate, states[x], count)
                for (x, y), count in product(served.items(), (1, NEW + 1))
            },
            options.repeats,
        )
        for name, each in served.items():
            row: dict[str, Any] = {"context": context, "model": name}
            row |= {"prompt_seconds": prompt[name], "one_pass_seconds": one_pass[name]}
            per_token = (new[name, NEW + 1] - new[name, 1]) / NEW
            row |= {"seconds_per_token": per_token, "peak_bytes": memory[name]}
            rows.append(row | {"state_bytes": each.model.state_size(context)})
            times = f"{prompt[name]:.2f}", f"{one_pass[name]:.2f}", f"{1e3 * per_token:.2f}"
            sizes = f"{memory[name] / 1e6:,.0f}", f"{each.model.state_size(context):,}"
            table.add_row(f"{context:,}", name, *times, *sizes)
    Console().print(table)
    record = {"environment": environment(), "rows": rows}
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
