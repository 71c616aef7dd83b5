"""Draw the README's first figure from committed results.

    python benchmarks/front_page.py

Needs mechanisms.json and the study language_model in benchmarks/results.
"""

import json
from collections.abc import Mapping
from typing import Any

import matplotlib.figure
from common import ROOT
from matplotlib.axes import Axes

from heinsen_jax.study import load_study, results_of, sweeps

RESULTS = ROOT / "benchmarks/results"
SOFTMAX, LOG = sweeps.COLORS["softmax"], sweeps.COLORS["log"]
LAYERS = {"log": ("log-attention", LOG), "softmax": ("softmax attention", SOFTMAX)}
MODELS = {
    "log, decay by head": (
        "log-attention with decay\nand convolutions",
        sweeps.COLORS["log, decay by head"],
    ),
    "softmax, rotary": ("softmax attention,\nrotary positions", SOFTMAX),
    "log, the paper's model": ("log-attention,\nthe paper's model", LOG),
}
"""Names and colors of the models; softmax attention with learned positions ends at length 64."""
COSTS = {
    "forward_backward_seconds": ("Time of a training step of one layer", "seconds"),
    "state_bytes": ("Memory of a sequence while decoding", "bytes"),
}


def main() -> None:
    figure = matplotlib.figure.Figure(figsize=(11.5, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    measured = json.loads((RESULTS / "mechanisms.json").read_text())["mechanisms"]
    for axes, (cost, (title, unit)) in zip(panels, COSTS.items(), strict=False):
        draw_cost(axes, {name: measured[name][cost] for name in LAYERS})
        finish(axes, title, "tokens", unit)
    draw_losses(panels[2])
    figure.savefig(RESULTS / "front_page.png", dpi=130)


def draw_cost(axes: Axes, measured: Mapping[str, Mapping[str, float]]) -> None:
    for name, (label, color) in LAYERS.items():
        lengths, values = [int(length) for length in measured[name]], measured[name].values()
        axes.loglog(lengths, list(values), "o-", color=color)
        write(axes, label, color, (lengths[-1], list(values)[-1]), (-8, 4), "right")


def draw_losses(axes: Axes) -> None:
    """Plot the mean over seeds against the length of the evaluated sequences."""
    study = load_study(ROOT / "configs/studies/language_model.py")
    metrics = {64: "loss", 256: "loss_256", 1024: "loss_1024"}
    places = iter(((-4, 10, "right"), (-48, -30, "right"), (-4, 8, "right")))
    for result in results_of(study, RESULTS / "studies/language_model"):
        if (name := result.compared["model"]) not in MODELS:
            continue
        (label, color), (right, up, side) = MODELS[name], next(places)
        means = [result.mean(metric) for metric in metrics.values()]
        axes.plot(list(metrics), means, "o-", color=color)
        write(axes, label, color, (1024, means[-1]), (right, up), side)
    axes.set_xscale("log")
    axes.set_xticks(list(metrics), list(map(str, metrics)))
    axes.minorticks_off()
    finish(
        axes,
        "Validation loss, trained on 64 characters",
        "characters per sequence",
        "nats per character, mean of 3 seeds",
    )


def write(
    axes: Axes, label: str, color: str, at: tuple[float, float], by: tuple[float, float], side: str
) -> None:
    axes.annotate(
        label, at, by, textcoords="offset points", color=color, weight="bold", ha=side, fontsize=9
    )


def finish(axes: Axes, title: str, across: str, unit: str) -> None:
    axes.set(xlabel=across, ylabel=unit)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
