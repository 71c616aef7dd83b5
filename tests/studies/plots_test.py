"""Plots of studies: colors, chance, baselines, titles and units."""

import math

import matplotlib.figure
import pytest
from matplotlib.axes import Axes

from studies import (
    Comparison,
    LengthPlot,
    Points,
    PositionPlot,
    PowerLawPlot,
    Ranking,
    draw,
)
from studies.labels import GRAY

ACCURACY = {"log": (0.5, 0.7), "softmax": (1.0, 1.0), "l1": (1.0, 1.0)}


def comparison(mechanism: str) -> Comparison:
    rows = [
        {"metrics": {"accuracy": x, "accuracy_8": x, "accuracy_16": x / 2}, "state_bytes": 100}
        for x in ACCURACY[mechanism]
    ]
    return Comparison({"mechanism": mechanism}, {}, rows)


RESULTS = [comparison(name) for name in ACCURACY]
HIGHLIGHTED = {"softmax": "C0"}


def drawn(plot) -> tuple[Axes, matplotlib.figure.Figure]:
    figure = draw("A study", plot, RESULTS)
    return figure.axes[0], figure


def marks(axes: Axes, y: float) -> set[str]:
    """Colors of the points at this height."""
    return {
        str(line.get_color())
        for line in axes.lines
        if y in line.get_ydata() and line.get_marker() == "o"
    }


@pytest.mark.parametrize(
    ("plot", "labels", "title"),
    [
        (
            Points("accuracy", unit="%", chance=0.125, highlighted=HIGHLIGHTED),
            ("state size (bytes)", "accuracy (%)"),
            "accuracy against state size",
        ),
        (
            LengthPlot(
                (8, 16),
                title="Copies",
                length_unit="letters",
                highlighted=HIGHLIGHTED,
                chance=0.125,
            ),
            ("length (letters)", "accuracy"),
            "Copies",
        ),
    ],
)
def test_lines_are_named_and_labels_have_units(plot, labels, title):
    axes, figure = drawn(plot)
    assert figure.get_suptitle() == "A study"
    assert axes.get_title().splitlines() == [title, "(bars: from the lowest to the highest seed)"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == labels
    assert {text.get_text() for text in axes.texts} == {"chance", *ACCURACY}
    assert [0.125, 0.125] in [list(line.get_ydata()) for line in axes.lines]
    assert marks(axes, 1.0) == {"C0", GRAY}
    assert marks(axes, 0.6) == {GRAY}
    (segments,) = (x.get_segments() for x in axes.collections[:1])
    assert segments[0][:, 1] == pytest.approx([0.5, 0.7])  # the seeds of log


def test_losses_are_drawn_against_the_test_length():
    rows = [{"metrics": {"loss_8": 0.5, "loss_32": 0.25}}]
    plot = LengthPlot((8, 32), metric="loss", unit="nats per token")
    (axes,) = draw("A study", plot, [Comparison({"mechanism": "log"}, {}, rows)]).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5, 0.25]]
    assert axes.get_ylabel() == "loss (nats per token)"


def test_a_highlighted_line_is_above_others():
    axes, _ = drawn(Points("accuracy", highlighted=HIGHLIGHTED))
    order = {str(x.get_color()): x.get_zorder() for x in axes.lines if x.get_marker() == "o"}
    assert order["C0"] > order[GRAY]


def test_results_that_are_missing_or_not_finite_are_omitted():
    rows = [{"metrics": {"accuracy": math.nan}, "state_bytes": 1}]
    results = [
        Comparison({"mechanism": "nan"}, {}, rows),
        Comparison({"mechanism": "failed"}, {}, [{"failed": "NaN!"}]),
    ]
    plots = [Points("accuracy"), LengthPlot((8, 16)), Ranking("accuracy")]
    for plot in plots:
        (axes,) = draw("A study", plot, results).axes
        assert not axes.texts
        assert not axes.lines
    assert not draw("A study", Points("accuracy", x="flops"), RESULTS).axes[0].lines
    with_log = draw("A study", plots[0], [*results, RESULTS[0]]).axes[0]
    assert [text.get_text() for text in with_log.texts] == ["log"]


def test_a_ranking_has_all_seeds_the_baseline_and_chance():
    plot = Ranking("accuracy", highlighted=HIGHLIGHTED, baseline="log", chance=0.125)
    axes, _ = drawn(plot)
    assert [name.get_text() for name in axes.get_yticklabels()] == ["log", "softmax", "l1"]
    assert axes.get_yticklabels()[1].get_color() == "C0"
    dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
    assert dashed == pytest.approx([0.6, 0.125])
    assert "(dots: seeds; line: mean)" in axes.get_title()


@pytest.mark.parametrize(("metric", "names"), [("accuracy", ["a", "b"]), ("loss", ["b", "a"])])
def test_the_best_row_of_a_ranking_is_at_the_top(metric, names):
    values = {"a": 0.25, "b": 0.5}
    results = [
        Comparison({"mechanism": name}, {}, [{"metrics": {metric: value}}])
        for name, value in values.items()
    ]
    axes = draw("A study", Ranking(metric), results).axes[0]
    assert [name.get_text() for name in axes.get_yticklabels()] == names


@pytest.mark.parametrize(
    ("unit", "label"),
    [
        ("nats per byte", "training bytes"),
        ("nats per character", "training characters"),
        ("", "training tokens"),
    ],
)
def test_training_tokens_are_named_for_what_the_metric_counts(unit, label):
    plot = Points("loss", x="tokens", unit=unit)
    (axes,) = draw("A study", plot, []).axes
    assert axes.get_xlabel() == label
    assert plot.cost_label("parameters") == "parameters"


