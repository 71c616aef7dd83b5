"""Run the GPU suite in one command: first tests of correctness, then benchmarks.

    pip install -e '.[dev]' 'jax[cuda13]'
    python benchmarks/gpu.py [--parts tests attention training decoding shakespeare]

Each part runs in a separate process. A part that fails does not stop the next one, but the exit
status is then 1:

- tests: all tests of log-attention, with the experimental kernels on the GPU;
- attention, training, decoding: `gpu_attention.py`, `gpu_training.py`, `gpu_decoding.py`;
- shakespeare: `training.py` with configs/shakespeare_char.py, to compare with nanoGPT's 1.4697.

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
PARTS = ("tests", "attention", "training", "decoding", "shakespeare")


@dataclass(frozen=True)
class Options:
    """Run the GPU suite.

    Attributes:
      parts: the parts to run, in this order.
      output: folder of the records.
      corpus: file with Tiny Shakespeare; downloaded when None.
    """

    parts: tuple[str, ...] = PARTS
    output: Path = HERE / "results"
    corpus: str | None = None

    def command(self, part: str) -> list[str]:
        if part == "tests":
            every_test = ["-m", ""]  # regardless of markers
            return ["-m", "pytest", "-q", *every_test, str(ROOT / "tests/ops/log_attention")]
        if part == "shakespeare":
            config = ROOT / "configs/shakespeare_char.py"
            corpus = ["--corpus", self.corpus] if self.corpus else []
            return [str(HERE / "training.py"), "--config", str(config), *corpus]
        return [
            str(HERE / f"gpu_{part}.py"),
            "--output",
            str(self.output / f"gpu_{part}.json"),
        ]


def main(options: Options) -> int:
    if unknown := {*options.parts} - {*PARTS}:
        print(f"--parts {' '.join(sorted(unknown))}: unknown; choose from {', '.join(PARTS)}")
        return 2
    failed = []
    for part in options.parts:
        print(f"== {part}", flush=True)
        began = time.monotonic()
        command = [sys.executable, *options.command(part)]
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}  # memory, with PyTorch
        status = subprocess.run(command, cwd=ROOT, env=shared).returncode
        print(f"== {part}: exit {status}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [part] if status else []
    print(f"failed: {', '.join(failed)}" if failed else "all parts ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
