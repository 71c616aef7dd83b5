"""Draw the README's first figure from committed results.

    python benchmarks/front_page.py

Needs mechanisms.json and the study long_context in benchmarks/results.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib.figure
from common import ROOT
from matplotlib.axes import Axes

from heinsen_jax.study import load_study, results_of, sweeps

RESULTS = ROOT / "benchmarks/results"
SOFTMAX, LOG = sweeps.COLORS["softmax"], sweeps.COLORS["log"]
DECAY = sweeps.COLORS["log, decay by head"]
COSTS = {
    "forward_backward_seconds": ("Forward and backward pass of one layer", "seconds"),
    "state_bytes": ("State or cache of one sequence", "bytes"),
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


LAYERS = {
    "log": Label("log-attention", LOG, -3, (-6, -18), "left"),
    "softmax": Label("softmax attention", SOFTMAX, -1, (-12, -3)),
}
BESIDE = -1, (14, -4), "left"
MODELS = {
    "Mamba-2": Label("Mamba-2", "0.5", *BESIDE),
    "log, decay by head": Label("log-attention with decay", DECAY, *BESIDE),
    "softmax, rotary": Label("softmax, rotary", SOFTMAX, *BESIDE),
    "alternating log and window of 64": Label("log and windows of 64", DECAY, *BESIDE),
    "3 log, then softmax": Label("3 log, then softmax", DECAY, *BESIDE),
}


def main() -> None:
    figure = matplotlib.figure.Figure(figsize=(12, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    measured = json.loads((RESULTS / "mechanisms.json").read_text())["mechanisms"]
    for axes, (cost, (title, unit)) in zip(panels, COSTS.items(), strict=False):
        for name, label in LAYERS.items():
            of_length = {int(length): x for length, x in measured[name][cost].items()}
            draw(axes, label, of_length)
        axes.set(title=title, xlabel="tokens", ylabel=unit, xscale="log", yscale="log")
        axes.margins(y=0.15)
    draw_losses(panels[2])
    for axes in panels:
        axes.title.set_fontsize("medium")
    figure.savefig(RESULTS / "front_page.png", dpi=110)


def draw(axes: Axes, label: Label, of_length: Mapping[int, float]) -> None:
    x, y = list(of_length), list(of_length.values())
    axes.plot(x, y, "o-", color=label.color)
    label.write(axes, x, y)
    axes.grid(alpha=0.3)


def draw_losses(axes: Axes) -> None:
    """Plot the mean over seeds against the length of the evaluated sequences."""
    study = load_study(ROOT / "configs/studies/long_context.py")
    for result in results_of(study, RESULTS / "studies/long_context"):
        if label := MODELS.get(result.compared["model"]):
            draw(axes, label, {length: result.mean(loss) for length, loss in LOSSES.items()})
    axes.set(
        title="Validation loss of Python code",
        xlabel="tokens per sequence",
        ylabel="nats per token, 3 seeds",
        xscale="log",
    )
    axes.set_xticks(list(LOSSES), list(map(str, LOSSES)))
    axes.minorticks_off()


if __name__ == "__main__":
    main()
