"""Differences between the results of a study and its baseline, with confidence intervals."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from heinsen_jax.errors import UserError
from studies.grid import Study
from studies.records import Comparison, is_larger_better, markdown_table

METHOD = (
    "Brackets are 95% confidence intervals by Welch's t-test over the seeds, not corrected for the "
    'number of comparisons; "no difference" if they include 0, which does not show that models are '
    "equal. The text on which losses are measured is the same for all seeds, and its choice is not "
    "part of the intervals. They need two seeds on both sides, and seeds that differ; seeds that "
    "diverged are left out."
)
SELECTION = "The first seed also selected the tuned values, for which the intervals do not account."


@dataclass(frozen=True)
class Difference:
    """Difference between the means of a result and of its baseline.

    Attributes:
      compared: labels of the result.
      metric: the metric.
      mean: mean of the result minus the baseline's mean, over their seeds; NaN without values.
      interval: 95% confidence interval of the mean, by Welch's t-test; None if the result or the
        baseline has only one seed, or if all seeds of each are equal.
      p_value: p-value of the test; None without an interval.
    """

    compared: dict[str, str]
    metric: str
    mean: float
    interval: tuple[float, float] | None
    p_value: float | None = None

    @property
    def verdict(self) -> str:
        """The word "better", "worse", or "no difference" if the interval includes 0; empty without
        an interval."""
        if self.interval is None:
            return ""
        low, high = self.interval
        if low <= 0 <= high:
            return "no difference"
        return "better" if (low > 0) == is_larger_better(self.metric) else "worse"

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return ""
        if self.interval is None:
            return f"{self.mean:+.4f}"
        low, high = self.interval
        return f"{self.mean:+.4f} [{low:+.4f}, {high:+.4f}] {self.verdict}"


def differences_of(study: Study, results: Sequence[Comparison]) -> list[Difference]:
    """The differences of all other results to the study's baseline, for its metric and its extra
    metrics. With several compared axes, results are compared that differ only in the axis of the
    baseline.

    Args:
      study: the study, with a `baseline`.
      results: its results, of `results_of`.

    Raises:
      UserError: the study has no baseline.
    """
    if study.baseline is None:
        raise UserError(f"baseline of {study.title!r} is not set; give a label of a compared axis")
    pairs = [
        (x, y) for x in results for y in results if study.baseline_of(x.compared) == y.compared
    ]
    return [
        Difference(
            result.compared,
            metric,
            result.mean(metric) - baseline.mean(metric),
            *_welch(result.values(metric), baseline.values(metric)),
        )
        for result, baseline in pairs
        if result is not baseline
        for metric in (study.metric, *study.extra_metrics)
    ]


def difference_table(differences: Sequence[Difference]) -> str:
    """Table in Markdown of differences, with a row for each result and a column for each metric."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for difference in differences:
        labels = tuple(difference.compared.values())
        lines.setdefault(labels, [*labels]).append(str(difference))
    metrics = dict.fromkeys(difference.metric for difference in differences)
    return markdown_table([*differences[0].compared, *metrics], [*lines.values()])


def adjusted_p_values(
    differences: Sequence[Difference], metric: str
) -> dict[tuple[str, ...], float]:
    """Holm's correction of the p-values of a metric's differences for their number n.

        p'_(i) = max_{j <= i} min(1, (n - j + 1) p_(j)),    p_(1) <= ... <= p_(n)

    Returns:
      The corrected p-values in increasing order, by the labels of the results. Differences without
      an interval are left out.

    References:
      Holm, 1979, A Simple Sequentially Rejective Multiple Test Procedure.
    """
    p_values = {
        tuple(x.compared.values()): x.p_value
        for x in differences
        if x.metric == metric and x.p_value is not None
    }
    adjusted: dict[tuple[str, ...], float] = {}
    largest = 0.0
    for index, labels in enumerate(sorted(p_values, key=lambda labels: p_values[labels])):
        largest = max(largest, min(1.0, (len(p_values) - index) * p_values[labels]))
        adjusted[labels] = largest
    return adjusted


def remaining_differences(differences: Sequence[Difference]) -> str:
    """Paragraph about the differences that remain after Holm's correction for the number of
    intervals of each metric."""
    words = []
    for metric in dict.fromkeys(x.metric for x in differences):
        if p_values := adjusted_p_values(differences, metric):
            names = [" ".join(labels) for labels, p in p_values.items() if p < 0.05]
            words.append(f"{metric.replace('_', ' ')}: {'; '.join(names) or 'none'}")
    return (
        "Differences that remain at 5% after Holm's correction for the intervals of each metric: "
        f"{'. '.join(words)}."
    )


def _welch(
    values: Sequence[float], baseline: Sequence[float]
) -> tuple[tuple[float, float] | None, float | None]:
    if min(len(values), len(baseline)) < 2:
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for equal values
        test: Any = stats.ttest_ind(values, baseline, equal_var=False)  # its types lack pvalue
        confidence = test.confidence_interval(0.95)
    low, high = float(confidence.low), float(confidence.high)
    return ((low, high), float(test.pvalue)) if low < high else (None, None)