def test_labels_that_all_results_of_a_plot_have_are_left_out():
    rows = [{"metrics": {"accuracy": 0.5}}]
    results = [Comparison({"mechanism": "log", "task": task}, {}, rows) for task in ("a", "b", "c")]
    for where, names in (({"task": "a"}, ["log"]), ({"task": ("b", "c")}, ["log b", "log c"])):
        axes = draw("A study", Ranking("accuracy", where=where), results).axes[0]
        assert [name.get_text() for name in axes.get_yticklabels()] == names


POINTS = {"a": [(1, 0.2), (4, 0.5)], "b": [(2, 0.4)], "c": [(2, 0.3)], "d": [(3, 0.3), (9, 0.1)]}


def points(metric: str, sign: int) -> list[Comparison]:
    return [
        Comparison({"mechanism": name}, {}, [{"metrics": {metric: sign * y}, "state_bytes": x}])
        for name, of_name in POINTS.items()
        for x, y in of_name
    ]


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("loss", -1)])
def test_the_frontier_is_the_best_with_at_most_a_cost(metric, sign):
    plot = Points(metric, frontier=True, highlighted={"d": "C1"})
    axes = draw("A study", plot, points(metric, sign)).axes[0]
    assert {text.get_text() for text in axes.texts} == {"a", "b", "d"}
    assert "steps: the Pareto frontier" in axes.get_title()
    steps, rings = (line for line in axes.lines if line.get_color() == "black")
    corners = [(1, 0.2), (2, 0.2), (2, 0.4), (4, 0.4), (4, 0.5), (9, 0.5)]
    assert list(zip(*steps.get_data(), strict=True)) == [(x, sign * y) for x, y in corners]
    assert list(rings.get_xdata()) == [1, 2, 4]


def test_without_a_frontier_all_points_are_named():
    axes = draw("A study", Points("accuracy"), points("accuracy", 1)).axes[0]
    assert {text.get_text() for text in axes.texts} == set(POINTS)


def test_names_of_lines_that_all_have_several_points_are_at_the_right():
    lines = [x for x in points("accuracy", 1) if len(POINTS[x.compared["mechanism"]]) > 1]
    axes = draw("A study", Points("accuracy"), lines).axes[0]
    assert [(x.get_text(), x.get_position()[0]) for x in axes.texts] == [("d", 1.08), ("a", 1.08)]


def test_losses_by_position_are_at_the_ends_of_their_buckets():
    metrics = {"loss_40_at_16": 3.0, "loss_40_at_32": 2.0, "loss_40_at_40": 1.5}
    results = [Comparison({"mechanism": name}, {}, [{"metrics": metrics}]) for name in "ab"]
    plot = PositionPlot(40, unit="nats", position_unit="letters", highlighted={"a": "C0"})
    axes = draw("A study", plot, results).axes[0]
    line = next(line for line in axes.lines if line.get_color() == "C0")
    assert list(zip(*line.get_data(), strict=True)) == [(16, 3.0), (32, 2.0), (40, 1.5)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("position (letters)", "loss (nats)")
    assert (axes.get_xscale(), axes.get_title()) == ("log", "loss against position")
    assert {text.get_text() for text in axes.texts} == {"a", "b"}


def test_power_laws_are_drawn_and_reported():
    def result(model: str, size: int) -> Comparison:
        rows = [{"metrics": {"loss": 8 * size**-0.5}, "parameters": size}] * 2
        return Comparison({"model": model, "size": str(size)}, {}, rows)

    results = [result("a", size) for size in (1, 4, 16, 64)]
    results += [result("b", size) for size in (4, 16, 64)]
    where = {"size": ("4", "16", "64")}
    plot = PowerLawPlot("loss", "parameters", lines="model", highlighted={"a": "C0"}, where=where)
    axes = draw("A study", plot, results).axes[0]
    line = next(x for x in axes.lines if x.get_linestyle() == "-")
    assert line.get_ydata() == pytest.approx([4.0, 2.0, 1.0])  # of the selected sizes only
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    ticks = [text.get_text() for text in axes.get_xticklabels() + axes.get_yticklabels()]
    assert {"5", "50", "2.0", "3.0"} < {*ticks}
    assert {text.get_text() for text in axes.texts} == {"a", "b"}
    assert {name: round(fit.exponent, 6) for name, fit in plot.fits(results).items() if fit} == {
        "a": 0.5,
        "b": 0.5,
    }


def test_exponents_are_compared_at_the_same_labels():
    def result(model: str, size: int, parameters: int, loss: float) -> Comparison:
        rows = [{"metrics": {"loss": loss}, "parameters": parameters}]
        return Comparison({"model": model, "size": str(size)}, {}, rows)

    sizes = (1, 4, 16, 64)
    results = [result("a", size, 100 * size, (5 + size % 3) * size**-0.1) for size in sizes]
    results += [result("b", size, 90 * size, (5 + size % 3) * size**-0.3) for size in sizes[1:]]
    fits = PowerLawPlot("loss", "parameters", lines="model").differences(results, "a")
    assert fits["b"] is not None
    assert fits["b"].exponent == pytest.approx(0.2)  # exact, since deviations are those of "a"
    assert fits["b"].interval == pytest.approx((0.2, 0.2))


def test_plots_show_only_the_results_with_their_labels():
    plot = Points("accuracy", where={"mechanism": "log"}, highlighted={"log": "C3"})
    axes, _ = drawn(plot)
    assert marks(axes, 0.6)
    assert not marks(axes, 1.0)
    results = [x for x in RESULTS if x.compared["mechanism"] == "log"]
    assert plot.selected(RESULTS) == results


def test_axes_of_accuracies_begin_at_0():
    axes, _ = drawn(Points("accuracy"))
    assert axes.get_ylim() == (0, 1.1)
