"""Power laws that are fitted to results of studies, and their plot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from scipy import stats

from studies.labels import Line
from studies.plots import Cost, LinePlot, by_label, is_measured
from studies.records import Comparison


@dataclass(frozen=True)
class Fit:
    """The least-squares fit of log y = log a - b log x, a power law y = a x^(-b).

    Attributes:
      scale: a.
      exponent: b; positive if y decreases.
      interval: 95% confidence interval of b, by Student's t-distribution of its error: it assumes
        that log y deviates from the line independently, with one variance.
    """

    scale: float
    exponent: float
    interval: tuple[float, float]

    def __call__(self, x: float) -> float:
        return self.scale * x**-self.exponent

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.exponent:.4f} [{low:.4f}, {high:.4f}]"


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fit a power law to positive values; None for fewer than three points, or a single x.

    Examples:
      >>> fit = fit_power_law([1, 10, 100], [3.0, 0.3, 0.03])
      >>> round(fit.scale, 6), round(fit.exponent, 6)
      (3.0, 1.0)
    """
    if len(x) < 3 or len(set(x)) < 2:
        return None
    (slope, intercept), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    width = float(stats.t.ppf(0.975, len(x) - 2) * np.sqrt(covariance[0, 0]))
    exponent = -float(slope)
    return Fit(math.exp(intercept), exponent, (exponent - width, exponent + width))


def set_ticks(axes: Axes) -> None:
    """Ticks of logarithmic axes that may span less than a power of ten: 500k, 1M; 1.2, 1.4."""
    none = ticker.NullLocator()
    axes.xaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 5)), minor_locator=none)
    axes.xaxis.set(major_formatter=ticker.EngFormatter(sep=""))
    low, high = axes.get_ylim()
    if high < 10 * low:
        axes.yaxis.set(major_locator=ticker.AutoLocator(), minor_locator=none)
        axes.yaxis.set(major_formatter=ticker.ScalarFormatter())


@dataclass(frozen=True)
class PowerLawPlot(LinePlot):
    """Plot of a metric against a cost, with a fitted power law per label of an axis. The report has
    a table of the exponents.

    Attributes:
      y: a metric, above 0.
      x: a cost, as in `Points`.
    """

    y: str
    x: Cost

    @property
    def metrics(self) -> list[str]:
        return [self.y]

    def fits(self, results: Sequence[Comparison]) -> dict[str, Fit | None]:
        """The fits to the means of the selected results, by the labels of the lines."""
        return {label: self._fit(group) for label, group in self._by_line(results).items()}

    def differences(self, results: Sequence[Comparison], baseline: str) -> dict[str, Fit | None]:
        """The fits to the means, divided by the means of a line: their exponents are differences
        from its exponent.

        Args:
          results: results of the study.
          baseline: label of the line.
        """
        lines = self._by_line(results)
        relative_to = {self._scale(x): x.mean(self.y) for x in lines.pop(baseline)}
        return {label: self._fit(group, relative_to) for label, group in lines.items()}

    def _by_line(self, results: Sequence[Comparison]) -> dict[str, list[Comparison]]:
        selected = self.selected(results)
        measured = [x for x in selected if is_measured(x, self.x) and is_measured(x, self.y)]
        return by_label(measured, self.lines)

    def _scale(self, result: Comparison) -> tuple[str, ...]:
        """The labels of a result, without the label of its line."""
        return tuple(label for axis, label in result.compared.items() if axis != self.lines)

    def _fit(
        self,
        results: Sequence[Comparison],
        relative_to: Mapping[tuple[str, ...], float] | None = None,
    ) -> Fit | None:
        """Fit the means, or their ratios to the means `relative_to` at the same scales."""
        if relative_to is not None:
            results = [x for x in results if self._scale(x) in relative_to]
        y = [x.mean(self.y) / (relative_to[self._scale(x)] if relative_to else 1) for x in results]
        return fit_power_law([x.mean(self.x) for x in results], y)

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> list[Line]:
        drawn = []
        for label, group in self._by_line(results).items():
            group.sort(key=lambda result: result.mean(self.x))
            color = self.color(group[0])
            costs = [result.mean(self.x) for result in group]
            for cost, result in zip(costs, group, strict=True):
                values = result.values(self.y)
                axes.plot([cost] * len(values), values, "o", color=color, markersize=4)
            y = [result.mean(self.y) for result in group]
            if (fit := self._fit(group)) is not None:
                y = [fit(cost) for cost in costs]
                axes.plot(costs, y, color=color, linewidth=1.5)
            drawn.append(Line(label, costs, y, color))
        axes.set(xlabel=self.cost_label(self.x), ylabel=self.label(self.y))
        axes.set(xscale="log", yscale="log")
        set_ticks(axes)
        default = f"{self.y.replace('_', ' ')} against {self.cost_name(self.x)}"
        self.set_title(axes, default, results, "dots: seeds; lines: power laws")
        return drawn
