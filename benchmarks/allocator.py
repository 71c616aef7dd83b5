"""Time and memory of training with `keep_freed_memory`, and with the C library's defaults.

    python benchmarks/allocator.py

Each measurement is a process of its own, which trains a configuration for some updates on random
tokens; processes with and without the setting alternate. Needs about 5 minutes on 2 cores of an AMD
EPYC. Linux only. Writes a JSON record.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from common import ROOT, interleaved_medians, resident_memory
from rich.console import Console
from rich.table import Table
from steps import TrainingStep

from heinsen_jax.config import load_config
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.environment import environment

MEASURE = "--measure"


@dataclass(frozen=True)
class Options:
    """Measure training with and without `keep_freed_memory`.

    Attributes:
      configs: names of configurations.
      output: path of the JSON record.
      repeats: number of processes of each kind of which the median is reported.
    """

    configs: tuple[str, ...] = ("quickstart", "shakespeare_char_decay", "python_code")
    output: Path = ROOT / "benchmarks/results/allocator.json"
    repeats: int = 3


def measure(name: str, setting: str) -> dict[str, float]:
    """Return the seconds of an update and the peak memory of this process, in bytes."""
    if setting == "kept":
        assert keep_freed_memory()
    config = load_config(name)
    step = TrainingStep(config, config.model.vocab_size)
    seconds = interleaved_medians({name: step}, repeats=1, seconds=8)[name]
    return {"seconds": seconds, "peak_bytes": resident_memory("VmHWM")}


def measure_in_subprocess(name: str, setting: str) -> dict[str, float]:
    command = [sys.executable, __file__, MEASURE, name, setting]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def main(options: Options) -> int:
    rows: list[dict[str, Any]] = []
    table = Table("configuration", "default ms", "kept ms", "ratio", "ratio of memory")
    for name in options.configs:
        measured: dict[str, list[dict[str, float]]] = {"default": [], "kept": []}
        for _ in range(options.repeats):
            for setting, runs in measured.items():
                runs.append(measure_in_subprocess(name, setting))
        row: dict[str, Any] = {"config": name}
        for setting, runs in measured.items():
            row[setting] = {key: statistics.median(x[key] for x in runs) for key in runs[0]}
        row["ratio"] = row["default"]["seconds"] / row["kept"]["seconds"]
        row["memory_ratio"] = row["kept"]["peak_bytes"] / row["default"]["peak_bytes"]
        rows.append(row)
        times = (f"{1e3 * row[x]['seconds']:.1f}" for x in measured)
        table.add_row(name, *times, f"{row['ratio']:.2f}", f"{row['memory_ratio']:.2f}")
    Console().print(table)
    record = {"environment": environment(), "rows": rows}
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        sys.exit(main(tyro.cli(Options)))
