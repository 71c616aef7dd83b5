"""Speed and memory of log-attention; results are checked before anything is timed.

    python benchmarks/log_attention.py [--output benchmarks/results/log_attention_cpu.json]

Forward and backward, float32, one sequence, 8 heads of dimension 32. Needs about 2 minutes on 2
cores of an AMD EPYC. Writes a JSON record.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import (
    DEPTH,
    HEADS,
    ROOT,
    SETTING,
    added_memory,
    interleaved_medians,
    random_tokens,
)
from jax import lax
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops import (
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from heinsen_jax.runtime.environment import environment

Implementation = Literal["reference", "scan", "chunked"]

COMPARED_LENGTH = 1024
LENGTHS = [1024 * 2**i for i in range(7)]
MEMORY_LENGTH = 16_384
CONTEXTS = (1_000, 1_000_000)
DECODED = 200  # tokens per compiled loop
OPS: dict[str, tuple[Any, Any]] = {
    "log_attention": (log_attention, LogAttentionState),
    "heinsen_attention": (heinsen_attention, HeinsenAttentionState),
}
MEASURE_MEMORY = "--measure-memory"

REQUIREMENTS = {
    "speed": "chunked at least 40 times as fast as scan",
    "memory": "chunked in less than a tenth of the memory of scan",
    "decoding": "a token after 1,000,000 within 10% of a token after 1,000",
}


@dataclass(frozen=True)
class Options:
    """Measure log-attention.

    Attributes:
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/log_attention_cpu.json"
    repeats: int = 15


@partial(jax.jit, static_argnames="implementation")
def forward_backward(query, key, log_value, cotangent, implementation: Implementation):
    attention = partial(log_attention, implementation=implementation)
    log_y, pullback = jax.vjp(attention, query, key, log_value)
    return log_y, pullback(cotangent)


def worst_errors(length: int = 300) -> dict[str, float]:
    """Return the largest error, relative to the largest entry of each array, against float64."""
    arrays = random_tokens(length)
    with jax.enable_x64(True):
        in_float64 = [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]
        expected = jax.tree.map(np.asarray, forward_backward(*in_float64, "reference"))

    def error(have: Any, want: Any) -> float:
        return float(np.max(np.abs(np.asarray(have) - want)) / np.max(np.abs(want)))

    return {
        name: max(
            map(
                error,
                jax.tree.leaves(forward_backward(*arrays, name)),
                jax.tree.leaves(expected),
            )
        )
        for name in ("scan", "chunked")
    }


def compare_speed(repeats: int) -> dict[str, float]:
    arrays = random_tokens(COMPARED_LENGTH)
    return interleaved_medians(
        {n: partial(forward_backward, *arrays, n) for n in ("scan", "chunked")}, repeats
    )


