"""Loss of language models of Python code at equal training FLOPs and at equal training time.

    python benchmarks/equal_budgets.py

Measures an update of each model of the study configs/studies/long_context_updates.py, on random
tokens in interleaved runs. The budget is that of 600 updates of the first model: each model's
number of updates with the same FLOPs, and with the same time, gives its loss, interpolated linearly
in the logarithm of the number between the numbers in the study. Compilation, evaluation and data
are not part of the time. Needs about 5 minutes on 2 cores of an AMD EPYC. Writes a JSON record.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from common import ROOT, interleaved_medians
from rich.console import Console
from rich.table import Table
from steps import TrainingStep

from heinsen_jax.environment import environment
from heinsen_jax.study import load_study, results_of

STUDY = "long_context_updates"
UPDATES = 600
DOCUMENT_LENGTH = 2000  # about the mean tokens of a file of Python's library
METRICS = "loss", "loss_2048"


@dataclass(frozen=True)
class Options:
    """Compare losses at equal budgets.

    Attributes:
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/equal_budgets.json"
    repeats: int = 7


def interpolated(updates: float, losses: dict[int, float]) -> float:
    """Return the loss after a number of updates, given those after others.

    Raises:
      ValueError: it is not between them.
    """
    if not min(losses) <= updates <= max(losses):
        raise ValueError(f"{updates:.0f} updates are outside {min(losses)} to {max(losses)}")
    numbers = sorted(losses)
    return float(np.interp(np.log(updates), np.log(numbers), [losses[n] for n in numbers]))


def main(options: Options) -> int:
    study = load_study(STUDY)
    configs = {
        run.labels["model"]: run.config
        for run in study.first_seed_runs()
        if run.labels["updates"] == str(UPDATES)
    }
    steps = {
        name: TrainingStep(config, config.model.vocab_size, DOCUMENT_LENGTH)
        for name, config in configs.items()
    }
    seconds = interleaved_medians({**steps}, options.repeats)
    results = results_of(study, ROOT / "benchmarks/results/studies" / STUDY)
    found = {(x.compared["model"], int(x.compared["updates"])): x for x in results}
    first = next(iter(configs))
    rows = {}
    table = Table("model", "s/update", "updates: FLOPs", "loss", "updates: time", "loss")
    for name in configs:
        of_model = {n: x for (model, n), x in found.items() if model == name}
        flops = found[first, UPDATES].mean("flops") / of_model[UPDATES].mean("flops")
        updates = {"flops": UPDATES * flops, "time": UPDATES * seconds[first] / seconds[name]}
        losses = {metric: {n: x.mean(metric) for n, x in of_model.items()} for metric in METRICS}
        rows[name] = {
            "seconds_per_update": seconds[name],
            "updates": updates,
            **{
                metric: {budget: interpolated(n, losses[metric]) for budget, n in updates.items()}
                for metric in METRICS
            },
        }
        numbers = (f"{rows[name]['loss'][x]:.3f}" for x in updates)
        counts = (f"{n:.0f}" for n in updates.values())
        pairs = (text for pair in zip(counts, numbers, strict=True) for text in pair)
        table.add_row(name, f"{seconds[name]:.3f}", *pairs)
    Console().print(table)
    record = {"environment": environment(), "updates": UPDATES, "models": rows}
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
