"""Plots of studies: highlighted labels in color, all others gray, each named beside its line."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import matplotlib.figure
from matplotlib.axes import Axes

from heinsen_jax.config import ExperimentConfig
from heinsen_jax.objectives.loss_by_position import bucket_ends
from studies.labels import GRAY, Line, label_at_right
from studies.records import Comparison, is_larger_better

COST_LABELS = {
    "state_bytes": "state size (bytes)",
    "longest_state_bytes": "state size after the longest sequence (bytes)",
    "parameters": "parameters",
    "tokens": "training tokens",
    "flops": "training FLOPs",
}
BARS = "bars: from the lowest to the highest seed"
Cost = Literal["state_bytes", "longest_state_bytes", "parameters", "tokens", "flops"]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Fields of all plots.

    Attributes:
      title: title; by default the names of the axes.
      unit: unit of the metric, such as "nats per character".
      chance: value of the metric for guesses, drawn as a dashed line.
      highlighted: Matplotlib's colors by labels of the compared axes; other lines are gray.
      where: a label, or several, by compared axes, of the results to plot; all results by default.
    """

    title: str = ""
    unit: str = ""
    chance: float | None = None
    highlighted: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)

    def labels(self, axis: str) -> tuple[str, ...]:
        """The labels of an axis in `where`."""
        labels = self.where[axis]
        return (labels,) if isinstance(labels, str) else labels

    def selected(self, results: Sequence[Comparison]) -> list[Comparison]:
        """The results to plot."""
        return [
            x for x in results if all(x.compared[axis] in self.labels(axis) for axis in self.where)
        ]

    @property
    def named(self) -> list[str]:
        """The labels that fields of the plot name."""
        return [*self.highlighted]

    @property
    def metrics(self) -> list[str]:
        """The metrics that fields of the plot name."""
        return []

    def restricted(self, axis: str, left_out: Collection[str]) -> "Plot | None":
        """The plot without some labels of an axis; None if it has no others."""
        where = {**self.where}
        if axis in where:
            where[axis] = tuple(x for x in self.labels(axis) if x not in left_out)
            if not where[axis]:
                return None
        kept = {x: color for x, color in self.highlighted.items() if x not in left_out}
        return replace(self, highlighted=kept, where=where)

    def check(self, compared: Mapping[str, Collection[str]], base: ExperimentConfig) -> None:
        """Check the fields.

        Args:
          compared: labels of the compared axes of the study.
          base: base of the study.

        Raises:
          ValueError: a field names no axis or label, or the base does not measure the plot.
        """
        labels = [label for axis in compared.values() for label in axis]
        if unknown := [label for label in self.named if label not in labels]:
            raise ValueError(f"no compared axis has the labels {unknown}; choose from {labels}")
        for axis in self.where:
            if axis not in compared or not {*self.labels(axis)} <= {*compared[axis]}:
                raise ValueError(
                    f"where={dict(self.where)} must have labels by compared axes, which are "
                    f"{', '.join(compared)}"
                )

    def height(self, results: Sequence[Comparison]) -> float:
        """The height of the plot of these results, in inches."""
        return 4.5

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> list[Line]:
        """Draw the results without names of lines, and return the lines."""
        raise NotImplementedError

    def write_names(self, axes: Axes, lines: Sequence[Line]) -> None:
        """Write the names of the drawn lines, given the final limits and size of the axes."""

    def label(self, metric: str) -> str:
        """Label of an axis: the metric with its unit."""
        words = metric.replace("_", " ")
        return f"{words} ({self.unit})" if self.unit else words

    def cost_label(self, cost: Cost) -> str:
        """Label of an axis: a cost with its unit; training tokens are characters or bytes if the
        metric is per character or byte."""
        counted = self.unit.removeprefix("nats per ")
        is_counted = cost == "tokens" and counted != self.unit
        return f"training {counted}s" if is_counted else COST_LABELS[cost]

    def cost_name(self, cost: Cost) -> str:
        """Name of a cost, without its unit."""
        return self.cost_label(cost).partition(" (")[0]

    def name(self, result: Comparison) -> str:
        """The labels of a result that are not shared by all plotted results."""
        shared = {axis for axis in self.where if len(self.labels(axis)) == 1}
        return " ".join(label for axis, label in result.compared.items() if axis not in shared)

    def color(self, result: Comparison) -> str:
        colors = (self.highlighted.get(label) for label in result.compared.values())
        return next((color for color in colors if color), GRAY)

    def set_title(
        self, axes: Axes, default: str, results: Sequence[Comparison], seeds: str, note: str = ""
    ) -> None:
        """Set the title, a note about the seeds if they are several, and another note."""
        several = max((len(result.records) for result in results), default=0) > 1
        notes = "; ".join(filter(None, (seeds if several else "", note)))
        title = self.title or default
        axes.set_title(f"{title}\n({notes})" if notes else title, fontsize="medium")

    def line(self, axes: Axes, name: str, points: Sequence[tuple[float, Comparison, str]]) -> Line:
        """Draw the mean of the seeds at each x, with a bar over all seeds."""
        seeds = [result.values(metric) for _, result, metric in points]
        x, y = [x for x, *_ in points], [result.mean(metric) for _, result, metric in points]
        bars = [(min(values), max(values)) for values in seeds]
        line = Line(name, x, y, self.color(points[0][1]), bars)
        below = [mean - low for mean, (low, _) in zip(y, bars, strict=True)]
        above = [high - mean for mean, (_, high) in zip(y, bars, strict=True)]
        is_gray = line.color == GRAY
        axes.errorbar(
            x,
            y,
            yerr=(below, above),
            color=line.color,
            fmt="o-",
            markersize=3 if is_gray else 5,
            linewidth=1 if is_gray else 2,
            elinewidth=1,
            zorder=2 if is_gray else 3,
        )
        return line

    def draw_chance(self, axes: Axes) -> None:
        if self.chance is not None:
            axes.axhline(self.chance, color="black", linestyle="--", linewidth=1)
            at, transform = (0.01, self.chance), axes.get_yaxis_transform()
            axes.annotate("chance", at, (0, 2), transform, "offset points", fontsize=8)


