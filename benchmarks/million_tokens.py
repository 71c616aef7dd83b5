"""Streaming of a million tokens through a trained model: time, memory and precision.

    python train.py --config configs/shakespeare_char_cpu.py
    python benchmarks/million_tokens.py --workdir runs/shakespeare_char_cpu --text TEXT

One stream, 1000 tokens per call, in float32 and, with the same weights, in float64. Reports for
every 10,000 tokens: the largest difference of log-probabilities between the two, the time per token
(float32), the time of a single token, and the memory of the process. Needs about 2 minutes on 2
cores of an AMD EPYC. Writes a JSON record and a plot next to it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from common import ROOT, resident_memory, write_record
from flax import nnx

from heinsen_jax.errors import UserError, command_line
from heinsen_jax.models import LanguageModel
from heinsen_jax.runs.load import load_text_run

CHUNK = 1000
REPORTED = 10_000
SINGLE_TOKENS = 50  # timed individually for each report


@dataclass(frozen=True)
class Options:
    """Stream a long text through a trained model.

    Attributes:
      workdir: folder of its run.
      text: text file with at least `tokens` tokens.
      tokens: number of tokens.
      output: path of the JSON record; the plot is written next to it.
    """

    workdir: Path
    text: Path
    tokens: int = 1_000_000
    output: Path = ROOT / "benchmarks/results/million_tokens.json"


class Stream:
    """Model and state in one precision."""

    def __init__(self, model: LanguageModel, dtype: str) -> None:
        self.double = dtype == "float64"
        _, parameters = nnx.split(model)
        config = replace(model.config, dtype=dtype, param_dtype=dtype)
        with jax.enable_x64(self.double):
            abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
            graph, _ = nnx.split(abstract)
            self.parameters = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), dtype), parameters)
            self.state = nnx.merge(graph, self.parameters).init_state(())
            self.step = jax.jit(self._step(graph))

    @staticmethod
    def _step(graph: Any) -> Callable:
        def step(parameters, state, tokens):
            """Return log p of all tokens but the first, and the state after all but the last."""
            model = nnx.merge(graph, parameters)
            logits, state = model(tokens[:-1], state=state, return_state=True)
            log_p = jax.nn.log_softmax(logits)
            return jnp.take_along_axis(log_p, tokens[1:, None], -1)[:, 0], state

        return step

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Return log p of `tokens[1:]` and advance the state by `tokens[:-1]`."""
        with jax.enable_x64(self.double):
            log_p, self.state = self.step(self.parameters, self.state, jnp.asarray(tokens))
            return np.asarray(jax.block_until_ready(log_p))

    def seconds_of_one(self, tokens: np.ndarray) -> float:
        """Return the median seconds of a single token; the state is unchanged."""
        seconds = []
        for index in range(len(tokens) - 1):
            start = time.perf_counter()
            jax.block_until_ready(
                self.step(self.parameters, self.state, jnp.asarray(tokens[index : index + 2]))
            )
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def measure(single: Stream, double: Stream, tokens: np.ndarray) -> list[dict[str, float]]:
    rows = []
    single.step(single.parameters, single.state, jnp.asarray(tokens[: CHUNK + 1]))  # compiled
    single.seconds_of_one(tokens[:3])
    for begin in range(0, len(tokens) - 1, REPORTED):
        seconds, differences, losses = [], [], []
        for start in range(begin, begin + REPORTED, CHUNK):
            chunk = tokens[start : start + CHUNK + 1]
            before = time.perf_counter()
            log_p = single.read(chunk)
            seconds.append(time.perf_counter() - before)
            differences.append(np.max(np.abs(log_p - double.read(chunk))))
            losses.append(-np.mean(log_p))
        rows.append(
            {
                "tokens": begin + REPORTED,
                "largest_difference": float(max(differences)),
                "loss": float(np.mean(losses)),
                "seconds_per_token": statistics.median(seconds) / CHUNK,
                "seconds_of_one": single.seconds_of_one(tokens[begin:][: SINGLE_TOKENS + 1]),
                "resident_bytes": resident_memory("VmRSS"),
            }
        )
    return rows


def plot(rows: list[dict[str, float]], file: Path) -> None:
    figure, (drift, speed, memory) = plt.subplots(3, figsize=(6, 8), layout="constrained")
    tokens = [row["tokens"] for row in rows]
    drift.plot(tokens, [row["largest_difference"] for row in rows])
    drift.set(title="float32 against float64", ylabel="largest difference of log p", yscale="log")
    drift.set_ylim(1e-7, 1e-1)
    labels = {"seconds_per_token": "1000 per call", "seconds_of_one": "single token"}
    for name, label in labels.items():
        speed.plot(tokens, [1e6 * row[name] for row in rows], label=label)
    speed.set(title="Time", ylabel="microseconds per token", yscale="log")
    speed.legend()
    megabytes = [row["resident_bytes"] / 1e6 for row in rows]
    memory.plot(tokens, megabytes)
    memory.set(title="Memory of the process", ylabel="MB", ylim=(0, 1.2 * max(megabytes)))
    for axes in (drift, speed, memory):
        axes.set_xlabel("tokens")
    figure.savefig(file, dpi=150)


def late_over_early(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the ratio of each quantity in the last fifth of the stream to the second fifth."""
    fifth = len(rows) // 5
    names = [name for name in rows[0] if name != "tokens"]

    def middle(part: list[dict[str, float]], name: str) -> float:
        return statistics.median(row[name] for row in part)

    return {
        name: middle(rows[-fifth:], name) / middle(rows[fifth : 2 * fifth], name) for name in names
    }


@command_line
def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    model, tokenizer, step = load_text_run(options.workdir)
    ids = tokenizer.encode(options.text.read_text())
    if len(ids) <= options.tokens or options.tokens % REPORTED:
        raise UserError(
            f"--tokens {options.tokens} must be a multiple of {REPORTED} and fewer than the "
            f"{len(ids)} of {options.text}"
        )
    tokens = np.asarray(ids[: options.tokens + 1], np.int32)
    rows = measure(Stream(model, "float32"), Stream(model, "float64"), tokens)
    record = {
        "model": {"run": options.workdir.name, "step": step},
        "text": options.text.name,
        "late_over_early": late_over_early(rows),
        "rows": rows,
    }
    write_record(options.output, record)
    plot(rows, options.output.with_suffix(".png"))
    print(json.dumps(record["late_over_early"], indent=2))


if __name__ == "__main__":
    sys.exit(main())
