"""Linearization of trained softmax models: loss by mechanism, tokens of training, and kept layers.

    python benchmarks/linearize.py --jobs 2

Teachers with softmax attention: the language model of Tiny Shakespeare in the study
configs/studies/language_model.py (rotary positions), and that of Python code with sequences of 512
tokens (configs/python_code.py). Each is linearized with budgets from 1% to 100% of the teacher's
training tokens, half of them for each stage, by `python -m heinsen_jax.linearize`. Resumable: each
finished linearization is a line of the record. Needs an estimated two hours on 2 cores of an AMD
EPYC. Linux only. Writes JSON lines and a plot.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import matplotlib.figure
import tyro
from common import ROOT

from heinsen_jax.allocator import keep_freed_memory
from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.linearize import RESULTS_FILE, linearize
from heinsen_jax.linearize import Options as Linearization
from heinsen_jax.train import run_experiment

MEASURE = "--measure"
BUDGETS = 0.01, 0.03, 0.1, 0.3, 1.0
"""Tokens of both stages, as fractions of the teacher's training tokens."""
MECHANISMS = {
    "log, Hedgehog": "log:features=hedgehog",
    "log_window, 16": "log_window:window_size=16",
    "log_window, 64": "log_window:window_size=64",
    "linear, elu + 1": "linear",
    "taylor": "taylor",
    "gated_deltanet": "gated_deltanet",
}
KEPT = {"none": (), "1 in 4": ("3::4",), "1 in 2": ("1::2",)}
STYLES = {"none": "o-", "1 in 4": "s", "1 in 2": "^"}
KEPT_BUDGET = 0.1
"""Budget of the comparison of kept layers, for the first three mechanisms."""


@dataclass(frozen=True)
class Options:
    """Linearize trained models.

    Attributes:
      teachers: names of teachers, of `teacher`.
      workdir: folder of all runs.
      output: path of the record, JSON lines; the plot is beside it.
      jobs: number of concurrent linearizations, which share the cores.
      report_only: whether to draw the plot of the record only.
    """

    teachers: tuple[str, ...] = ("shakespeare", "python")
    workdir: Path = Path("runs/linearize")
    output: Path = ROOT / "benchmarks/results/linearize.jsonl"
    jobs: int = 1
    report_only: bool = False


@dataclass(frozen=True)
class Case:
    """A linearization: names of the teacher, the mechanism and the kept layers, and the budget."""

    teacher: str
    mechanism: str
    kept: str
    budget: float


def teacher(name: str) -> ExperimentConfig:
    """Configuration of a teacher."""
    base = load_config({"shakespeare": "shakespeare_char_decay", "python": "python_code"}[name])
    steps = base.training.steps
    return replace(
        base,
        model=replace(base.model, attention="softmax"),
        optimizer=replace(base.optimizer, name="muon"),
        training=replace(
            base.training, evaluate_every=steps, sample_tokens=0, loss_by_position=False
        ),
        data=replace(base.data, test_lengths=()),
    )


def cases(teachers: Sequence[str]) -> list[Case]:
    found = []
    for name in teachers:
        found += [Case(name, x, "none", budget) for budget in BUDGETS for x in MECHANISMS]
        first = list(MECHANISMS)[:3]
        found += [Case(name, x, kept, KEPT_BUDGET) for kept in list(KEPT)[1:] for x in first]
    return found


def measure(case: Case, workdir: Path) -> dict[str, Any]:
    """Linearize a teacher in this process; return its record."""
    keep_freed_memory()
    folder = workdir / "-".join(map(str, asdict(case).values())).replace(" ", "_").replace(",", "")
    half = max(round(teacher(case.teacher).training.steps * case.budget / 2), 1)
    options = Linearization(
        model=str(workdir / case.teacher),
        workdir=str(folder),
        attention=MECHANISMS[case.mechanism],
        keep=KEPT[case.kept],
        transfer_steps=half,
        steps=half,
    )
    if code := linearize(options, ["--training.log-every", str(half)]):
        raise SystemExit(code)
    found = json.loads((folder / RESULTS_FILE).read_text())
    shutil.rmtree(folder)
    return found


def in_subprocess(case: Case, cores: Sequence[int], workdir: Path) -> dict[str, Any]:
    """`measure` in a process of its own, on these cores."""
    result = workdir / f"{cores[0]}.json"
    command = [sys.executable, __file__, MEASURE, json.dumps(asdict(case)), str(workdir)]
    command += [str(result), json.dumps(cores)]
    with (workdir / "log.txt").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    return json.loads(result.read_text())


def run(options: Options) -> None:
    """Run the cases that are not recorded yet."""
    for name in options.teachers:
        run_experiment(teacher(name), options.workdir / name)
    recorded = [row["case"] for row in read(options.output)]
    waiting = [case for case in cases(options.teachers) if asdict(case) not in recorded]
    cores, shares = sorted(os.sched_getaffinity(0)), SimpleQueue()
    for job in range(options.jobs):
        shares.put(cores[job :: options.jobs] or cores)

    def one(case: Case) -> None:
        share = shares.get()
        try:
            found = in_subprocess(case, share, options.workdir)
        finally:
            shares.put(share)
        with options.output.open("a") as file:
            file.write(json.dumps({"case": asdict(case), **found}) + "\n")
        losses = ", ".join(f"{row['name']} {row['loss']:.4f}" for row in found["results"])
        print(f"{case}: {losses}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, waiting))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw(rows: Sequence[dict[str, Any]], teachers: Sequence[str], path: Path) -> None:
    """Plot the loss after both stages against the tokens, a panel for each teacher. Lines are
    models without kept layers, other markers those with kept layers."""
    figure = matplotlib.figure.Figure((6.5 * len(teachers), 5), layout="constrained")
    for axes, name in zip(
        figure.subplots(1, len(teachers), squeeze=False)[0], teachers, strict=True
    ):
        of_teacher = [row for row in rows if row["case"]["teacher"] == name]
        for (number, mechanism), (kept, style) in product(enumerate(MECHANISMS), STYLES.items()):
            chosen = {"mechanism": mechanism, "kept": kept}
            ends = [x["results"][-1] for x in of_teacher if chosen.items() <= x["case"].items()]
            if points := sorted((end["tokens"], end["loss"]) for end in ends):
                label = mechanism if kept == "none" else f"{mechanism}; {kept} kept"
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
        if of_teacher:
            axes.axhline(of_teacher[0]["results"][0]["loss"], color="black", label="teacher")
        axes.set(xscale="log", xlabel="training tokens", ylabel="loss (nats per token)", title=name)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(options: Options) -> int:
    if not options.report_only:
        options.workdir.mkdir(parents=True, exist_ok=True)
        run(options)
    draw(read(options.output), options.teachers, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        case, workdir, result, share = sys.argv[2:]
        os.sched_setaffinity(0, json.loads(share))  # XLA has one thread per available core
        Path(result).write_text(json.dumps(measure(Case(**json.loads(case)), Path(workdir))))
    else:
        sys.exit(main(tyro.cli(Options)))
