"""Speed of training with two updates in flight, compared with as many as JAX permits.

    python benchmarks/in_flight.py

Updates of configs/quickstart.py, and of the same model with an eighth of the tokens. (Where updates
need over 0.5 s, one is in flight.) Runs alternate in one process. Writes a JSON record.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import tyro
from common import ROOT, write_record

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.training import loop, prepare_run, train
from heinsen_jax.training.pacing import InFlight

MANY = 32
"""About as many updates as JAX lets run ahead on a CPU."""
CASES = {"eighth": (2, 64, 800), "quickstart": (8, 128, 150)}
"""Sequences per update, their tokens, and updates per run."""


@dataclass(frozen=True)
class Options:
    """Measure training with limits of updates in flight.

    Attributes:
      repeats: number of runs with each limit.
      output: path of the JSON record.
    """

    repeats: int = 4
    output: Path = ROOT / "benchmarks/results/in_flight.json"


def experiment_of(batch_size: int, length: int, steps: int) -> ExperimentConfig:
    config = load_config("quickstart")
    training = replace(
        config.training,
        steps=steps,
        log_every=10,
        evaluate_every=steps,
        evaluation_batches=1,
        checkpoint_minutes=None,
        sample_tokens=0,
    )
    sizes = {"batch_size": batch_size, "sequence_length": length}
    return replace(config, data=replace(config.data, **sizes), training=training)


class Timed(InFlight):
    """Records when the first update was added, and when all were complete."""

    times: ClassVar[list[float]] = []

    def add(self, step: int, metrics: Any) -> None:
        super().add(step, metrics)
        if step == 1:
            self.times[:] = [time.perf_counter()]

    def drain(self) -> None:
        super().drain()
        self.times.append(time.perf_counter())


def milliseconds(config: ExperimentConfig, dataset: data.Dataset, most: int) -> float:
    """Mean milliseconds per update, excluding the first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Timed, "MOST", most),
        mock.patch.object(loop, "InFlight", Timed),
    ):
        train(prepare_run(config, folder, dataset=dataset))
    start, end = Timed.times[:2]
    return 1e3 * (end - start) / (config.training.steps - 1)


def main(options: Options) -> int:
    record = {"cases": {}}
    for name, (batch_size, length, steps) in CASES.items():
        config = experiment_of(batch_size, length, steps)
        dataset = data.load(config.data)
        times: dict[int, list[float]] = {2: [], MANY: []}
        for _ in range(options.repeats):
            for most, samples in times.items():
                samples.append(milliseconds(config, dataset, most))
        two, many = (statistics.median(samples) for samples in times.values())
        record["cases"][name] = {
            "tokens": batch_size * length,
            "milliseconds": {"two": two, "many": many},
            "all_milliseconds": {"two": times[2], "many": times[MANY]},
            "two_over_many": two / many,
        }
        print(f"{name}: {two:.1f} / {many:.1f} ms = {two / many:.3f}", flush=True)
    write_record(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
