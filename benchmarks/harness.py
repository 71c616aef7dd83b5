"""Multiple-choice evaluation in the lm-evaluation-harness with shared contexts.

    pip install -e '.[harness]'
    python benchmarks/harness.py [--config configs/quickstart.py]

A model of the configuration, after one update, scores four answers of eight tokens for each of many
contexts of the same length: with contexts processed once, whose states all answers continue, and
with every answer processed together with its context, as usual in harnesses. Results are compared
first, then time, in interleaved runs. Needs about 3 minutes on 2 cores of an AMD EPYC. Writes a
JSON record.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from common import ROOT, interleaved_medians, write_record
from rich.console import Console
from rich.table import Table

from heinsen_jax.config import load_config
from heinsen_jax.interop.harness import HarnessModel
from heinsen_jax.training import prepare_run, train

ANSWERS, TOKENS = 4, 8
TOLERANCE = 1e-3  # nats per answer


@dataclass(frozen=True)
class Options:
    """Measure shared contexts.

    Attributes:
      config: configuration of the model.
      output: path of the JSON record.
      contexts: number of contexts.
      lengths: tokens per context.
      repeats: number of measurements of which the median is reported.
    """

    config: Path = ROOT / "configs/quickstart.py"
    output: Path = ROOT / "benchmarks/results/harness.json"
    contexts: int = 32
    lengths: tuple[int, ...] = (64, 256, 1024)
    repeats: int = 3


def made(config_file: Path, folder: Path) -> Path:
    config = load_config(config_file)
    training = replace(config.training, steps=1, evaluation_batches=1, sample_tokens=0)
    optimizer = replace(config.optimizer, warmup_steps=0)
    config = replace(config, training=training, optimizer=optimizer)
    train(prepare_run(config, folder))
    return folder


def questions(number: int, length: int, vocabulary: int) -> list[Any]:
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(number):
        context = rng.integers(0, vocabulary, length).tolist()
        for _ in range(ANSWERS):
            requests.append((None, context, rng.integers(0, vocabulary, TOKENS).tolist()))
    return requests


def main(options: Options) -> int:
    console = Console()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = made(options.config, Path(folder))
        ways: dict[str, Any] = {
            "shared": HarnessModel(str(run), batch_size=32),
            "apart": HarnessModel(str(run), batch_size=32, share=False),
        }
        for length in options.lengths:
            vocabulary = ways["shared"].encoding.vocab_size - 1
            asked = questions(options.contexts, length, vocabulary)
            calls = {name: partial(way._loglikelihood_tokens, asked) for name, way in ways.items()}
            shared, apart = (np.array([value for value, _ in call()]) for call in calls.values())
            worst = float(np.max(np.abs(shared - apart)))
            if not worst < TOLERANCE:
                console.print(f"[red]results differ by {worst:.1e} nats, so nothing is timed")
                return 1
            seconds = interleaved_medians(calls, options.repeats, seconds=0)
            rows.append({"length": length, "largest_difference": worst, "seconds": seconds})
    table = Table("tokens of a context", "shared", "apart", "times as fast")
    for row in rows:
        shared, apart = row["seconds"]["shared"], row["seconds"]["apart"]
        row["times_as_fast"] = apart / shared
        table.add_row(
            str(row["length"]), f"{shared:.2f} s", f"{apart:.2f} s", f"{apart / shared:.1f}"
        )
    console.print(table)
    setting = {"contexts": options.contexts, "answers": ANSWERS, "tokens_of_an_answer": TOKENS}
    record = {"config": options.config.stem, "setting": setting, "rows": rows}
    write_record(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
