"""Time per training step with and without the input pipeline, for the 125M configuration's batch.

    python benchmarks/input_pipeline.py

A step is a stand-in for one on a device: this thread sleeps. Its batch of 512 sequences of 1,024
tokens is either always the same, or the next one of the pipeline as in training: read from memory
maps of prepared shards by grain's thread, taken with a timeout. The corpus is random text, prepared
in a temporary folder. Also measures the pipeline alone, without steps. First the batches are
compared with the batches of a second iterator that begins later. Writes a JSON record.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from common import ROOT, write_record

from heinsen_jax.config import load_config
from heinsen_jax.data import Batch, DataConfig, TokenDataset, train_batches
from heinsen_jax.data.text import load_text
from heinsen_jax.runtime.timeouts import with_timeout


@dataclass(frozen=True)
class Options:
    """Measure the input pipeline.

    Attributes:
      config: the configuration whose batch is read.
      megabytes: size of the text; a byte is a token.
      steps: number of steps of each kind.
      step_seconds: duration of a step.
      output: path of the JSON record.
    """

    config: str = "heinsen_125m_pile"
    megabytes: int = 256
    steps: int = 200
    step_seconds: float = 0.05
    output: Path = ROOT / "benchmarks/results/input_pipeline.json"


def prepared(folder: Path, options: Options) -> tuple[TokenDataset, DataConfig]:
    text = np.random.default_rng(0).integers(32, 127, options.megabytes * 10**6, np.uint8)
    (folder / "random.txt").write_bytes(text.tobytes())
    config = load_config(options.config).data
    assert isinstance(config, DataConfig)
    corpus, cache = str(folder / "random.txt"), str(folder / "data")
    config = replace(config, corpus=corpus, tokenizer="bytes", cache=cache)
    return load_text(config), config


def check_batches(dataset: TokenDataset, config: DataConfig) -> None:
    """Check that a batch depends only on the seed and the step."""
    first, later = (train_batches(dataset, config, seed=0, start_step=step) for step in (0, 2))
    for _ in range(2):
        next(first)
    for _ in range(2):
        np.testing.assert_array_equal(next(first).tokens, next(later).tokens)


def seconds_per_step(
    steps: int, take: Callable[[], Batch], step: Callable[[], None]
) -> dict[str, float]:
    """Statistics of steps, and of the part in which they wait for their batch."""
    step_seconds, waits = [], []
    for _ in range(steps):
        start = time.perf_counter()
        take()
        waits.append(time.perf_counter() - start)
        step()
        step_seconds.append(time.perf_counter() - start)
    return {
        "median": statistics.median(step_seconds),
        "mean": statistics.fmean(step_seconds),
        "median_wait": statistics.median(waits),
        "longest_wait": max(waits),
    }


def main(options: Options) -> int:
    with tempfile.TemporaryDirectory() as folder:
        dataset, config = prepared(Path(folder), options)
        check_batches(dataset, config)

        def pipeline() -> Iterator[Batch]:
            batches = train_batches(dataset, config, seed=0)
            timed = with_timeout(batches, dataset.name, timeout=600, warn=print)
            next(timed)  # starts the threads
            return timed

        def sleep() -> None:
            time.sleep(options.step_seconds)

        batch = next(pipeline())
        seconds = {
            "same batch": seconds_per_step(options.steps, lambda: batch, sleep),
            "pipeline": seconds_per_step(options.steps, pipeline().__next__, sleep),
            "pipeline alone": seconds_per_step(options.steps, pipeline().__next__, lambda: None),
        }
    tokens = config.batch_size * config.sequence_length
    rate = tokens / seconds["pipeline alone"]["mean"]
    record = {
        "setting": {
            "batch_size": config.batch_size,
            "sequence_length": config.sequence_length,
            "step_seconds": options.step_seconds,
            "steps": options.steps,
        },
        "seconds_per_step": seconds,
        "pipeline_tokens_per_second": rate,
    }
    for name, values in seconds.items():
        print(f"{name}: {1000 * values['median']:.2f} ms per step")
    print(f"{rate / 1e6:.0f} million tokens/s")
    write_record(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
