"""Decoding speed by context length: constant state against key/value cache.

    python benchmarks/gpu_decoding.py [--output benchmarks/results/gpu_decoding.json]

The same model, with random weights, with log-attention and with softmax attention. Log-attention
processes the context once, in chunks, and every row of a batch starts from that state. Softmax
attention starts from a key/value cache of zeros, since its time does not depend on the contents;
caches that do not fit in memory are skipped, as noted in the record. `--tokens` greedy tokens are
generated in one compiled loop. Needs a large GPU; other devices need a smaller `--config`. Writes a
JSON record and a plot next to it.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from common import ROOT, interleaved_medians
from flax import nnx
from rich.console import Console
from rich.table import Table

from heinsen_jax.attention.cache import is_cache
from heinsen_jax.config import load_config
from heinsen_jax.generate import Engine
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.generate.tokens import Carry, further_tokens
from heinsen_jax.models import LanguageModel, LanguageModelConfig, LanguageModelState
from heinsen_jax.runtime.environment import environment

CHUNK = 4096  # tokens of context per call
STATE_MEMORY = 0.8  # fraction of memory that states may use


@dataclass(frozen=True)
class Options:
    """Measure generation.

    Attributes:
      config: configuration of a model with log-attention.
      output: path of the JSON record; the plot is written next to it.
      batches: batch sizes.
      contexts: numbers of tokens before the generated ones.
      tokens: number of generated tokens per measurement.
      memory: bytes that states may use; 80% of the device's memory when None.
      repeats: number of measurements of which the median is reported.
    """

    config: Path = ROOT / "configs/heinsen_125m_pile.py"
    output: Path = ROOT / "benchmarks/results/gpu_decoding.json"
    batches: tuple[int, ...] = (1, 16, 256)
    contexts: tuple[int, ...] = (1024, 32_768, 1_048_576)
    tokens: int = 64
    memory: float | None = None
    repeats: int = 5

    @property
    def memory_limit(self) -> float:
        if self.memory is not None:
            return self.memory
        stats = jax.devices()[0].memory_stats() or {}
        return STATE_MEMORY * stats.get("bytes_limit", 8e9)


class Decoder:
    """A model with random weights that continues sequences."""

    def __init__(self, config: LanguageModelConfig) -> None:
        self.engine = Engine(LanguageModel(config, rngs=nnx.Rngs(0)))
        self.sampler = Sampler.of(config, 1.0, 1, None, None)

    def after(self, context: int) -> LanguageModelState:
        """Return the state after this number of tokens."""
        state, size = self.engine.init_state(), self.engine.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, size, CHUNK, np.int32)
        for start in range(0, context, CHUNK):
            _, state = self.engine.feed(tokens[: context - start], state)
        return state

    def filled(self, context: int, batch: int, tokens: int) -> LanguageModelState:
        """Return a state of zeros as after this number of tokens, with capacity for more."""
        return at(self.engine.init_state((batch,), capacity=context + tokens), context)

    def decode(self, carry: Carry, count: int) -> Carry:
        """Generate further tokens."""
        options = self.engine.structure, count, self.engine.weights, self.sampler
        return further_tokens(*options, carry, 1, count)[0]


def at(state: LanguageModelState, context: int) -> LanguageModelState:
    """Set the length of caches; leave other states unchanged."""

    def fill(node: Any) -> Any:
        if not is_cache(node):
            return node
        cache: Any = node
        return replace(cache, length=jnp.full_like(cache.length, context))

    return jax.tree.map(fill, state, is_leaf=is_cache)


def measure(
    decoder: Decoder, is_constant: bool, context: int, batch: int, options: Options
) -> float:
    """Return seconds per token of the batch."""
    if is_constant:
        state = decoder.engine.branch(decoder.after(context), batch)
    else:
        state = decoder.filled(context, batch, options.tokens)
    carry = jnp.zeros((batch,), jnp.int32), state

    def call() -> Any:
        nonlocal carry
        token, state = carry
        carry = decoder.decode((token, at(state, context)), options.tokens)
        return carry[0]

    return interleaved_medians({"": call}, options.repeats, seconds=0.1)[""] / options.tokens


def models(options: Options) -> dict[str, LanguageModelConfig]:
    base = load_config(options.config).model
    base = replace(base, remat=False)
    return {"log": base, "softmax": replace(base, attention="softmax")}


def main(options: Options) -> int:
    console = Console()
    record: dict[str, Any] = {
        "environment": environment(),
        "config": options.config.stem,
        "tokens": options.tokens,
        "memory": options.memory_limit,
        "rows": [],
    }
    table = Table("model", "batch", "context", "ms a token", "tokens/s", "bytes of a state")
    for name, config in models(options).items():
        decoder = Decoder(config)
        is_constant = {*config.layer_pattern} == {"log"}
        for context in options.contexts:
            size = LanguageModel.abstract(config).state_size(context)
            for batch in options.batches:
                row: dict[str, Any] = {"model": name, "batch": batch, "context": context}
                row |= {"bytes": size}
                if batch * size > options.memory_limit:
                    row["refused"] = f"{batch * size / 1e9:.0f} GB of states"
                else:
                    try:
                        row["seconds"] = measure(decoder, is_constant, context, batch, options)
                    except jax.errors.JaxRuntimeError as error:
                        if "RESOURCE_EXHAUSTED" not in str(error):
                            raise
                        row["refused"] = "out of memory"
                record["rows"].append(row)
                options.output.write_text(json.dumps(record, indent=1) + "\n")
                cells = [row.get("refused", "")[:40], ""]
                if "seconds" in row:
                    cells = [f"{1e3 * row['seconds']:.3f}", f"{batch / row['seconds']:,.0f}"]
                table.add_row(name, str(batch), f"{context:,}", *cells, f"{size:,}")
    plot(record, options.output.with_suffix(".png"))
    console.print(table)
    console.print(f"written to {options.output}")
    return 0


def plot(record: dict[str, Any], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    timed = [row for row in record["rows"] if "seconds" in row]
    for name, batch in sorted({(row["model"], row["batch"]) for row in timed}):
        rows = [row for row in timed if (row["model"], row["batch"]) == (name, batch)]
        rates = [batch / row["seconds"] for row in rows]
        style = "o--" if name == "softmax" else "o-"
        axes.plot([row["context"] for row in rows], rates, style, label=f"{name}, batch {batch}")
    axes.set(xscale="log", yscale="log", xlabel="tokens before", ylabel="tokens a second")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
