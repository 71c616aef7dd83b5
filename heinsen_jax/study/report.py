"""What came out of a study: a table in Markdown, and plots."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.figure
from matplotlib.axes import Axes

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One line of the table: what is compared, at its best.

    Attributes:
      compared: labels that tell it apart, by their axes.
      tuned: labels of the best of the other axes.
      rows: of its seeds.
    """

    compared: dict[str, str]
    tuned: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """Of each seed; of a run that failed there is none."""
        found = [row.get("metrics", {}).get(metric, row.get(metric)) for row in self.rows]
        return [x for x in found if x is not None]

    def mean(self, metric: str) -> float:
        """Of all seeds; NaN if there is none."""
        return statistics.fmean(self.values(metric) or [math.nan])


@dataclass(frozen=True)
class Points:
    """A metric against what a run costs, a line for each label of an axis.

    Attributes:
      y: a metric.
      x: "state_bytes", "parameters" or "seconds".
      lines: the axis.
    """

    y: str
    x: str = "state_bytes"
    lines: str = "mechanism"

    def draw(self, axes: Axes, results: Sequence[Result]) -> None:
        for style, (label, of_line) in zip(_styles(), _by(results, self.lines), strict=False):
            of_line = [result for result in of_line if result.values(self.y)]
            pairs = sorted(
                ((result.mean(self.x), result) for result in of_line), key=lambda x: x[0]
            )
            axes.plot(
                [x for x, _ in pairs],
                [result.mean(self.y) for _, result in pairs],
                label=label,
                **style,
            )
            each = [(x, y) for x, result in pairs for y in result.values(self.y)]
            axes.plot(*zip(*each, strict=True), ".", color=style["color"], markersize=3)
        axes.set(xlabel=self.x.replace("_", " "), ylabel=self.y.replace("_", " "), xscale="log")


@dataclass(frozen=True)
class Lengths:
    """Accuracy against the length it was tested at, a line for each label of an axis.

    Attributes:
      lengths: of the tests, `accuracy_<length>` among the metrics.
      lines: the axis.
    """

    lengths: tuple[int, ...]
    lines: str = "mechanism"

    def draw(self, axes: Axes, results: Sequence[Result]) -> None:
        for style, (label, of_line) in zip(_styles(), _by(results, self.lines), strict=False):
            for result in of_line:
                means = [result.mean(f"accuracy_{length}") for length in self.lengths]
                axes.plot(self.lengths, means, label=label, **style)
        axes.set(xlabel="length", ylabel="accuracy", xscale="log")
        axes.set_xticks(self.lengths, [str(length) for length in self.lengths])
        axes.minorticks_off()


@dataclass(frozen=True)
class Ranking:
    """All seeds of each line of the table, in order of their mean.

    Attributes:
      metric: the order's.
    """

    metric: str

    def draw(self, axes: Axes, results: Sequence[Result]) -> None:
        ranked = [result for result in results if result.values(self.metric)]
        ranked.sort(key=lambda result: -result.mean(self.metric))
        for place, result in enumerate(ranked):
            values = result.values(self.metric)
            axes.plot(values, [place] * len(values), "o", color="C0", markersize=4, alpha=0.6)
            axes.plot(result.mean(self.metric), place, "|", color="black", markersize=12)
        axes.set_yticks(range(len(ranked)), [" ".join(x.compared.values()) for x in ranked])
        axes.set_xlabel(self.metric.replace("_", " "))


Plot = Points | Lengths | Ranking


def draw(plots: Sequence[Plot], results: Sequence[Result]) -> matplotlib.figure.Figure:
    """All plots, side by side."""
    size = 7.5 * len(plots), max(4.5, 0.28 * len(results) + 1 if _has_ranking(plots) else 0)
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    for plot, axes in zip(plots, figure.subplots(1, len(plots), squeeze=False)[0], strict=True):
        plot.draw(axes, results)
        axes.grid(alpha=0.3)
        if not isinstance(plot, Ranking):
            axes.legend(fontsize="x-small", ncols=2)
    return figure


def _has_ranking(plots: Sequence[Plot]) -> bool:
    return any(isinstance(plot, Ranking) for plot in plots)


def table(results: Sequence[Result], metric: str, shown: Sequence[str]) -> str:
    """A line for each result: what it is, what it costs, the mean, and each seed.

    Raises:
      ValueError: there is nothing to show.
    """
    axes = [*results[0].compared, *results[0].tuned]
    costs = ["parameters", "state_bytes"]
    head = [*axes, *costs, metric, "of each seed", *shown]
    lines = [[x.replace("_", " ") for x in head], ["---"] * len(head)]
    for result in results:
        values = result.values(metric)
        each = ", ".join(f"{x:.4f}" for x in values) or result.rows[0].get("failed", "")
        means = (result.mean(name) for name in (metric, *shown))
        mean, *others = ("" if math.isnan(x) else f"{x:.4f}" for x in means)
        numbers = [f"{result.mean(cost):,.0f}" for cost in costs]
        labels = [*result.compared.values(), *result.tuned.values()]
        lines.append([*labels, *numbers, mean, each, *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by(results: Sequence[Result], axis: str) -> list[tuple[str, list[Result]]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.compared[axis], []).append(result)
    return list(groups.items())


def _styles() -> list[dict[str, Any]]:
    """Of lines that are told apart by colour and mark."""
    marks = "osv^D*"
    return [
        {"color": f"C{i % 10}", "marker": marks[i // 10 + i % 2 * 3], "markersize": 5}
        for i in range(30)
    ]