@dataclass(frozen=True, kw_only=True)
class LinePlot(Plot):
    """A plot with one line per label of an axis.

    Attributes:
      lines: the axis.
    """

    lines: str = "mechanism"

    def check(self, compared: Mapping[str, Collection[str]], base: ExperimentConfig) -> None:
        super().check(compared, base)
        if self.lines not in compared:
            raise ValueError(
                f"{self}: lines must be an axis that is compared, one of {', '.join(compared)}"
            )

    def curves(
        self, axes: Axes, results: Sequence[Comparison], y: str, x: str, metrics: Mapping[int, str]
    ) -> list[Line]:
        """Draw a line through the metrics, by their x, for each result; name it by its label.

        Args:
          axes: the axes.
          results: the results to plot.
          y: name of the metrics.
          x: label of the x-axis, with its unit in brackets.
          metrics: names of the metrics by their x.
        """
        drawn = []
        for label, line_results in by_label(results, self.lines).items():
            for result in line_results:
                points = [(at, result, metric) for at, metric in metrics.items()]
                points = [point for point in points if is_measured(result, point[2])]
                name = label if len(line_results) == 1 else self.name(result)
                if points:
                    drawn.append(self.line(axes, name, points))
        self.draw_chance(axes)
        axes.set(xlabel=x, ylabel=self.label(y), xscale="log")
        axes.set_xticks([*metrics], [*map(str, metrics)])
        axes.minorticks_off()
        self.set_title(axes, f"{y} against {x.partition(' (')[0]}", results, BARS)
        return drawn

    def write_names(self, axes: Axes, lines: Sequence[Line]) -> None:
        label_at_right(axes, lines)


@dataclass(frozen=True)
class LengthPlot(LinePlot):
    """Plot of accuracy, or another metric, against the test length, with one line per label of an
    axis.

    Attributes:
      lengths: test lengths, with metrics `<metric>_<length>`.
      length_unit: unit of the lengths.
      metric: the metric.
    """

    lengths: tuple[int, ...]
    length_unit: str = "tokens"
    metric: str = "accuracy"

    @property
    def metrics(self) -> list[str]:
        return [f"{self.metric}_{length}" for length in self.lengths]

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> list[Line]:
        metrics = dict(zip(self.lengths, self.metrics, strict=True))
        return self.curves(axes, results, self.metric, f"length ({self.length_unit})", metrics)


