"""Linearization of trained softmax models: loss by mechanism, tokens of training, and kept layers.

    python benchmarks/linearize.py --jobs 2

Teachers with softmax attention and rotary positions: the language model of Tiny Shakespeare in the
study configs/studies/language_model.py, and that of Python code with sequences of 512 tokens
(configs/python_code.py); both have convolutions of 4 tokens before each branch. Each is linearized
with budgets from 1% to 100% of the teacher's training tokens by `python -m heinsen_jax.linearize`:
half of them for each stage, all for stage 2 if the mechanism has no parameters of its own. The peak
learning rate of stage 2 is the teacher's, or a quarter of it; results have the better one, by the
same validation loss. With 100%, it is the teacher's. One seed; with 10%, three for two mechanisms.

Controls: windows of softmax attention without log-attention, and a window merged with log-attention
that is trained from scratch with the same numbers of tokens and the same learning rates. Windows
have the teacher's rotary positions; the other mechanisms have no positions but those of decay and
convolutions, so that differences are not of the mechanism alone.

Resumable: each finished case is a line of the record. Needs an estimated four hours on 2 cores of
an AMD EPYC. Linux only. Writes JSON lines and a plot.
"""

import json
import os
import shutil
import statistics
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
from heinsen_jax.environment import environment
from heinsen_jax.linearize import RESULTS_FILE, TRANSFER_SUFFIX, linearize
from heinsen_jax.linearize import Options as Linearization
from heinsen_jax.models.conversion import linear_layers, new_parameters
from heinsen_jax.train import run_experiment
from heinsen_jax.training.preflight import tokens_per_update

MEASURE = "--measure"
BUDGETS = {0.01: (0.25, 1.0), 0.1: (0.25, 1.0), 0.3: (0.25, 1.0), 1.0: (1.0,)}
"""Tokens of both stages, as fractions of the teacher's training tokens, with the peak learning
rates of stage 2, as multiples of the teacher's."""
SMALLEST = 20
"""Smallest budget, in updates; smaller ones are left out."""
MECHANISMS = {
    "log, Hedgehog": "log:features=hedgehog,decay=None",
    "log, Hedgehog, decay": "log:features=hedgehog,decay=head",
    "log_window, 16": "log_window:window_size=16",
    "log_window, 64": "log_window:window_size=64",
    "window of 16": "sliding_window:window_size=16",
    "window of 64": "sliding_window:window_size=64",
    "linear, elu + 1": "linear",
    "taylor": "taylor",
    "gated_deltanet": "gated_deltanet",
}
KEPT = {"none": (), "1 in 4": ("3::4",), "1 in 2": ("1::2",)}
KEPT_BUDGET = 0.1
"""Budget of the comparisons of kept layers and of seeds."""
KEEPING = "log, Hedgehog", "log_window, 16"
"""Mechanisms with which layers are kept."""
REPEATED = "log, Hedgehog", "log_window, 16"
"""Mechanisms with three seeds."""
CONTROL = "log_window, 16"
"""Mechanism of the models that are trained from scratch."""
SCRATCH = "from scratch"
STYLES = {"none": "o-", "1 in 4": "s", "1 in 2": "^", SCRATCH: "x--"}


@dataclass(frozen=True)
class Options:
    """Linearize trained models.

    Attributes:
      teachers: names of teachers, of `teacher`.
      workdir: folder of all runs.
      output: path of the record, JSON lines; the plot is beside it.
      jobs: number of concurrent linearizations, which share the cores; at most one per core.
      report_only: whether to draw the plot of the record only.
    """

    teachers: tuple[str, ...] = ("shakespeare", "python")
    workdir: Path = Path("runs/linearize")
    output: Path = ROOT / "benchmarks/results/linearize.jsonl"
    jobs: int = 1
    report_only: bool = False


@dataclass(frozen=True)
class Case:
    """A linearization, or a model from scratch.

    Attributes:
      teacher: name of the teacher.
      mechanism: name of the mechanism.
      kept: name of the kept layers, or `SCRATCH`.
      budget: tokens, as a fraction of the teacher's.
      rate: peak learning rate of stage 2, as a multiple of the teacher's.
      seed: added to the teacher's seed.
    """

    teacher: str
    mechanism: str
    kept: str
    budget: float
    rate: float = 1.0
    seed: int = 0


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


def mechanisms(length: int) -> list[str]:
    """The mechanisms but for windows that span a sequence of the teacher's length."""
    return [x for x, y in MECHANISMS.items() if not y.endswith(f":window_size={length}")]


def cases(teachers: Sequence[str]) -> list[Case]:
    found = []
    for name in teachers:
        config = teacher(name)
        chosen = mechanisms(config.data.sequence_length)
        budgets = [x for x in BUDGETS if x * config.training.steps >= SMALLEST]
        runs = [(budget, rate) for budget in budgets for rate in BUDGETS[budget]]
        kept_runs = [(KEPT_BUDGET, rate) for rate in BUDGETS[KEPT_BUDGET]]
        found += [Case(name, x, "none", *run) for run, x in product(runs, chosen)]
        kept = [x for x in KEPT if x != "none"]
        found += [Case(name, x, y, *run) for x, y, run in product(KEEPING, kept, kept_runs)]
        found += [
            Case(name, x, "none", *run, seed)
            for x, run, seed in product(REPEATED, kept_runs, (1, 2))
        ]
        found += [Case(name, CONTROL, SCRATCH, *run) for run in runs]
    return found


