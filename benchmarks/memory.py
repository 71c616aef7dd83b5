"""Memory of a training step of log-attention beside the original PyTorch form's, at 16,384 tokens.

    pip install torch        # for this benchmark only
    python benchmarks/memory.py

Forward and backward, float32, one sequence, 8 heads of depth 32: what a second call adds to the
process, output and gradients included, at its peak. Each in a process of its own. The original
holds the states of all tokens: some 10 GB of memory must be free. Writes a JSON record.
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

from heinsen_jax.environment import environment

LENGTH = 16_384
REQUIRED = 1 / 50
MEASURE = "--measure"


@dataclass(frozen=True)
class Options:
    """Measure memory.

    Attributes:
      output: the JSON record.
    """

    output: Path = ROOT / "benchmarks/results/memory.json"


def peak_memory(name: str) -> int:
    """Bytes that a call adds to this process."""
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
