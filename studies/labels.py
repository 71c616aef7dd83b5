"""Names of lines and points of a plot, written beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import textalloc
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

GRAY = "0.75"
"""Color of lines that are not highlighted."""
_GRAY_TEXT = "0.45"


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
      name: its label; empty for a line without one.
      x: coordinates of its points.
      y: coordinates of its points.
      color: a color of Matplotlib; GRAY if it is not highlighted.
      bars: for each point the lowest and the highest value.
      place: index of the point to which the label belongs.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    bars: Sequence[tuple[float, float]] = ()
    place: int = -1

    @property
    def text_color(self) -> str:
        return _GRAY_TEXT if self.color == GRAY else self.color

    @property
    def weight(self) -> str:
        return "normal" if self.color == GRAY else "bold"


def label_at_right(axes: Axes, lines: Sequence[Line], size: float = 8) -> None:
    """Write the names at the right of the axes, as close to the ends of their lines as possible.

    Args:
      axes: the axes, whose limits are final.
      lines: the named lines.
      size: size of the text in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    to_axes = axes.transData + axes.transAxes.inverted()
    lines = sorted(lines, key=lambda line: line.y[-1])
    ends = to_axes.transform([(line.x[-1], line.y[-1]) for line in lines])
    gap = 1.3 * size * figure.dpi / 72 / axes.bbox.height
    rank = gap * np.arange(len(lines))
    heights = isotonic_regression(ends[:, 1] - rank).x  # least squares, at least `gap` apart
    heights = np.clip(heights, 0, max(0, 1 - rank[-1])) + rank
    leader = {"arrowstyle": "-", "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
    for line, height in zip(lines, heights, strict=True):
        axes.annotate(
            line.name,
            (line.x[-1], line.y[-1]),
            xytext=(1.08, height),
            textcoords="axes fraction",
            color=line.text_color,
            weight=line.weight,
            fontsize=size,
            va="center",
            arrowprops=leader | {"color": line.color},
        )


def label_points(
    axes: Axes, lines: Sequence[Line], avoid: Sequence[Line] = (), size: float = 8
) -> None:
    """Write each name beside the point of its line, where it hides neither points nor names.

    Args:
      axes: the axes, whose limits and size are final.
      lines: the named lines.
      avoid: further lines and points that names do not cover.
      size: size of the text in points.
    """
    curves = [(line.x, line.y) for line in (*lines, *avoid) if len(line.x) > 1]
    curves += [
        ((x, x), bar)
        for line in lines
        for x, bar in zip(line.x, line.bars, strict=bool(line.bars))
        if bar[0] < bar[1]
    ]
    textalloc.allocate(
        axes,
        [line.x[line.place] for line in lines],
        [line.y[line.place] for line in lines],
        [line.name for line in lines],
        x_scatter=np.concatenate([line.x for line in (*lines, *avoid)]),
        y_scatter=np.concatenate([line.y for line in (*lines, *avoid)]),
        x_lines=[np.asarray(x) for x, _ in curves],
        y_lines=[np.asarray(y) for _, y in curves],
        textsize=size,
        textcolor=[line.text_color for line in lines],
        fontweight=[line.weight for line in lines],
        linecolor=[line.color for line in lines],
        linewidth=0.6,
        max_distance=0.25,
    )
