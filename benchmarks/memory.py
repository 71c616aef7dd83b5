"""Memory of forward and backward passes of log-attention and of the original PyTorch form.

    pip install torch        # for this benchmark only
    python benchmarks/memory.py

Forward and backward, float32, one sequence, 8 heads of dimension 32, 16,384 tokens: peak memory
that a second call adds to the process, output and gradients included, each in a separate process.
The original stores the states of all tokens and needs about 10 GB of free memory. Writes a JSON
record.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import tyro
from common import ROOT, SETTING, added_memory, random_tokens
from comparison import functions_of

from heinsen_jax.runtime.environment import environment

LENGTH = 16_384
REQUIRED = 1 / 50
MEASURE = "--measure"


@dataclass(frozen=True)
class Options:
    """Measure memory.

    Attributes:
      output: path of the JSON record.
    """

    output: Path = ROOT / "benchmarks/results/memory.json"


def peak_memory(name: str) -> int:
    """Return the bytes that a call adds to this process."""
    call = functions_of("torch")[name](random_tokens(LENGTH))
    jax.block_until_ready(call())  # compiled
    return added_memory(call)


def peak_memory_apart(name: str) -> int:
    command = [sys.executable, __file__, MEASURE, name]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(result.stdout)


def main(options: Options) -> int:
    peaks = {name: peak_memory_apart(name) for name in ("ours", "original")}
    ratio = peaks["ours"] / peaks["original"]
    record: dict[str, Any] = {
        "environment": environment() | {"torch": version("torch")},
        "setting": SETTING | {"tokens": LENGTH},
        "peak_bytes": peaks,
        "ours_over_original": ratio,
        "requirement": ratio <= REQUIRED,
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{peaks['ours'] / 1e6:.0f} / {peaks['original'] / 1e6:.0f} MB = 1/{1 / ratio:.0f}")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        print(peak_memory(sys.argv[2]))
    else:
        sys.exit(main(tyro.cli(Options)))
