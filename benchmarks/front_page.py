"""Draw the README's figure from committed results, for wide and for narrow screens.

    python benchmarks/front_page.py

Needs mechanisms.json and the results of the study code_contexts in benchmarks/results.
"""

import json

import matplotlib.figure
from common import ROOT
from matplotlib.axes import Axes

from studies import Points, load_study, results_of, sweeps

RESULTS = ROOT / "benchmarks/results"
STUDY = "code_contexts"
LAYERS = {"softmax": "softmax attention", "log": "log-attention"}
COLORS = {"softmax": sweeps.COLORS["softmax"], "log": sweeps.COLORS["log, decay by head"]}


def main() -> None:
    wide = matplotlib.figure.Figure(figsize=(12, 4), layout="constrained")
    draw(*wide.subplots(1, 2, width_ratios=(1, 2)))
    wide.savefig(RESULTS / "front_page.png", dpi=150)
    narrow = matplotlib.figure.Figure(figsize=(6, 8), layout="constrained")
    draw(*narrow.subplots(2))
    narrow.savefig(RESULTS / "front_page_narrow.png", dpi=150)


def draw(times: Axes, losses: Axes) -> None:
    draw_times(times)
    study = load_study(STUDY)
    (frontier,) = (plot for plot in study.plots if isinstance(plot, Points))
    lines = frontier.draw(losses, results_of(study, RESULTS / "studies" / STUDY))
    losses.set(
        title="Python code: loss at 2,048 tokens (line: Pareto frontier)",
        xlabel="bytes of state, for one sequence",
        ylabel="test loss (nats per token)",
    )
    for axes in (times, losses):
        axes.title.set_fontsize("medium")
    frontier.write_names(losses, lines)


def draw_times(axes: Axes) -> None:
    measured = json.loads((RESULTS / "mechanisms.json").read_text())["mechanisms"]
    for name, label in LAYERS.items():
        by_length = measured[name]["forward_backward_seconds"]
        x, y = [*map(int, by_length)], [*by_length.values()]
        axes.plot(x, y, "o-", color=COLORS[name], label=label)
    axes.legend()
    axes.grid(alpha=0.3)
    axes.set(
        title="One layer, forward and backward, 2 CPU cores",
        xlabel="tokens",
        ylabel="seconds",
        xscale="log",
        yscale="log",
    )


if __name__ == "__main__":
    main()
