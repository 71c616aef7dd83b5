"""Compare log-attention on a GPU with its roofline and with other attention kernels.

    python benchmarks/gpu_attention.py [--output benchmarks/results/gpu_attention.json]

Log-attention is first checked against the definition on short sequences, and everything compiled,
several functions at a time. Besides plain calls, `--calls` names calls with segments or decay, and
`heinsen_attention`, for which nothing else is measured. Then the GPU's bandwidth and bfloat16
operations per second are measured, and the forward pass, and forward and backward passes, of the
chunked form and of the experimental kernels (`implementation="gpu"`), over lengths, head dimensions
and dtypes, compared with

- cudnn: softmax attention, `jax.nn.dot_product_attention(implementation="cudnn")`, in bfloat16;
- if PyTorch is installed, its softmax attention, and the published form of log-attention;
- if flash-linear-attention is installed, its chunked kernel on exponentiated queries and keys.

The roofline is the time to move Q, K, log V and Y once at the measured bandwidth; for forward and
backward, these and their four gradients. XLA_PYTHON_CLIENT_PREALLOCATE=false leaves memory to
PyTorch. Writes a JSON record and a plot next to it.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from common import ROOT
from gpu_ways import HEADS_OF_DEPTH, Shape, Way, in_jax, ours, ways
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops.log_attention.mosaic import parts
from heinsen_jax.runtime.environment import environment

LENGTHS_OF_TOKENS = {
    16_384: (512, 2048, 16_384),
    65_536: (512, 1024, 4096, 16_384, 65_536),
}
DTYPES = ("bfloat16", "float32")
TOLERANCE = {"bfloat16": 3e-2, "float32": 2e-5}  # relative error in norm against float64
CHECKED_LENGTHS = (300, 1100)  # the longer sequences are split
LONGEST_OF_ORIGINAL = 4096  # it stores one state per token
OURS = ("chunked", "gpu")
PLOTTED = "bfloat16", "plain"
COMPILED_AT_A_TIME = 12
CALLS = 20  # calls per synchronization, which needs more time than a kernel; fewer if it is slow
LONGEST_REPEAT = 0.2  # seconds of all calls of a synchronization


@dataclass(frozen=True)
class Options:
    """Measure log-attention on a GPU.

    Attributes:
      output: path of the JSON record; the plot is written next to it.
      repeats: number of measurements of which the median is reported.
      depths: head dimensions.
      dtypes: dtypes of all arrays.
      tokens: numbers of tokens in a batch.
      lengths: numbers of tokens in a sequence, if not more than in the batch; `LENGTHS_OF_TOKENS`
        when None.
      calls: kinds of calls.
      programs: number of programs up to which sequences are split; the default when None.
    """

    output: Path = ROOT / "benchmarks/results/gpu_attention.json"
    repeats: int = 5
    depths: tuple[int, ...] = tuple(HEADS_OF_DEPTH)
    dtypes: tuple[str, ...] = DTYPES
    tokens: tuple[int, ...] = tuple(LENGTHS_OF_TOKENS)
    lengths: tuple[int, ...] | None = None
    calls: tuple[str, ...] = ("plain",)
    programs: int | None = None

    def shapes(self) -> Iterator[Shape]:
        for call, tokens in itertools.product(self.calls, self.tokens):
            lengths = self.lengths or LENGTHS_OF_TOKENS.get(tokens, ())
            for depth, dtype, length in itertools.product(self.depths, self.dtypes, lengths):
                if length <= tokens:
                    yield Shape(tokens, length, depth, dtype, call)


def to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array):
        return np.asarray(x, np.float64)
    return x.detach().double().cpu().numpy()


def is_refusal(name: str, error: Exception) -> bool:
    """Whether an implementation does not support a call, or lacks memory. Exceptions differ by
    library; ours are NotImplementedError."""
    return name not in OURS or isinstance(error, NotImplementedError)


def worst_error(name: str, way: Way, shapes: Sequence[Shape]) -> float | None:
    """Return the largest relative error in norm of output and gradients, against the definition in
    float64 on a CPU; None if the implementation refuses all shapes."""
    errors = []
    for shape in shapes:
        try:
            errors.append(error_of(way, shape))
        except Exception as error:
            if not is_refusal(name, error):
                raise
    return max(errors, default=None)


def error_of(way: Way, shape: Shape) -> float:
    """`worst_error` of one shape."""
    arrays, keywords = way.arrays(shape), {} if shape.call == "plain" else {"call": shape.call}
    have = [to_numpy(x) for x in way.both(*arrays, **keywords)]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(to_numpy(x)) for x in arrays]
        definition = in_jax(partial(ours, "reference"))
        want = [np.asarray(x) for x in definition.both(*wide, call=shape.call)]
    pairs = zip(have, want, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def seconds_of(call: Callable, wait: Callable, repeats: int) -> float:
    """Return the median time of several calls with one synchronization at the end."""
    wait(call())
    began = time.perf_counter()
    wait(call())
    calls = max(1, min(CALLS, int(LONGEST_REPEAT / (time.perf_counter() - began))))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = None
        for _ in range(calls):
            result = call()
        wait(result)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def measure_card() -> dict[str, float]:
    """Return bytes copied per second, read and written, and operations per second."""
    x = jnp.ones((1 << 29,), jnp.float32)
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    copying = seconds_of(partial(jax.jit(lambda x: x + 1), x), jax.block_until_ready, 5)
    product = seconds_of(partial(jax.jit(jnp.matmul), a, a), jax.block_until_ready, 5)
    return {"bytes_a_second": 2 * x.nbytes / copying, "operations_a_second": 2 * 8192**3 / product}


CompiledFunctions: TypeAlias = dict[tuple[str, Shape], dict[str, Future[Callable]]]
"""By way and shape, the two functions."""


def compiled(function: Any, shape: Shape) -> Callable:
    """Return a function of JAX compiled for a shape; one of PyTorch unchanged."""
    if not hasattr(function, "lower"):
        return function
    arrays = 4 * [jax.ShapeDtypeStruct(shape.sizes, shape.dtype)]
    return function.lower(*arrays, call=shape.call).compile()


def compile_all(ways: dict[str, Way], options: Options) -> CompiledFunctions:
    with ThreadPoolExecutor(COMPILED_AT_A_TIME) as pool:
        return {
            (name, shape): {
                "forward": pool.submit(compiled, way.forward, shape),
                "both": pool.submit(compiled, way.both, shape),
            }
            for shape in options.shapes()
            for name, way in ways.items()
            if name in OURS or shape.call == "plain"
        }


def measure(
    ways: dict[str, Way], functions: CompiledFunctions, shape: Shape, repeats: int, roof: float
) -> dict[str, Any]:
    """Return seconds and fraction of the roofline for each implementation, or the reason why it is
    skipped."""
    results = {}
    for name, way in ways.items():
        if name not in OURS and shape.call != "plain":
            continue
        if name == "torch original" and shape.length > LONGEST_OF_ORIGINAL:
            results[name] = {"refused": f"more than {LONGEST_OF_ORIGINAL} tokens"}
            continue
        try:
            arrays = way.arrays(shape)
            seconds = {
                kind: seconds_of(partial(function.result(), *arrays), way.wait, repeats)
                for kind, function in functions[name, shape].items()
            }
        except Exception as error:
            if not is_refusal(name, error):
                raise
            results[name] = {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        moved = {"forward": 4 * shape.bytes, "both": 8 * shape.bytes}
        fractions = {kind: moved[kind] / roof / seconds[kind] for kind in seconds}
        results[name] = {"seconds": seconds, "of_roof": fractions}
    return results


def plot(record: dict[str, Any], file: Path) -> None:
    rows = [row for row in record["shapes"] if (row["dtype"], row["call"]) == PLOTTED]
    if not rows:
        return
    rows = [row for row in rows if row["tokens"] == max(row["tokens"] for row in rows)]
    depths = sorted({row["depth"] for row in rows})
    figure, panels = plt.subplots(
        2, len(depths), figsize=(4 * len(depths), 6), layout="constrained", squeeze=False
    )
    for column, depth in enumerate(depths):
        depth_rows = [row for row in rows if row["depth"] == depth]
        for name in record["ways"]:
            valid = [row for row in depth_rows if "seconds" in row["results"].get(name, {})]
            lengths = [row["length"] for row in valid]
            results = [row["results"][name] for row in valid]
            panels[0, column].plot(
                lengths, [1e3 * x["seconds"]["both"] for x in results], "o-", label=name
            )
            panels[1, column].plot(lengths, [x["of_roof"]["both"] for x in results], "o-")
        panels[0, column].set(xscale="log", yscale="log", title=f"depth {depth}")
        panels[1, column].set(xscale="log", xlabel="tokens in a sequence", ylim=(0, 1))
    panels[0, 0].set(ylabel="forward and backward, ms")
    panels[1, 0].set(ylabel="fraction of the roof")
    panels[0, 0].legend(fontsize="small")
    figure.savefig(file, dpi=130)


def main(options: Options) -> int:
    console = Console()
    if jax.default_backend() != "gpu":
        console.print(f"[red]this needs a GPU; JAX has {jax.devices()}")
        return 2
    if not any(options.shapes()):
        console.print("[red]--tokens, --lengths: nothing to measure; give lengths up to --tokens")
        return 2
    compared = ways(console)
    if options.programs is not None:
        parts.PROGRAMS = options.programs
    with ThreadPoolExecutor(COMPILED_AT_A_TIME) as pool:
        checks = {
            (dtype, name): pool.submit(
                worst_error,
                name,
                way,
                [
                    Shape(2 * length, length, depth, dtype, call)
                    for depth, length in itertools.product(options.depths, CHECKED_LENGTHS)
                    for call in (options.calls if name in OURS else ("plain",))
                ],
            )
            for dtype in options.dtypes
            for name, way in compared.items()
            if way.is_same_function
        }
    errors: dict[str, dict[str, float | None]] = {dtype: {} for dtype in options.dtypes}
    for (dtype, name), error in checks.items():
        errors[dtype][name] = error.result()
    console.print(errors)
    wrong = [
        f"{name}, {dtype}: {error:.1e}"
        for dtype, by_way in errors.items()
        for name, error in by_way.items()
        if name in OURS and error is not None and not error < TOLERANCE[dtype]
    ]
    if wrong:
        console.print(f"[red]results are wrong, so nothing is timed: {'; '.join(wrong)}")
        return 1

    functions = compile_all(compared, options)
    card = measure_card()
    record: dict[str, Any] = {
        "environment": environment(),
        "card": card,
        "repeats": options.repeats,
        "programs": parts.PROGRAMS,
        "relative_errors": errors,
        "ways": list(compared),
        "shapes": [],
    }
    table = Table(
        "tokens", "length", "depth", "type", "call", "way", "forward ms", "of roof", "both", "of"
    )
    for shape in options.shapes():
        results = measure(compared, functions, shape, options.repeats, card["bytes_a_second"])
        record["shapes"].append(shape._asdict() | {"results": results})
        for name, result in results.items():
            cells = [result.get("refused", "")[:40], "", "", ""]
            if "seconds" in result:
                cells = [
                    text
                    for kind in ("forward", "both")
                    for text in (
                        f"{1e3 * result['seconds'][kind]:.3f}",
                        f"{result['of_roof'][kind]:.2f}",
                    )
                ]
            table.add_row(*map(str, shape), name, *cells)
        options.output.write_text(json.dumps(record, indent=1) + "\n")  # also if interrupted
    plot(record, options.output.with_suffix(".png"))
    console.print(table)
    console.print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
