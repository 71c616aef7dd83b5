"""What compiling costs: CPU-seconds and StableHLO of every op's value and gradient.

    python benchmarks/compile_time.py [--repeats 3] [--output benchmarks/results/compile_time.json]

1024 tokens, batch 1, 8 heads, head dimension 32, float32. Lowering and compiling, each as a ratio
to causal `jax.nn.dot_product_attention` compiled in the same process, in turns; the least of some
repeats, since other work on the machine only adds. Exits with 1 if a limit is exceeded.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from common import ROOT
from compile_cases import CASES, SOFTMAX_BASELINE, Case, lower
from rich.console import Console
from rich.table import Table

from heinsen_jax.environment import environment


@dataclass(frozen=True)
class Options:
    """Measure compilation.

    Attributes:
      repeats: how often each op is compiled.
      names: ops to compile, by the start of their names; all by default.
      output: the JSON record; none is written for a part of the ops.
    """

    repeats: int = 3
    names: tuple[str, ...] = ("",)
    output: Path = ROOT / "benchmarks/results/compile_time.json"


def cpu_seconds(case: Case) -> tuple[float, int]:
    """To lower and compile, from nothing; and bytes of StableHLO."""
    jax.clear_caches()
    start = time.process_time()
    lowered = lower(case)
    lowered.compile()
    return time.process_time() - start, len(lowered.as_text())


def measure(cases: dict[str, Case], repeats: int) -> dict[str, dict[str, Any]]:
    cpu_seconds(SOFTMAX_BASELINE)  # what the first compilation of a process adds
    all_cases = {"baseline": SOFTMAX_BASELINE} | cases
    results = [
        {name: cpu_seconds(case) for name, case in all_cases.items()} for _ in range(repeats)
    ]
    least = {name: min(x[name][0] for x in results) for name in all_cases}
    return {
        name: {
            "cpu_seconds": least[name],
            "ratio": least[name] / least["baseline"],
            "limit": case.limit,
            "bytes": results[0][name][1],
            "max_bytes": case.max_bytes,
            "met": least[name] <= case.limit * least["baseline"]
            and (case.max_bytes is None or results[0][name][1] <= case.max_bytes),
        }
        for name, case in all_cases.items()
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
        record = {"environment": environment(), "repeats": options.repeats, "ops": results}
        options.output.write_text(json.dumps(record, indent=2) + "\n")
        console.print(f"written to {options.output}")
    return 0 if all(x["met"] for x in results.values()) else 1


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main(tyro.cli(Options)))
