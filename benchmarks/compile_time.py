"""Compilation cost: CPU-seconds and bytes of StableHLO of every op's value and gradient.

    python benchmarks/compile_time.py [--repeats 3] [--output benchmarks/results/compile_time.json]

1024 tokens, batch 1, 8 heads, head dimension 32, float32. Lowering and compilation, each as a ratio
to causal `jax.nn.dot_product_attention` compiled immediately before in the same process; medians
over repeats, each of which runs all ops. Exits with 1 if a limit is exceeded.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from common import ROOT, write_record
from compile_cases import CASES, SOFTMAX_BASELINE, Case, lower
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Options:
    """Measure compilation.

    Attributes:
      repeats: number of compilations of each op.
      names: prefixes of the names of ops to compile; all by default.
      output: path of the JSON record; written only if all ops are compiled.
    """

    repeats: int = 3
    names: tuple[str, ...] = ("",)
    output: Path = ROOT / "benchmarks/results/compile_time.json"


def cpu_seconds(case: Case) -> tuple[float, int]:
    """Return CPU-seconds to lower and to compile, without caches, and bytes of StableHLO."""
    jax.clear_caches()
    start = time.process_time()
    lowered = lower(case)
    lowered.compile()
    return time.process_time() - start, len(lowered.as_text())


def measure(cases: dict[str, Case], repeats: int) -> dict[str, dict[str, Any]]:
    cpu_seconds(SOFTMAX_BASELINE)  # exclude one-time costs of the first compilation
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    bytes_of = {}
    for _ in range(repeats):
        for name, case in cases.items():
            baseline, _ = cpu_seconds(SOFTMAX_BASELINE)
            seconds, bytes_of[name] = cpu_seconds(case)
            pairs[name].append((seconds, baseline))
    return {
        name: result(case, bytes_of[name], *zip(*pairs[name], strict=True))
        for name, case in cases.items()
    }


def result(
    case: Case, size: int, seconds: tuple[float, ...], baseline: tuple[float, ...]
) -> dict[str, Any]:
    ratio = statistics.median(x / y for x, y in zip(seconds, baseline, strict=True))
    return {
        "cpu_seconds": statistics.median(seconds),
        "baseline_cpu_seconds": statistics.median(baseline),
        "ratio": ratio,
        "limit": case.limit,
        "bytes": size,
        "max_bytes": case.max_bytes,
        "met": ratio <= case.limit and (case.max_bytes is None or size <= case.max_bytes),
    }


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("op", "CPU-s", "ratio", "at most", "StableHLO bytes", "")
    for name, x in results.items():
        row = f"{x['cpu_seconds']:.2f}", f"{x['ratio']:.1f}", f"{x['limit']:.0f}", f"{x['bytes']:,}"
        table.add_row(name, *row, "" if x["met"] else "exceeded")
    console.print(table)


def main(options: Options) -> int:
    console = Console()
    cases = {name: case for name, case in CASES.items() if name.startswith(options.names)}
    results = measure(cases, options.repeats)
    show(results, console)
    if len(cases) == len(CASES):
        write_record(options.output, {"repeats": options.repeats, "ops": results})
    return 0 if all(x["met"] for x in results.values()) else 1


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main(tyro.cli(Options)))
