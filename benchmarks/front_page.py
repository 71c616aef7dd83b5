"""Draw the README's figure from committed results, for wide and for narrow screens.

    python benchmarks/front_page.py

Needs mechanisms.json and the results of the study long_context in benchmarks/results.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib.figure
from common import ROOT
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from studies import load_study, results_of, sweeps

RESULTS = ROOT / "benchmarks/results"
SOFTMAX, LOG = sweeps.COLORS["softmax"], sweeps.COLORS["log"]
COSTS = {
    "forward_backward_seconds": ("One layer, forward and backward, on 2 CPU cores", "seconds"),
    "state_bytes": ("Its state or cache, for one sequence", "bytes"),
}
LOSSES = {32: "loss_32", 128: "loss_128", 512: "loss", 2048: "loss_2048"}


@dataclass(frozen=True)
class Label:
    """A name, written beside a point of its line."""

    text: str
    color: str
    point: int  # index
    offset: tuple[float, float]  # in points
    side: Literal["left", "right"] = "right"
    line: Literal["o-", "o--"] = "o-"

    def write(self, axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
        axes.annotate(
            self.text,
            (x[self.point], y[self.point]),
            xytext=self.offset,
            textcoords="offset points",
            color=self.color,
            weight="bold",
            ha=self.side,
        )


def beside(text: str, color: str, height: float = -4, *, grows: bool = False) -> Label:
    """A name to the right of the last point; the line is dashed if a cache `grows`."""
    return Label(text, color, -1, (14, height), "left", "o--" if grows else "o-")


LAYERS = {
    "log": Label("log-attention", LOG, 0, (-4, -18), "left"),
    "softmax": Label("softmax attention", SOFTMAX, -1, (-12, -3)),
}
MODELS = {
    "Gated DeltaNet": beside("Gated DeltaNet", sweeps.COLORS["Gated DeltaNet"]),
    "log, decay by head": beside("log-attention with decay", LOG),
    "alternating log and window of 64": beside("log and windows of 64", "black"),
    "softmax, ALiBi": beside("softmax attention, ALiBi", SOFTMAX, 0, grows=True),
    "alternating log and softmax": beside("log and softmax", "0.4", -9, grows=True),
}
"""Labels of models of the study."""


def main() -> None:
    wide = matplotlib.figure.Figure(figsize=(12, 3.4), layout="constrained")
    draw_panels(wide.subfigures(1, 3, squeeze=False, width_ratios=(1, 1, 1.4)).flat)
    wide.savefig(RESULTS / "front_page.png", dpi=150)
    narrow = matplotlib.figure.Figure(figsize=(4.6, 9), layout="constrained")
    draw_panels(narrow.subfigures(3, squeeze=False).flat)
    narrow.savefig(RESULTS / "front_page_narrow.png", dpi=150)


def draw_panels(figures: Iterable[SubFigure]) -> None:
    panels = [figure.subplots() for figure in figures]
    measured = json.loads((RESULTS / "mechanisms.json").read_text())["mechanisms"]
    for axes, (cost, (title, unit)) in zip(panels, COSTS.items(), strict=False):
        for model, label in LAYERS.items():
            by_length = {int(length): x for length, x in measured[model][cost].items()}
            draw(axes, label, by_length)
        axes.set(title=title, xlabel="tokens", ylabel=unit, xscale="log", yscale="log")
        axes.margins(y=0.2)
    draw_losses(panels[2])
    for axes in panels:
        axes.title.set_fontsize("medium")


def draw(axes: Axes, label: Label, by_length: Mapping[int, float]) -> None:
    x, y = list(by_length), list(by_length.values())
    axes.plot(x, y, label.line, color=label.color)
    label.write(axes, x, y)
    axes.grid(alpha=0.3)


def draw_losses(axes: Axes) -> None:
    """Plot the mean over seeds against the length of the evaluated sequences."""
    study = load_study(ROOT / "studies/grids/long_context.py")
    comparisons = results_of(study, RESULTS / "studies/long_context")
    results = {result.compared["model"]: result for result in comparisons}
    for model, label in MODELS.items():
        by_length = {length: results[model].mean(loss) for length, loss in LOSSES.items()}
        draw(axes, label, by_length)
    axes.set(
        title="Python code (dashed: the cache grows)",
        xlabel="tokens per sequence",
        ylabel="validation loss (nats per token)",
        xscale="log",
    )
    axes.set_xticks(list(LOSSES), list(map(str, LOSSES)))
    axes.minorticks_off()


if __name__ == "__main__":
    main()
