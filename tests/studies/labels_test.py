"""Names of lines: each is written once, and none hides another."""

import itertools

import matplotlib.figure
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from studies.labels import GRAY, Line, label_at_right, label_points

ENDS = (0.5, 0.5, 0.5, 0.51, 0.99, 1.0, 1.0, 0.0, 0.02)
LINES = [
    Line(f"line {number}", (0, 1), (number / 9, end), "C0" if number == 1 else GRAY)
    for number, end in enumerate(ENDS)
]


@pytest.fixture
def axes():
    axes = matplotlib.figure.Figure(layout="constrained").subplots()
    for line in LINES:
        axes.plot(line.x, line.y)
    axes.margins(0.15)
    return axes


def boxes(axes) -> dict[str, Bbox]:
    axes.figure.draw_without_rendering()
    return {text.get_text(): Text.get_window_extent(text) for text in axes.texts}  # without leaders


def test_names_at_the_right_are_in_the_order_of_their_lines_without_overlaps(axes):
    axes.margins(y=0)
    label_at_right(axes, LINES)
    placed = boxes(axes)
    assert len(placed) == len(LINES)
    ordered = [placed[line.name] for line in sorted(LINES, key=lambda line: line.y[-1])]
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(ordered))
    assert all(box.x0 > axes.bbox.x1 for box in ordered)
    assert axes.bbox.y0 - ordered[0].height / 2 <= ordered[0].y0
    assert ordered[-1].y1 <= axes.bbox.y1 + ordered[-1].height / 2


def test_a_name_without_neighbors_is_at_the_height_of_its_line(axes):
    label_at_right(axes, [LINES[0], LINES[5]])
    for line in (LINES[0], LINES[5]):
        box, end = boxes(axes)[line.name], axes.transData.transform((1, line.y[-1]))
        assert (box.y0 + box.y1) / 2 == pytest.approx(end[1], abs=3)


def test_names_beside_points_do_not_overlap(axes):
    label_points(axes, LINES)
    placed = boxes(axes)
    assert len(placed) == len(LINES)
    for one, other in itertools.combinations(placed.values(), 2):
        assert Bbox.intersection(one, other) is None
    for line in LINES:
        assert not any(
            box.contains(*axes.transData.transform((1, line.y[-1]))) for box in placed.values()
        )


def test_highlighted_names_have_the_color_of_their_line(axes):
    label_at_right(axes, LINES)
    style = {text.get_text(): (text.get_color(), text.get_weight()) for text in axes.texts}
    assert style.pop("line 1") == ("C0", "bold")
    assert {weight for _, weight in style.values()} == {"normal"}
    assert "C0" not in {color for color, _ in style.values()}
