"""All that is to be known on a GPU, in one command: first whether results are right, then times.

    pip install -e '.[dev]' 'jax[cuda13]'
    python benchmarks/gpu.py [--parts tests attention training decoding shakespeare]

Each part is a process of its own; the next one runs also if one fails, and the exit status says
whether any did:

- tests: log-attention's, of which those of kernels run on the GPU where there is one;
- attention, training, decoding: `gpu_attention.py`, `gpu_training.py`, `gpu_decoding.py`;
- shakespeare: `training.py` for configs/shakespeare_char.py, beside nanoGPT's 1.4697.

For one GPU of the Hopper generation, some half an hour. Results are JSON records and plots in
`--output`.
"""

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
      parts: which, in this order.
      output: the folder of the records.
      corpus: Tiny Shakespeare on this machine, where it is not to be downloaded.
    """

    parts: tuple[str, ...] = PARTS
    output: Path = HERE / "results"
    corpus: str | None = None

    def command(self, part: str) -> list[str]:
        if part == "tests":
            return ["-m", "pytest", "-q", str(ROOT / "tests/ops/log_attention")]
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
        print(f"--parts {' '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
        return 2
    failed = []
    for part in options.parts:
        print(f"== {part}", flush=True)
        began = time.monotonic()
        status = subprocess.run([sys.executable, *options.command(part)], cwd=ROOT).returncode
        print(f"== {part}: exit {status}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [part] if status else []
    print(f"failed: {', '.join(failed)}" if failed else "all parts ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
