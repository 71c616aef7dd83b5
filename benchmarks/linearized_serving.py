"""Serving linearized models and their teacher: time, memory and state by context.

    python benchmarks/linearized_serving.py

The teacher of the study studies/grids/linearize_python.py and its linearizations, with random
weights: the time to the first token after a prompt of each length; the time per further token, the
difference between generating 65 tokens and one, divided by 64, so that copying the state does not
count; and the memory that the prompt adds to the process at its peak, state included. Times are
medians of interleaved runs; memory is measured once. Needs an hour on 2 cores of an AMD EPYC. Linux
only. Writes a JSON record after each context; its contexts from the same machine and commit are not
repeated.
"""

import json
import sys
from dataclasses import dataclass
from functools import cache, partial
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
from heinsen_jax.generate import Engine, generate
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.runtime.environment import environment
from studies import load_study
from studies.linearization import MERGED

STUDY = "linearize_python"
MODELS = "log, Hedgehog", MERGED, "window of 16", "Gated DeltaNet", f"{MERGED}, 1 of 4 softmax"
ROWS = 1, 8
NEW = 64  # generated tokens that are measured


@dataclass(frozen=True)
class Options:
    """Serve linearized models and their teacher.

    Attributes:
      contexts: lengths of the prompts.
      longest: the longest context with more than one row, which needs more memory.
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    longest: int = 16_384
    output: Path = ROOT / "benchmarks/results/linearized_serving.json"
    repeats: int = 3


@cache
def configs() -> dict[str, LanguageModelConfig]:
    """The teacher and its linearizations."""
    study = load_study(STUDY)
    labels = {axis: next(iter(values)) for axis, values in study.axes.items()}
    teacher = load_config(ROOT / f"studies/grids/{STUDY}.py").model
    return {"teacher": teacher} | {
        name: study.run({**labels, "model": name}).config.model for name in MODELS
    }


class Served:
    """A model and a batch of prompts."""

    def __init__(self, config: LanguageModelConfig, context: int, rows: int) -> None:
        self.engine = Engine(LanguageModel(config, rngs=nnx.Rngs(0)))
        self.state_size = LanguageModel.abstract(config).state_size(context)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, context))
        self.tokens = jnp.asarray(tokens, jnp.int32)

    def read(self) -> Any:
        """The first new token, and the state after the prompt."""
        return generate(self.engine, self.tokens, 1, top_k=1, return_state=True)

    def generate(self, token: jax.Array, state: Any, count: int) -> jax.Array:
        """Tokens after the first one."""
        return generate(self.engine, token, count, top_k=1, state=state)


def measure(context: int, options: Options) -> list[dict[str, Any]]:
    """The rows of the record for a context."""
    measured = []
    for rows in ROWS if context <= options.longest else ROWS[:1]:
        served = {name: Served(config, context, rows) for name, config in configs().items()}
        read = {name: each.read() for name, each in served.items()}  # compiled
        memory = {name: added_memory(each.read) for name, each in served.items()}
        first = interleaved_medians({x: y.read for x, y in served.items()}, options.repeats, 0, 1)
        calls = {
            (name, count): partial(each.generate, *read[name], count)
            for (name, each), count in product(served.items(), (1, NEW + 1))
        }
        seconds = interleaved_medians(calls, options.repeats)
        measured += [
            {
                "context": context,
                "rows": rows,
                "model": name,
                "first_token_seconds": first[name],
                "seconds_per_token": (seconds[name, NEW + 1] - seconds[name, 1]) / NEW,
                "peak_bytes": memory[name],
                "state_bytes": rows * each.state_size,
            }
            for name, each in served.items()
        ]
    return measured


def main(options: Options) -> int:
    rows, here = [], environment()
    if options.output.exists():
        earlier = json.loads(options.output.read_text())
        is_same = all(earlier["environment"].get(x) == here[x] for x in here if x != "date")
        rows = earlier["rows"] if is_same else []
    for context in options.contexts:
        if context not in {row["context"] for row in rows}:
            rows += measure(context, options)
            record = {"environment": here, "repeats": options.repeats, "rows": rows}
            options.output.write_text(json.dumps(record, indent=2) + "\n")
    table = Table("context", "rows", "model", "first token s", "tokens/s", "peak MB", "state MB")
    for row in rows:
        speed = row["rows"] / row["seconds_per_token"]
        sizes = (f"{row[name] / 1e6:,.2f}" for name in ("peak_bytes", "state_bytes"))
        numbers = f"{row['first_token_seconds']:.2f}", f"{speed:,.0f}", *sizes
        table.add_row(f"{row['context']:,}", str(row["rows"]), row["model"], *numbers)
    Console().print(table)
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
