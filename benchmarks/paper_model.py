"""The paper's 125M model and GPT-2 small: loss, time and memory of the first updates on a CPU.

    python benchmarks/paper_model.py --corpus wikitext-2 --tokenizer gpt2

Both models, configs/heinsen_125m_pile.py and configs/gpt2_small_pile.py, train on the same batches
of 2 x 512 tokens in float32, with the same optimizer, each in a process of its own. Reports the
training loss, the median time of an update, and the peak memory of the process. These updates are
far too few to compare the models: the paper trained on 300 billion tokens. Needs a quarter of
an hour per 100 updates on 2 cores, and 5 GB of memory. Linux only. Writes a JSON record, and a plot
of the losses.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import tyro
from common import ROOT, resident_memory, write_record
from rich.console import Console
from rich.table import Table

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.data import DataConfig
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train
from studies import sweeps
from studies.runs import costs

MEASURE = "--measure"
MODELS = "heinsen_125m", "gpt2_small"  # configurations configs/<name>_pile.py
COLORS = sweeps.COLORS["log"], sweeps.COLORS["softmax"]
MEAN = 10  # updates per point of the plot


@dataclass(frozen=True)
class Options:
    """Train the 125M models for some updates.

    Attributes:
      corpus: name or path of the corpus.
      tokenizer: GPT-2's tokenizer, by name or as a .tiktoken file.
      updates: number of updates.
      batch_size: sequences per batch.
      sequence_length: tokens per sequence.
      output: path of the JSON record.
    """

    corpus: str = "wikitext-2"
    tokenizer: str = "gpt2"
    updates: int = 100
    batch_size: int = 2
    sequence_length: int = 512
    output: Path = ROOT / "benchmarks/results/paper_model.json"


def experiment(name: str, options: Options) -> ExperimentConfig:
    base = load_config(ROOT / f"configs/{name}_pile.py")
    return replace(
        base,
        model=replace(base.model, dtype="float32"),
        data=DataConfig(
            corpus=options.corpus,
            tokenizer=options.tokenizer,
            documents="continuous",
            sequence_length=options.sequence_length,
            batch_size=options.batch_size,
        ),
        optimizer=replace(base.optimizer, warmup_steps=options.updates // 5),
        training=replace(
            base.training,
            steps=options.updates,
            log_every=1,
            evaluate_every=options.updates,
            evaluation_batches=20,
            checkpoint_every=options.updates,
            sample_tokens=0,
        ),
    )


def measure(name: str, options: Options) -> dict[str, Any]:
    """Train a model in this process, and return its measurements."""
    config = experiment(name, options)
    with tempfile.TemporaryDirectory() as folder:
        validation = train(prepare_run(config, folder)).metrics["loss"]
        rows = [row for row in read_metrics(Path(folder)) if "train/tokens_per_second" in row]
    tokens = options.batch_size * options.sequence_length
    seconds = [tokens / row["train/tokens_per_second"] for row in rows[1:]]
    return {
        **costs(config),
        "loss": {str(row["step"]): row["train/loss"] for row in rows},
        "validation_loss": validation,
        "seconds_per_update": statistics.median(seconds),
        "peak_bytes": resident_memory("VmHWM"),
    }


def measure_in_subprocess(name: str, options: Options) -> dict[str, Any]:
    values = json.dumps(asdict(options) | {"output": str(options.output)})
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run([sys.executable, __file__, MEASURE, name, values, str(result)], check=True)
        return json.loads(result.read_text())


def draw(models: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the training losses; each point is the mean over `MEAN` updates."""
    figure = matplotlib.figure.Figure((6, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, model), color in zip(models.items(), COLORS, strict=True):
        losses = [*model["loss"].values()]
        means = [statistics.mean(losses[i : i + MEAN]) for i in range(0, len(losses), MEAN)]
        axes.plot(MEAN * np.arange(1, len(means) + 1), means, ".-", label=name, color=color)
    axes.set(xlabel="updates", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def main(options: Options) -> int:
    models = {name: measure_in_subprocess(name, options) for name in MODELS}
    settings = {name: x for name, x in asdict(options).items() if name != "output"}
    settings["tokenizer"] = Path(options.tokenizer).name
    settings["corpus"] = Path(options.corpus).name
    table = Table("model", "parameters", "last loss", "validation", "s/update", "peak GB")
    for name, row in models.items():
        last = row["loss"][str(options.updates)]
        numbers = f"{last:.3f}", f"{row['validation_loss']:.3f}", f"{row['seconds_per_update']:.1f}"
        table.add_row(name, f"{row['parameters']:,}", *numbers, f"{row['peak_bytes'] / 1e9:.1f}")
    Console().print(table)
    write_record(options.output, {"settings": settings, "models": models})
    draw(models, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        name, values, result = sys.argv[2:]
        chosen = Options(**json.loads(values))
        Path(result).write_text(json.dumps(measure(name, chosen)))
    else:
        sys.exit(main(tyro.cli(Options)))
