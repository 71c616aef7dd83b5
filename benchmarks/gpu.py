"""Run the GPU suite in one command, the most valuable parts first, within a time limit.

    pip install -e '.[dev]' 'jax[cuda13]'
    python benchmarks/gpu.py [--seconds 460] [--parts attention training gated decoding tests]

Each part runs in a separate process:

- attention: `gpu_attention.py` checks the kernels, then times the shapes for which they are the
  default, or may become it;
- training: `gpu_training.py`, steps of the 125M model, and the profile of the fastest;
- gated: `gpu_gated.py`, the gated delta rule beside other libraries' kernels;
- decoding: `gpu_decoding.py`;
- tests: all tests of log-attention, with the experimental kernels on the GPU;
- shakespeare, if named: `training.py` with configs/shakespeare_char.py, to compare with nanoGPT's
  1.4697.

A part that fails does not stop the next one, but the exit status is then 1. The part that runs when
the time is over is stopped, and later ones are left out; records have what was measured until then.
Needs one GPU of the Hopper generation. Writes JSON records and plots to `--output`.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import ROOT

HERE = ROOT / "benchmarks"
ARGUMENTS = {
    "attention": (
        *("--depths", "64", "32", "--tokens", "65536", "--lengths", "1024", "65536", "8192"),
        *("--calls", "plain", "segments", "decay", "heinsen", "--dtypes", "bfloat16"),
        *("--repeats", "3"),
    ),
    "training": ("--rows", "32", "64", "--remat-policies", "all", "--repeats", "3"),
    "gated": (),
    "decoding": ("--batches", "1", "16", "--contexts", "4096", "32768", "--repeats", "3"),
}
"""Arguments of gpu_<part>.py."""
PARTS = (*ARGUMENTS, "tests", "shakespeare")


@dataclass(frozen=True)
class Options:
    """Run the GPU suite.

    Attributes:
      parts: the parts to run, in this order.
      output: folder of the records.
      corpus: file with Tiny Shakespeare; downloaded when None.
      seconds: time limit of all parts together.
    """

    parts: tuple[str, ...] = PARTS[:-1]
    output: Path = HERE / "results"
    corpus: str | None = None
    seconds: float = 460.0

    def command(self, part: str) -> list[str]:
        if part == "tests":
            every_test = ["-m", ""]  # regardless of markers
            return ["-m", "pytest", "-q", *every_test, str(ROOT / "tests/ops/log_attention")]
        if part == "shakespeare":
            config = ROOT / "configs/shakespeare_char.py"
            corpus = ["--corpus", self.corpus] if self.corpus else []
            return [str(HERE / "training.py"), "--config", str(config), *corpus]
        output = self.output / f"gpu_{part}.json"
        return [str(HERE / f"gpu_{part}.py"), "--output", str(output), *ARGUMENTS[part]]


def main(options: Options) -> int:
    if unknown := {*options.parts} - {*PARTS}:
        print(f"--parts {' '.join(sorted(unknown))}: unknown; choose from {', '.join(PARTS)}")
        return 2
    failed, start = [], time.monotonic()
    for part in options.parts:
        began = time.monotonic()
        left = options.seconds - (began - start)
        if left <= 0:
            print(f"== {part}: no time is left", flush=True)
            failed.append(part)
            continue
        print(f"== {part}", flush=True)
        command = [sys.executable, *options.command(part)]
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}  # memory, with PyTorch
        try:
            result = subprocess.run(command, cwd=ROOT, env=shared, timeout=left)
            status = f"exit {result.returncode}"
        except subprocess.TimeoutExpired:
            status = "stopped by the time limit"
        print(f"== {part}: {status}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [] if status == "exit 0" else [part]
    print(f"failed or stopped: {', '.join(failed)}" if failed else "all parts ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