def time_per_length(repeats: int) -> dict[int, float]:
    seconds = {}
    for length in LENGTHS:
        run = partial(forward_backward, *random_tokens(length), "chunked")
        seconds[length] = interleaved_medians({"run": run}, max(2, repeats // 5))["run"]
    return seconds


def peak_memory(implementation: Implementation) -> dict[str, int]:
    """Return the bytes that one call adds to this process, and those that XLA allocates for it."""
    arrays = random_tokens(MEMORY_LENGTH)
    compiled = forward_backward.lower(*arrays, implementation).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    peak = added_memory(lambda: compiled(*arrays))
    return {"peak": peak, "compiled_temporary": analysis.temp_size_in_bytes}


def peak_memory_apart(implementation: str) -> dict[str, int]:
    """Run `peak_memory` in a separate process, whose peak nothing else has raised."""
    command = [sys.executable, __file__, MEASURE_MEMORY, implementation]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(name: str, tokens, state):
    """Process tokens one at a time in a compiled loop, as layers are measured in
    `mechanisms.py`."""

    def step(state, token):
        y, state = OPS[name][0](*token, initial_state=state, return_state=True)
        return state, y

    return lax.scan(step, state, tokens)


@partial(jax.jit, static_argnums=0)
def absorb(name: str, key, value, state):
    return OPS[name][0](key, key, value, initial_state=state, return_state=True)[1]


def state_after(name: str, context: int, chunk: int = 1000) -> Any:
    state = OPS[name][1].empty((1,), HEADS, DEPTH, DEPTH)
    for index in range(context // chunk):
        _, key, value, _ = random_tokens(chunk, seed=index % 10)
        state = absorb(name, key, value, state)
    return jax.block_until_ready(state)


def time_decoding(repeats: int) -> dict[str, dict[int, float]]:
    """Return the median seconds of one token of each op after a short and after a long context,
    interleaved."""
    arrays = random_tokens(DECODED)[:3]
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, None], 1, 0), arrays)
    states = {pair: state_after(*pair) for pair in product(OPS, CONTEXTS)}
    seconds: dict[tuple[str, int], list[float]] = {pair: [] for pair in states}
    for turn, pair in product(range(repeats + 1), states):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, states[pair]))
        start = time.perf_counter()
        jax.block_until_ready(decode(pair[0], tokens, copy))
        if turn:
            seconds[pair].append((time.perf_counter() - start) / DECODED)
    return {name: {x: statistics.median(seconds[name, x]) for x in CONTEXTS} for name in OPS}


def show(record: dict[str, Any], console: Console) -> None:
    table = Table("what", "measured", "required", "met", title="Log-attention")
    speed, memory = record["speed_seconds"], record["memory_bytes"]
    decoding = record["decoding_seconds"]["log_attention"]
    measured = {
        "speed": f"{1e3 * speed['scan']:.1f} / {1e3 * speed['chunked']:.2f} ms "
        f"= {record['ratios']['speed']:.1f}",
        "memory": f"{memory['chunked']['peak'] / 1e6:.0f} / {memory['scan']['peak'] / 1e6:.0f} MB "
        f"= {record['ratios']['memory']:.3f}",
        "decoding": " / ".join(f"{1e6 * s:.1f}" for s in reversed(decoding.values()))
        + f" µs = {record['ratios']['decoding']:.3f}",
    }
    for name, text in REQUIREMENTS.items():
        met = "[green]yes" if record["requirements"][name] else "[red]no"
        table.add_row(name, measured[name], text, met)
    for length, seconds in record["seconds_per_length"].items():
        table.add_row(f"{length:,} tokens", f"{1e6 * seconds / length:.2f} µs per token", "", "")
    console.print(table)


def main(options: Options) -> int:
    console = Console()
    errors = worst_errors()
    if not max(errors.values()) < 5e-6:  # also when NaN
        console.print(f"[red]results are wrong, so nothing is timed: relative errors {errors}")
        return 1

    record: dict[str, Any] = {
        "environment": environment() | {"load_before": os.getloadavg()[0]},
        "setting": SETTING,
        "relative_errors": errors,
        "speed_seconds": compare_speed(options.repeats),
        "seconds_per_length": time_per_length(options.repeats),
        "memory_bytes": {name: peak_memory_apart(name) for name in ("scan", "chunked")},
        "decoding_seconds": time_decoding(options.repeats),
    }
    speed, memory = record["speed_seconds"], record["memory_bytes"]
    short, long = record["decoding_seconds"]["log_attention"].values()
    ratios = {
        "speed": speed["scan"] / speed["chunked"],
        "memory": max(memory["chunked"][k] / memory["scan"][k] for k in memory["scan"]),
        "decoding": long / short,
    }
    record["ratios"] = ratios
    record["requirements"] = {
        "speed": ratios["speed"] >= 40,
        "memory": ratios["memory"] < 0.1,
        "decoding": ratios["decoding"] <= 1.1,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    show(record, console)
    console.print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE_MEMORY]:
        print(json.dumps(peak_memory(cast(Implementation, sys.argv[2]))))
    else:
        sys.exit(main(tyro.cli(Options)))