@dataclass(frozen=True)
class PositionPlot(LinePlot):
    """Plot of the loss against the position in the context, with one line per label of an axis, for
    runs with `training.loss_by_position`. Each point is at the last position of its mean.

    Attributes:
      length: length of their longest sequences.
      position_unit: unit of the positions.
      metric: the metric, "loss" or "test_loss".
    """

    length: int
    position_unit: str = "tokens"
    metric: str = "loss"

    def check(self, compared: Mapping[str, Collection[str]], base: ExperimentConfig) -> None:
        super().check(compared, base)
        if not base.training.loss_by_position or self.length != base.data.longest:
            raise ValueError(
                f"PositionPlot({self.length}) needs training.loss_by_position and a longest "
                f"sequence of {self.length} tokens in the base, not {base.data.longest}"
            )

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> list[Line]:
        ends = bucket_ends(self.length)
        metrics = {end: f"{self.metric}_{self.length}_at_{end}" for end in ends}
        return self.curves(axes, results, self.metric, f"position ({self.position_unit})", metrics)


@dataclass(frozen=True)
class Ranking(Plot):
    """Plot of all seeds of each row, ranked by their mean.

    Attributes:
      metric: the ranked metric.
      baseline: label of the row whose mean is drawn through all rows.
    """

    metric: str
    baseline: str = ""

    @property
    def named(self) -> list[str]:
        return [*super().named, *filter(None, [self.baseline])]

    @property
    def metrics(self) -> list[str]:
        return [self.metric]

    def restricted(self, axis: str, left_out: Collection[str]) -> "Plot | None":
        plot = replace(self, baseline="") if self.baseline in left_out else self
        return super(Ranking, plot).restricted(axis, left_out)

    def height(self, results: Sequence[Comparison]) -> float:
        return 1.8 + 0.26 * len(results)

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> list[Line]:
        ranked = [result for result in results if is_measured(result, self.metric)]
        ranked.sort(key=lambda result: result.mean(self.metric))
        if not is_larger_better(self.metric):
            ranked.reverse()  # the best is the last row, at the top
        for row, result in enumerate(ranked):
            values, color = result.values(self.metric), self.color(result)
            color = "0.5" if color == GRAY else color
            axes.plot(values, [row] * len(values), "o", color=color, markersize=5, alpha=0.7)
            if len(values) > 1:
                axes.plot(result.mean(self.metric), row, "|", color="black", markersize=12)
            if self.baseline in result.compared.values():
                axes.axvline(result.mean(self.metric), color=color, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(ranked)), [*map(self.name, ranked)])
        axes.set_ylim(-0.7, len(ranked) - 0.3)
        for name, result in zip(axes.get_yticklabels(), ranked, strict=True):
            if (color := self.color(result)) != GRAY:
                name.set(color=color, weight="bold")
        if self.chance is not None:
            axes.axvline(self.chance, color="black", linestyle="--", linewidth=1)
            at, transform = (self.chance, 0.01), axes.get_xaxis_transform()
            axes.annotate("chance", at, (2, 0), transform, "offset points", fontsize=8)
        axes.set_xlabel(self.label(self.metric))
        self.set_title(axes, self.metric.replace("_", " "), results, "dots: seeds; line: mean")
        return []


def draw(title: str, plot: Plot, results: Sequence[Comparison]) -> matplotlib.figure.Figure:
    """Draw a plot, narrow enough for a phone."""
    selected = plot.selected(results)
    figure = matplotlib.figure.Figure(figsize=(7, plot.height(selected)), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    lines = plot.draw(axes, selected)
    axes.grid(alpha=0.3)
    if lines:
        plot.write_names(axes, lines)
    return figure


def is_measured(result: Comparison, metric: str) -> bool:
    """Whether a result has a value of the metric or cost for a seed."""
    return math.isfinite(result.mean(metric))


def by_label(results: Sequence[Comparison], axis: str) -> dict[str, list[Comparison]]:
    """Results by their labels of an axis."""
    groups: dict[str, list[Comparison]] = {}
    for result in results:
        groups.setdefault(result.compared[axis], []).append(result)
    return groups
