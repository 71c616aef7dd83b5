"""Draw the README's first figure from committed results.

    python benchmarks/front_page.py

Needs mechanisms.json and the study language_model in benchmarks/results.
"""

import json
from typing import Any

import matplotlib.figure
from common import ROOT
from matplotlib.axes import Axes

from heinsen_jax.study import load_study, results_of

RESULTS = ROOT / "benchmarks/results"
STYLES = {"log": ("log-attention", "C3"), "softmax": ("softmax attention", "C0")}
LINES = {
    "log": ("log-attention", "C3"),
    "softmax, rotary": ("softmax, rotary", "C0"),
    "softmax, learned positions": ("softmax, learned positions", "C9"),
    "the paper's model": ("log-attention, the paper's model", "C1"),
}
COSTS = {
    "forward_backward_seconds": "forward and backward pass of a layer, seconds",
    "state_bytes": "state or cache of a sequence, bytes",
}


def main() -> None:
    figure = matplotlib.figure.Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    measured = json.loads((RESULTS / "mechanisms.json").read_text())["mechanisms"]
    for axes, (cost, title) in zip(panels, COSTS.items(), strict=False):
        draw_cost(axes, measured, cost, title)
    draw_losses(panels[2])
    figure.savefig(RESULTS / "front_page.png", dpi=130)


def draw_cost(axes: Axes, measured: dict[str, Any], cost: str, title: str) -> None:
    for name, (label, color) in STYLES.items():
        of_length = {int(length): x for length, x in measured[name][cost].items()}
        axes.plot(list(of_length), list(of_length.values()), "o-", color=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_losses(axes: Axes) -> None:
    """Plot the mean over seeds, and each seed, against the length of the evaluated sequences."""
    study = load_study(ROOT / "configs/studies/language_model.py")
    metrics = {64: "loss", 256: "loss_256", 1024: "loss_1024"}
    for result in results_of(study, RESULTS / "studies/language_model"):
        label, color = LINES[result.compared["model"]]
        valid = [length for length, metric in metrics.items() if result.values(metric)]
        means = [result.mean(metrics[length]) for length in valid]
        axes.plot(valid, means, "o-", color=color, label=label)
        for length in valid:
            seeds = result.values(metrics[length])
            axes.plot([length] * len(seeds), seeds, ".", color=color, markersize=3)
    axes.set(
        xscale="log",
        xlabel="sequence length, characters",
        title="validation loss (trained at length 64)",
    )
    axes.set_xticks(list(metrics), list(map(str, metrics)))
    axes.minorticks_off()
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main()
