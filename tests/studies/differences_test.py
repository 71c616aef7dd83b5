"""Differences from a baseline: intervals, verdicts, and their table."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate

from heinsen_jax.errors import UserError
from studies import Comparison, differences_of
from studies.differences import (
    METHOD,
    SELECTION,
    Difference,
    adjusted_p_values,
    remaining_differences,
)
from studies.report import paragraphs
from tests.studies.small import PLAIN

STUDY = replace(PLAIN, metric="loss", extra_metrics=("accuracy",), baseline="linear")
LOSSES = {
    ("linear", "8"): (1.0, 1.1, 1.3),
    ("softmax", "8"): (2.0, 2.1, 2.05, 2.2),
    ("linear", "16"): (1.0, 1.2),
    ("softmax", "16"): (1.1, 0.9),
}


def comparison(labels: tuple[str, ...], losses: tuple[float, ...]) -> Comparison:
    rows = [{"metrics": {"loss": x, "accuracy": -x}, "environment": {}} for x in losses]
    return Comparison(dict(zip(("mechanism", "width"), labels, strict=True)), {}, rows)


RESULTS = [comparison(*item) for item in LOSSES.items()]


def probability(t: float, degrees: float) -> float:
    """Probability that |x| < t for Student's t, by integration of its density."""
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    density = lambda x: scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)  # noqa: E731
    return integrate.quad(density, -t, t)[0]


def test_intervals_are_those_of_welch():
    found = differences_of(STUDY, RESULTS)
    by_label = {(*x.compared.values(), x.metric): x for x in found}
    assert list(by_label) == [
        ("softmax", width, metric) for width in ("8", "16") for metric in ("loss", "accuracy")
    ]
    for width in ("8", "16"):
        values, others = (np.array(LOSSES[name, width]) for name in ("softmax", "linear"))
        squares = [x.var(ddof=1) / len(x) for x in (values, others)]
        degrees = sum(squares) ** 2 / sum(
            s**2 / (len(x) - 1) for s, x in zip(squares, (values, others), strict=True)
        )
        difference = by_label["softmax", width, "loss"]
        assert difference.mean == pytest.approx(values.mean() - others.mean())
        low, high = difference.interval
        assert (low + high) / 2 == pytest.approx(difference.mean)
        t = (high - low) / 2 / math.sqrt(sum(squares))
        assert probability(t, degrees) == pytest.approx(0.95, abs=1e-6)
    verdicts = {key: difference.verdict for key, difference in by_label.items()}
    assert verdicts["softmax", "8", "loss"] == "worse"
    assert verdicts["softmax", "8", "accuracy"] == "worse"
    assert verdicts["softmax", "16", "loss"] == "no difference"


def test_the_better_is_the_other_one_with_the_other_baseline():
    (loss, *_) = differences_of(replace(STUDY, baseline="softmax"), RESULTS)
    assert (loss.compared["mechanism"], loss.verdict) == ("linear", "better")


@pytest.mark.parametrize(("values", "mean"), [((2.0,), 1.0), ((2.0, 2.0), 1.0), ((), math.nan)])
def test_without_differences_between_seeds_no_interval_exists(values, mean):
    results = [comparison(("linear", "8"), (1.0, 1.0)), comparison(("softmax", "8"), values)]
    found = differences_of(STUDY, results)[0]
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert (found.interval, found.verdict) == (None, "")
    assert str(found) == ("+1.0000" if values else "")


def test_one_side_may_be_constant():
    results = [comparison(("linear", "8"), (1.0, 1.0)), comparison(("softmax", "8"), (2.0, 2.1))]
    low, high = differences_of(STUDY, results)[0].interval
    assert low < 1.05 < high


def test_the_report_has_the_differences_and_their_method():
    rows = [replace(x, tuned={"learning_rate": "0.01"}) for x in RESULTS]
    found = differences_of(STUDY, rows)
    parts = paragraphs(replace(STUDY, seeds="none"), rows, [])
    place = parts.index("Differences from linear, which is subtracted:")
    table = parts[place + 1].splitlines()
    assert table[0] == "| mechanism | width | loss | accuracy |"
    assert table[2].startswith("| softmax | 8 | +0.9542 [+0.6")
    assert " worse | -0.9542 [-1.2" in table[2]
    assert parts[place + 2 : place + 4] == [f"{METHOD} {SELECTION}", remaining_differences(found)]


def test_the_report_of_single_seeds_corrects_nothing():
    rows = [comparison((name, "8"), (loss,)) for name, loss in (("linear", 1.0), ("softmax", 2.0))]
    parts = paragraphs(replace(STUDY, seeds="none", tuned=()), rows, [])
    assert any(METHOD in part for part in parts)
    assert not any("Holm" in part for part in parts)


def test_the_baseline_is_a_label_of_one_compared_axis():
    with pytest.raises(ValueError, match=r"baseline='0\.01' must be a label of one compared axis"):
        replace(STUDY, baseline="0.01")
    with pytest.raises(UserError, match="baseline of 'A small study' is not set"):
        differences_of(replace(STUDY, baseline=None), RESULTS)


def test_p_values_are_corrected_by_holm():
    def adjusted(p_values: dict[tuple[str, str], float]) -> dict[tuple[str, ...], float]:
        return adjusted_p_values([of(*labels, p) for labels, p in p_values.items()], "loss")

    def of(x: str, y: str, p: float) -> Difference:
        return Difference({"x": x, "y": y}, "loss", 0.1, (0.0, 0.2), p)

    p_values = {("a", "0"): 0.01, ("b", "0"): 0.04, ("b", "1"): 0.03, ("c", "0"): 0.005}
    wanted = {("c", "0"): 0.02, ("a", "0"): 0.03, ("b", "1"): 0.06, ("b", "0"): 0.06}
    found = adjusted(p_values)
    assert [*found] == [*wanted]
    assert found == pytest.approx(wanted)
    assert adjusted({("a", "0"): 0.7, ("b", "0"): 0.6}) == {("b", "0"): 1.0, ("a", "0"): 1.0}
    assert len(adjusted({("a b", "c"): 0.1, ("a", "b c"): 0.1})) == 2
    found = [of("far", "off", 0.001), of("near", "by", 0.04), of("nearer", "by", 0.03)]
    said = (
        "Differences that remain at 5% after Holm's correction for the intervals of each metric: "
    )
    said += "loss: far off."
    assert remaining_differences([*found, Difference({"x": "one"}, "loss", 0.1, None)]) == said