def measure(case: Case, workdir: Path) -> list[dict[str, Any]]:
    """Linearize a teacher in this process, or train a model from scratch; return the losses."""
    keep_freed_memory()
    name = "-".join(map(str, asdict(case).values())).replace(" ", "_").replace(",", "")
    folder, config = workdir / name, teacher(case.teacher)
    config = replace(config, seed=config.seed + 2 * case.seed)
    attention, keep = MECHANISMS[case.mechanism], KEPT.get(case.kept, ())
    model = linear_layers(config.model, attention, keep)
    steps = round(config.training.steps * case.budget)
    rate, end_rate = config.optimizer.learning_rate, config.optimizer.end_learning_rate
    rates = {"learning_rate": case.rate * rate, "end_learning_rate": case.rate * end_rate}
    if case.kept == SCRATCH:
        warmup = min(config.optimizer.warmup_steps, steps // 10)
        optimizer = replace(config.optimizer, warmup_steps=warmup, **rates)
        training = replace(config.training, steps=steps, evaluate_every=steps)
        chosen = replace(config, model=model, optimizer=optimizer, training=training)
        loss = run_experiment(chosen, folder).metrics["loss"]
        found = [{"name": SCRATCH, "loss": loss, "tokens": steps * tokens_per_update(config.data)}]
    else:
        first = steps // 2 if new_parameters(model, config.model) else 0
        options = Linearization(
            model=str(workdir / case.teacher),
            workdir=str(folder),
            attention=attention,
            keep=keep,
            transfer_steps=first,
            steps=steps - first,
        )
        overrides = [word for k, x in rates.items() for word in (f"--optimizer.{k}", str(x))]
        overrides += ["--training.log-every", str(steps), "--seed", str(config.seed + 1)]
        if code := linearize(options, overrides):
            raise SystemExit(code)
        found = json.loads((folder / RESULTS_FILE).read_text())["results"]
    for path in (folder, folder.with_name(folder.name + TRANSFER_SUFFIX)):
        shutil.rmtree(path, ignore_errors=True)
    return found


def in_subprocess(case: Case, cores: Sequence[int], workdir: Path) -> list[dict[str, Any]]:
    """`measure` in a process of its own, on these cores."""
    result = workdir / f"{cores[0]}.json"
    command = [sys.executable, __file__, MEASURE, json.dumps(asdict(case)), str(workdir)]
    command += [str(result), json.dumps(cores)]
    with (workdir / "log.txt").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    return json.loads(result.read_text())


def run(options: Options) -> None:
    """Run the cases that are not recorded yet."""
    cores, shares = sorted(os.sched_getaffinity(0)), SimpleQueue()
    if not 1 <= options.jobs <= len(cores):
        raise SystemExit(f"--jobs {options.jobs}: give 1 to {len(cores)}, the number of cores")
    for job in range(options.jobs):
        shares.put(cores[job :: options.jobs])
    for name in options.teachers:
        run_experiment(teacher(name), options.workdir / name)
    recorded = [row["case"] for row in read(options.output)]
    waiting = [case for case in cases(options.teachers) if asdict(case) not in recorded]

    def one(case: Case) -> None:
        share = shares.get()
        try:
            found = in_subprocess(case, share, options.workdir)
        finally:
            shares.put(share)
        row = {"case": asdict(case), "results": found, "environment": environment()}
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        losses = ", ".join(f"{row['name']} {row['loss']:.4f}" for row in found)
        print(f"{case}: {losses}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, waiting))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def best(rows: Sequence[dict[str, Any]]) -> dict[Case, dict[str, Any]]:
    """The last results of all cases, by the case with the better rate."""
    found: dict[Case, dict[str, Any]] = {}
    for row in rows:
        case, end = replace(Case(**row["case"]), rate=1.0), row["results"][-1]
        if case not in found or end["loss"] < found[case]["loss"]:
            found[case] = end
    return found


def draw(rows: Sequence[dict[str, Any]], teachers: Sequence[str], path: Path) -> None:
    """Plot the final loss against the tokens, a panel for each teacher. Lines are models without
    kept layers, or from scratch; other markers those with kept layers; dots are seeds."""
    ends = best(rows)
    figure = matplotlib.figure.Figure((6.5 * len(teachers), 5), layout="constrained")
    for axes, name in zip(
        figure.subplots(1, len(teachers), squeeze=False)[0], teachers, strict=True
    ):
        for (number, mechanism), (kept, style) in product(enumerate(MECHANISMS), STYLES.items()):
            points: dict[int, list[float]] = {}
            for case, end in ends.items():
                if (case.teacher, case.mechanism, case.kept) == (name, mechanism, kept):
                    points.setdefault(end["tokens"], []).append(end["loss"])
            if not points:
                continue
            words = {"none": "", SCRATCH: f"; {SCRATCH}"}.get(kept, f"; {kept} kept")
            color, tokens = f"C{number}", sorted(points)
            means = [statistics.mean(points[x]) for x in tokens]
            axes.plot(tokens, means, style, color=color, label=mechanism + words)
            for x in tokens:
                axes.plot([x] * len(points[x]), points[x], ".", color=color)
        of_teacher = [row for row in rows if row["case"]["teacher"] == name]
        losses = {x["name"]: x["loss"] for row in of_teacher for x in row["results"]}
        if "teacher" in losses:
            axes.axhline(losses["teacher"], color="black", label="teacher")
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
