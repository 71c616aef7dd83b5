"""Plot of a metric against a cost, with the Pareto frontier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from studies.labels import GRAY, Line, label_points
from studies.plots import BARS, Cost, LinePlot, by_label, is_measured
from studies.records import Comparison, is_larger_better


@dataclass(frozen=True)
class Points(LinePlot):
    """Plot of a metric against a cost, with one line per label of an axis.

    Attributes:
      y: a metric.
      x: "state_bytes", "longest_state_bytes", "parameters", "tokens" or "flops"; results without it
        are omitted.
      frontier: whether to draw the best value that is attained with at most a cost (the Pareto
        frontier), and to name only its lines and the highlighted ones; others are gray points.
    """

    y: str
    x: Cost = "state_bytes"
    frontier: bool = False

    @property
    def metrics(self) -> list[str]:
        return [self.y]

    def draw(self, axes: Axes, results: Sequence[Comparison]) -> list[Line]:
        measured = [x for x in results if is_measured(x, self.x) and is_measured(x, self.y)]
        best, drawn = self._best(measured) if self.frontier else measured, []
        for label, line_results in by_label(measured, self.lines).items():
            line_results.sort(key=lambda result: result.mean(self.x))
            places = [place for place, result in enumerate(line_results) if result in best]
            if places or self.color(line_results[0]) != GRAY:
                points = [(result.mean(self.x), result, self.y) for result in line_results]
                place = places[-1] if places else -1
                drawn.append(replace(self.line(axes, label, points), place=place))
            else:
                for result in line_results:
                    x, y = result.mean(self.x), result.mean(self.y)
                    axes.plot(x, y, "o", color=GRAY, markersize=3)
                    drawn.append(Line("", [x], [y], GRAY))
        if self.frontier and best:
            drawn.append(self._draw_frontier(axes, best, max(x.mean(self.x) for x in measured)))
        self.draw_chance(axes)
        axes.set(xlabel=self.cost_label(self.x), ylabel=self.label(self.y), xscale="log")
        axes.margins(0.15)  # space for names
        if is_larger_better(self.y):  # an accuracy
            axes.set_ylim(0, 1.1)
        note = "steps: the Pareto frontier" if self.frontier else ""
        default = f"{self.y.replace('_', ' ')} against {self.cost_name(self.x)}"
        self.set_title(axes, default, results, BARS, note)
        return drawn

    def _best(self, results: Sequence[Comparison]) -> list[Comparison]:
        """The results, in the order of their cost, that are better than all before."""
        sign = 1 if is_larger_better(self.y) else -1
        best: list[Comparison] = []
        for result in sorted(results, key=lambda x: (x.mean(self.x), -sign * x.mean(self.y))):
            if not best or sign * result.mean(self.y) > sign * best[-1].mean(self.y):
                best.append(result)
        return best

    def _draw_frontier(self, axes: Axes, best: Sequence[Comparison], end: float) -> Line:
        """Draw the steps through the best results, up to the largest cost."""
        costs = [*(result.mean(self.x) for result in best), end]
        values = [result.mean(self.y) for result in best]
        x = [cost for cost in costs for _ in range(2)][1:-1]
        y = [value for value in values for _ in range(2)]
        axes.plot(x, y, color="black", linewidth=1, zorder=1)
        axes.plot(costs[:-1], values, "o", color="black", fillstyle="none", markersize=8, zorder=4)
        return Line("", x, y, "black")

    def write_names(self, axes: Axes, lines: Sequence[Line]) -> None:
        if all(len(line.x) > 1 for line in lines) and not self.frontier:
            super().write_names(axes, lines)
            return
        avoided = [line for line in lines if not line.name]
        if self.chance is not None:
            avoided.append(Line("chance", axes.get_xlim(), [self.chance] * 2, "black"))
        label_points(axes, [line for line in lines if line.name], avoided)
