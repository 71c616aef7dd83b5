"""Losses and duration of training a configuration from scratch.

    python benchmarks/training.py --config configs/quickstart.py
    python benchmarks/training.py --config configs/shakespeare_char_cpu.py

Trains in a temporary folder; writes benchmarks/results/<name>.json.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from common import ROOT, write_record

from heinsen_jax import data
from heinsen_jax.config import as_json, load_config
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train


@dataclass(frozen=True)
class Options:
    """Train a configuration and record the result.

    Attributes:
      config: file of the configuration.
      corpus: replaces the configuration's corpus, for example by a local copy of the same text.
      output: path of the JSON record; benchmarks/results/<name of the config>.json when None.
    """

    config: Path
    corpus: str | None = None
    output: Path | None = None


def unigram_loss(dataset: data.TokenDataset) -> float:
    """Return the validation loss, in nats, of a unigram model."""
    counts = {}
    for name in ("train", "validation"):
        source = dataset.split(name)
        tokens = [source.read(shard, 0, length) for shard, length in enumerate(source.lengths)]
        counts[name] = np.bincount(np.concatenate(tokens), minlength=dataset.tokenizer.vocab_size)
    probabilities = (counts["train"] + 1) / np.sum(counts["train"] + 1)
    return float(-np.sum(counts["validation"] * np.log(probabilities)) / counts["validation"].sum())


@command_line
def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    config = load_config(options.config)
    if not isinstance(config.data, data.DataConfig):
        raise UserError(
            f"{options.config}: trains on a synthetic task; choose a configuration with text"
        )
    corpus = config.data.corpus
    if options.corpus is not None:
        config = replace(config, data=replace(config.data, corpus=options.corpus))
    dataset = data.load(config.data)
    assert isinstance(dataset, data.TokenDataset)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        result = train(prepare_run(config, folder, dataset=dataset))
        seconds = time.monotonic() - start
        rows = read_metrics(Path(folder))
    settings = as_json(config)
    settings["data"] |= {"corpus": corpus}
    record = {
        "config": settings,
        "seconds": round(seconds, 1),
        "unigram_loss": unigram_loss(dataset),
        "final": result.metrics,
        "validation": [row for row in rows if "validation/loss" in row],
    }
    output = options.output or ROOT / f"benchmarks/results/{options.config.stem}.json"
    write_record(output, record)


if __name__ == "__main__":
    raise SystemExit(main())
