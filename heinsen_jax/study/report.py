"""What came out of a study: a table in Markdown, and plots."""

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
    """The record of a run: its `metrics` or why it `failed`, its costs, and where it ran."""

    labels: NotRequired[dict[str, str]]
    fingerprint: NotRequired[str]
    metrics: NotRequired[dict[str, float]]
    failed: NotRequired[str]
    parameters: int
    state_bytes: int
    seconds: float
    environment: Environment


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
        found = [_value(row, metric) for row in self.rows]
        return [x for x in found if x is not None]

    def mean(self, metric: str) -> float:
        """Of all seeds; NaN if there is none."""
        return statistics.fmean(self.values(metric) or [math.nan])

    def spread(self, metric: str) -> float:
        """Half of what lies between the best and the worst seed."""
        values = self.values(metric)
        return (max(values) - min(values)) / 2 if values else math.nan


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
            there = [result for result in of_line if result.values(self.y)]
            there.sort(key=lambda result: result.mean(self.x))
            means = [(result.mean(self.x), result.mean(self.y)) for result in there]
            axes.plot([x for x, _ in means], [y for _, y in means], label=label, **style)
            for result in there:
                seeds = result.values(self.y)
                at = [result.mean(self.x)] * len(seeds)
                axes.plot(at, seeds, ".", color=style["color"], markersize=3)
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
    figure = matplotlib.figure.Figure(figsize=(7.5 * len(plots), 4.5), layout="constrained")
    for plot, axes in zip(plots, figure.subplots(1, len(plots), squeeze=False)[0], strict=True):
        plot.draw(axes, results)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.set_figheight(max(figure.get_figheight(), 1 + 0.28 * len(axes.get_yticks())))
    return figure


def table(results: Sequence[Result], metric: str, extra_metrics: Sequence[str]) -> str:
    """A line for each result: what it is, what it costs, the mean and spread, and each seed."""
    axes = [*results[0].compared, *results[0].tuned]
    costs = ["parameters", "state_bytes"]
    head = [*axes, *costs, metric, "of each seed", *extra_metrics]
    lines = [[x.replace("_", " ") for x in head], ["---"] * len(head)]
    for result in results:
        found = [(_value(row, metric), row) for row in result.rows]
        each = [row.get("failed", "") if x is None else f"{x:.4f}" for x, row in found]
        mean, *others = (_with_spread(result, name) for name in (metric, *extra_metrics))
        numbers = [f"{result.mean(cost):,.0f}" for cost in costs]
        labels = [*result.compared.values(), *result.tuned.values()]
        lines.append([*labels, *numbers, mean, ", ".join(each), *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _with_spread(result: Result, metric: str) -> str:
    if not (values := result.values(metric)):
        return ""
    mean = f"{result.mean(metric):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {result.spread(metric):.4f}"


def _value(row: Row, name: str) -> float | None:
    return row.get("metrics", {}).get(name, row.get(name))


def _by(results: Sequence[Result], axis: str) -> list[tuple[str, list[Result]]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.compared[axis], []).append(result)
    return list(groups.items())


class Style(TypedDict):
    color: str
    marker: str
    markersize: int


def _styles() -> Iterator[Style]:
    """Of lines that are told apart by colour and mark, without end."""
    for number in itertools.count():
        mark = "osv^D*"[(number // 10 + number % 2 * 3) % 6]
        yield {"color": f"C{number % 10}", "marker": mark, "markersize": 5}
