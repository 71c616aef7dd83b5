"""Reports of studies: a table in Markdown, and plots."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import matplotlib.figure
from matplotlib.axes import Axes

from heinsen_jax.environment import Environment


class Row(TypedDict):
    """Record of a run: `metrics` or the reason why it `failed`, costs, and environment."""

    labels: NotRequired[dict[str, str]]
    fingerprint: NotRequired[str]
    metrics: NotRequired[dict[str, float]]
    failed: NotRequired[str]
    parameters: int
    state_bytes: int
    seconds: float
    environment: Environment


@dataclass(frozen=True)
class Comparison:
    """A row of the table, with the best tuned values.

    Attributes:
      compared: labels of the compared axes.
      tuned: best labels of the tuned axes.
      rows: records of its seeds.
    """

    compared: dict[str, str]
    tuned: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """Values of a metric for all seeds, without failed runs."""
        found = [_value(row, metric) for row in self.rows]
        return [x for x in found if x is not None]

    def mean(self, metric: str) -> float:
        """Mean over the seeds; NaN without values."""
        return statistics.fmean(self.values(metric) or [math.nan])

    def spread(self, metric: str) -> float:
        """Half the range between the best and the worst seed."""
        values = self.values(metric)
        return (max(values) - min(values)) / 2 if values else math.nan


@dataclass(frozen=True)
class Points:
    """Plot of a metric against a cost, with one line per label of an axis.

    Attributes:
      y: a metric.
      x: "state_bytes", "parameters" or "seconds".
      lines: the axis.
    """

    y: str
    x: str = "state_bytes"
    lines: str = "mechanism"

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> None:
        for style, (label, of_line) in zip(_styles(), _by(results, self.lines), strict=False):
            valid = [result for result in of_line if result.values(self.y)]
            valid.sort(key=lambda result: result.mean(self.x))
            means = [(result.mean(self.x), result.mean(self.y)) for result in valid]
            axes.plot([x for x, _ in means], [y for _, y in means], label=label, **style)
            for result in valid:
                seeds = result.values(self.y)
                at = [result.mean(self.x)] * len(seeds)
                axes.plot(at, seeds, ".", color=style["color"], markersize=3)
        axes.set(xlabel=self.x.replace("_", " "), ylabel=self.y.replace("_", " "), xscale="log")


@dataclass(frozen=True)
class LengthPlot:
    """Plot of accuracy against the test length, with one line per label of an axis.

    Attributes:
      lengths: test lengths, with metrics `accuracy_<length>`.
      lines: the axis.
    """

    lengths: tuple[int, ...]
    lines: str = "mechanism"

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> None:
        for style, (label, of_line) in zip(_styles(), _by(results, self.lines), strict=False):
            for result in of_line:
                means = [result.mean(f"accuracy_{length}") for length in self.lengths]
                axes.plot(self.lengths, means, label=label, **style)
        axes.set(xlabel="length", ylabel="accuracy", xscale="log")
        axes.set_xticks(self.lengths, [str(length) for length in self.lengths])
        axes.minorticks_off()


@dataclass(frozen=True)
class Ranking:
    """Plot of all seeds of each row, ranked by their mean.

    Attributes:
      metric: the ranked metric.
    """

    metric: str

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> None:
        ranked = [result for result in results if result.values(self.metric)]
        ranked.sort(key=lambda result: -result.mean(self.metric))
        for row, result in enumerate(ranked):
            values = result.values(self.metric)
            axes.plot(values, [row] * len(values), "o", color="C0", markersize=4, alpha=0.6)
            axes.plot(result.mean(self.metric), row, "|", color="black", markersize=12)
        axes.set_yticks(range(len(ranked)), [" ".join(x.compared.values()) for x in ranked])
        axes.set_xlabel(self.metric.replace("_", " "))


Plot = Points | LengthPlot | Ranking


def draw(plots: Sequence[Plot], results: Sequence[Comparison]) -> matplotlib.figure.Figure:
    """Draw all plots side by side."""
    figure = matplotlib.figure.Figure(figsize=(7.5 * len(plots), 4.5), layout="constrained")
    for plot, axes in zip(plots, figure.subplots(1, len(plots), squeeze=False)[0], strict=True):
        plot.draw(axes, results)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.set_figheight(max(figure.get_figheight(), 1 + 0.28 * len(axes.get_yticks())))
    return figure


def table(results: Sequence[Comparison], metric: str, extra_metrics: Sequence[str]) -> str:
    """Table of the results: labels, costs, mean and spread of the metric, and each seed."""
    axes = [*results[0].compared, *results[0].tuned]
    costs = ["parameters", "state_bytes"]
    head = [*axes, *costs, metric, "by seed", *extra_metrics]
    lines = [[x.replace("_", " ") for x in head], ["---"] * len(head)]
    for result in results:
        found = [(_value(row, metric), row) for row in result.rows]
        each = [row.get("failed", "") if x is None else f"{x:.4f}" for x, row in found]
        mean, *others = (_with_spread(result, name) for name in (metric, *extra_metrics))
        numbers = [f"{result.mean(cost):,.0f}" for cost in costs]
        labels = [*result.compared.values(), *result.tuned.values()]
        lines.append([*labels, *numbers, mean, ", ".join(each), *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _with_spread(result: Comparison, metric: str) -> str:
    if not (values := result.values(metric)):
        return ""
    mean = f"{result.mean(metric):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {result.spread(metric):.4f}"


def _value(row: Row, name: str) -> float | None:
    return row.get("metrics", {}).get(name, row.get(name))


def _by(results: Sequence[Comparison], axis: str) -> list[tuple[str, list[Comparison]]]:
    groups: dict[str, list[Comparison]] = {}
    for result in results:
        groups.setdefault(result.compared[axis], []).append(result)
    return list(groups.items())


class Style(TypedDict):
    color: str
    marker: str
    markersize: int


def _styles() -> Iterator[Style]:
    """Iterate over line styles, distinguished by color and marker."""
    for number in itertools.count():
        mark = "osv^D*"[(number // 10 + number % 2 * 3) % 6]
        yield {"color": f"C{number % 10}", "marker": mark, "markersize": 5}
