"""Time, memory and state size of all mechanisms by sequence length.

    python benchmarks/mechanisms.py [--names log softmax] [--lengths 256 1024] [--plot-only]

One layer of each name with its defaults, width 128, 4 heads, one sequence, float32:

- forward and backward passes: seconds, and memory besides the inputs, gradients included, as
allocated by the compiler;
- decoding: seconds per token after a context, in a compiled loop that updates a donated copy of the
state; and bytes of state or cache.

Runs of all mechanisms are interleaved at each length. Entries are missing from the record if a
mechanism does not support them, or if a call would need more than `longest` seconds at quadratic
cost. Needs about 15 minutes on 2 cores of an AMD EPYC. Writes a JSON record, and plots it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import tyro
from common import ROOT
from flax import nnx
from jax import lax
from PIL import Image

from heinsen_jax import attention
from heinsen_jax.runtime.environment import environment
from studies import sweeps
from studies.labels import GRAY, Line, label_at_right

MODEL_DIM, NUM_HEADS = 128, 4
DECODED = 64  # tokens per loop
CALLS = 3
PANELS = {
    "forward_backward_seconds": ("forward and backward", "seconds", "tokens"),
    "peak_bytes": ("memory of forward and backward", "bytes", "tokens"),
    "decode_seconds": ("decoding a token", "seconds", "tokens of context"),
    "state_bytes": ("state or cache", "bytes", "tokens of context"),
}
COLORS = {name: sweeps.COLORS[name] for name in ("log", "softmax", "linear")}
COLORS |= {"gla": "C6", "gated_deltanet": "C8", "mamba2": "C9"}
"""Colors of highlighted mechanisms; the others are gray."""
Measured = dict[str, dict[int, float]]
Preparation = Callable[[], Callable[[], Any]]
"""Function that prepares a call and returns it."""


@dataclass(frozen=True)
class Options:
    """Compare mechanisms.

    Attributes:
      names: names of mechanisms; all by default.
      lengths: lengths of sequences and contexts.
      longest: maximum seconds per call; longer sequences are skipped.
      plot_only: whether to only plot the existing record.
      output: path of the JSON record; the plot is written next to it.
    """

    names: tuple[str, ...] = attention.names()
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    longest: float = 8.0
    plot_only: bool = False
    output: Path = ROOT / "benchmarks/results/mechanisms.json"


def build(name: str, length: int) -> attention.Attention:
    options: dict[str, Any] = {"max_length": length} if name == "linformer" else {}
    rngs = nnx.Rngs(0)
    return attention.build(name, model_dim=MODEL_DIM, num_heads=NUM_HEADS, rngs=rngs, **options)


def forward_backward(name: str, length: int) -> tuple[Preparation, int]:
    """Return the preparation of a call, and the bytes that it needs."""
    graph, parameters = nnx.split(build(name, length))
    x, cotangent = jax.random.normal(jax.random.key(0), (2, 1, length, MODEL_DIM))

    @jax.jit
    def step(parameters: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x)
        return y, pullback(cotangent)

    compiled = step.lower(parameters, x, cotangent).compile()
    memory: Any = compiled.memory_analysis()
    size = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return lambda: partial(compiled, parameters, x, cotangent), size


def decode(name: str, length: int) -> Preparation:
    """Return the preparation of a call that decodes several tokens after a context of `length`,
    which is processed here."""
    layer = build(name, length)
    graph, parameters = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (1, length + DECODED, MODEL_DIM))

    @jax.jit
    def read(parameters: Any, x: jax.Array, state: Any) -> Any:
        return nnx.merge(graph, parameters)(x, state=state, return_state=True)[1]

    @partial(jax.jit, donate_argnums=2)
    def write(parameters: Any, tokens: jax.Array, state: Any) -> tuple[Any, jax.Array]:
        def step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            y, state = nnx.merge(graph, parameters)(token, state=state, return_state=True)
            return state, y

        return lax.scan(step, state, tokens)

    state = read(parameters, x[:, :length], layer.init_state((1,), capacity=x.shape[1]))
    tokens = jnp.moveaxis(x[:, length:, None], 1, 0)

    def prepare() -> Callable[[], Any]:
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        return partial(write, parameters, tokens, copy)

    return prepare


def seconds_of(prepare: Preparation) -> float:
    call = prepare()
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interleaved(calls: dict[str, Preparation]) -> dict[str, float]:
    """Return median seconds; slow functions are called only twice, after a warm-up."""
    is_slow = {name: seconds_of(call) >= 2 for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(CALLS):
        for name, call in calls.items():
            if not is_slow[name]:
                seconds_of(call)  # warm up: the others have occupied the caches
            if not is_slow[name] or number < 2:
                times[name].append(seconds_of(call))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def measure(options: Options) -> Iterator[dict[str, Measured]]:
    """Write the record after each length."""
    record: dict[str, Measured] = {name: {panel: {} for panel in PANELS} for name in options.names}

    def feasible(panel: str, length: int) -> list[str]:
        """Return the names whose last call was short enough."""
        names = []
        for name in options.names:
            shorter, seconds = max(record[name][panel].items(), default=(length, 0.0))
            if seconds * (length / shorter) ** 2 < options.longest:
                names.append(name)
        return names

    for length in options.lengths:
        calls = {}
        for name in feasible("forward_backward_seconds", length):
            calls[name], record[name]["peak_bytes"][length] = forward_backward(name, length)
        for name, seconds in interleaved(calls).items():
            record[name]["forward_backward_seconds"][length] = seconds
        jax.clear_caches()

        calls = {}
        for name in feasible("decode_seconds", length):
            if build(name, length).capabilities.streaming:
                calls[name] = decode(name, length)
                seconds_of(calls[name])  # compiled
                record[name]["state_bytes"][length] = build(name, length).state_size(length)
        for name, seconds in interleaved(calls).items():
            record[name]["decode_seconds"][length] = seconds / DECODED
        jax.clear_caches()
        print(f"{length} tokens: done", flush=True)
        yield record


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot the measurements, with the name of each mechanism at the end of its line."""
    figure = matplotlib.figure.Figure(figsize=(6.5, 21), layout="constrained")
    made_on = record["environment"]
    figure.suptitle(
        f"One layer, width {MODEL_DIM}, {NUM_HEADS} heads, float32; {made_on['cpu']}, "
        f"{made_on['cpu_cores']} cores, JAX {made_on['jax']}"
    )
    for axes, (panel, (title, unit, across)) in zip(
        figure.subplots(4), PANELS.items(), strict=True
    ):
        lines = []
        for name, measured in record["mechanisms"].items():
            if points := measured[panel]:
                color = COLORS.get(name, GRAY)
                x, y = [int(length) for length in points], list(points.values())
                is_gray = color == GRAY
                axes.loglog(
                    x, y, color=color, linewidth=1 if is_gray else 2, zorder=2 if is_gray else 3
                )
                lines.append(Line(name, x, y, color))
        axes.set(title=title, xlabel=across, ylabel=unit)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        label_at_right(axes, lines)
    figure.savefig(path, dpi=110)
    image = Image.open(path).convert("RGB").quantize(128, kmeans=1)
    image.save(path, optimize=True)  # a third of the size


def main(options: Options) -> int:
    setting = {"batch": 1, "model_dim": MODEL_DIM, "heads": NUM_HEADS, "dtype": "float32"}
    record: dict[str, Any] = {
        "environment": environment(),
        "setting": setting | {"longest_seconds": options.longest},
    }
    for measured in () if options.plot_only else measure(options):
        record["mechanisms"] = measured
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    picture = options.output.with_suffix(".png")
    draw(json.loads(options.output.read_text()), picture)
    print(f"written to {options.output} and {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
