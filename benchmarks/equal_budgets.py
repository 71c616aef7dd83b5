"""Loss of language models of Python code at equal training FLOPs and at equal training time.

    python benchmarks/equal_budgets.py

Measures an update of each model with results of the study long_context_updates, on random tokens in
interleaved runs, without compilation, evaluation and data. The budgets are 300 and 600 updates of
the first model. The loss of a model with such a budget is interpolated for each seed, by the
parabola through the logarithms of its losses and numbers of updates; null if the budget is outside
of these numbers. Needs about 5 minutes on 2 cores of an AMD EPYC. Writes a JSON record.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import tyro
from common import ROOT, interleaved_medians, write_record
from rich.console import Console
from rich.table import Table
from steps import TrainingStep

from studies import Comparison, load_study, results_of

STUDY = "long_context_updates"
UPDATES = 300, 600
BUDGETS = "flops", "time"
DOCUMENT_LENGTH = 5400  # about the mean tokens of a file of Python's library


@dataclass(frozen=True)
class Options:
    """Compare losses at equal budgets.

    Attributes:
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/equal_budgets.json"
    repeats: int = 7


def interpolated(updates: float, losses: dict[int, float]) -> float | None:
    """Return the loss after a number of updates, given the losses after three others; None
    outside."""
    if not min(losses) <= updates <= max(losses):
        return None
    parabola = np.polyfit(np.log([*losses]), np.log([*losses.values()]), len(losses) - 1)
    return float(np.exp(np.polyval(parabola, np.log(updates))))


def by_seed(results: dict[int, Comparison], updates: float) -> list[float | None]:
    """Return the loss of each seed after a number of updates, given results for other numbers.
    Seeds that are not in all results are left out."""
    by_updates = {
        n: {
            record.get("labels", {})["seed"]: record["metrics"]["loss"]
            for record in result.records
            if "metrics" in record
        }
        for n, result in results.items()
    }
    seeds = set.intersection(*({*losses} for losses in by_updates.values()))
    return [
        interpolated(updates, {n: losses[seed] for n, losses in by_updates.items()})
        for seed in sorted(seeds)
    ]


def main(options: Options) -> int:
    study = load_study(STUDY)
    results = results_of(study, ROOT / "benchmarks/results/studies" / STUDY)
    by_model = {(x.compared["model"], int(x.compared["updates"])): x for x in results}
    numbers = sorted({updates for _, updates in by_model})
    configs = {
        run.labels["model"]: run.config
        for run in study.first_seed_runs()
        if all((run.labels["model"], updates) in by_model for updates in numbers)
    }
    steps = {
        name: TrainingStep(config, config.model.vocab_size, DOCUMENT_LENGTH)
        for name, config in configs.items()
    }
    seconds = interleaved_medians({**steps}, options.repeats)
    first = next(iter(configs))
    rows = {}
    columns = [f"{budget} of {updates}" for updates, budget in product(UPDATES, BUDGETS)]
    table = Table("model", "s/update", *columns, title=f"losses with the budget of {first}")
    for name in configs:
        by_updates = {n: by_model[name, n] for n in numbers}
        flops = by_model[first, numbers[0]].mean("flops") / by_model[name, numbers[0]].mean("flops")
        scale = {"flops": flops, "time": seconds[first] / seconds[name]}
        losses = {str(n): {x: by_seed(by_updates, n * scale[x]) for x in BUDGETS} for n in UPDATES}
        row = {
            "seconds_per_update": seconds[name],
            "updates_per_budget": scale,
            "loss": losses,
        }
        rows[name] = row
        cells = [x for by_budget in losses.values() for x in by_budget.values()]
        texts = [", ".join("" if x is None else f"{x:.3f}" for x in values) for values in cells]
        table.add_row(name, f"{seconds[name]:.3f}", *texts)
    Console().print(table)
    write_record(options.output, {"budgets": UPDATES, "models": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
