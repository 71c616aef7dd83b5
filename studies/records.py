"""Records of runs, compared in a table in Markdown."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from heinsen_jax.errors import UserError
from heinsen_jax.runtime.environment import Environment


class RunRecord(TypedDict):
    """Record of a run: `metrics` or the reason why it `failed`, costs, and environment.

    Metrics of the test split, if the data has one, begin with `test_`. `longest_state_bytes` is
    the state after a sequence of the longest test length. `tokens` counts all updates, `flops`
    counts all tokens, and `curve` has the metrics of each evaluation by the number of updates
    before it; earlier versions recorded none of them. `content` are hashes of the data and of the
    weights of the teacher, if any; earlier versions recorded none. `before` has the metrics of each
    earlier stage, on one batch. `seconds` counts from the last start or resumption of the run.
    """

    labels: NotRequired[dict[str, str]]
    fingerprint: NotRequired[str]
    content: NotRequired[dict[str, str]]
    metrics: NotRequired[dict[str, float]]
    before: NotRequired[list[dict[str, float]]]
    failed: NotRequired[str]
    parameters: int
    state_bytes: int
    longest_state_bytes: NotRequired[int]
    tokens: NotRequired[int]
    flops: NotRequired[float]
    curve: NotRequired[dict[str, dict[str, float]]]
    seconds: float
    environment: Environment


@dataclass(frozen=True)
class Comparison:
    """A row of the table, with the best tuned values.

    Attributes:
      compared: labels of the compared axes.
      tuned: best labels of the tuned axes.
      records: one per seed.
    """

    compared: dict[str, str]
    tuned: dict[str, str]
    records: list[RunRecord] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """Values of a metric for all seeds, without failed runs."""
        values = [_value(record, metric) for record in self.records]
        return [x for x in values if x is not None]

    def mean(self, metric: str) -> float:
        """Mean over the seeds; NaN without values."""
        return statistics.fmean(self.values(metric) or [math.nan])

    def spread(self, metric: str) -> float:
        """Half the range between the best and the worst seed."""
        values = self.values(metric)
        return (max(values) - min(values)) / 2 if values else math.nan

    def updates_until(self, metric: str, value: float) -> list[int | None]:
        """Number of updates until a metric was first at least as good as a value, for each seed
        with a recorded curve of it; None if no evaluation reached it."""
        sign = 1 if is_larger_better(metric) else -1

        def is_reached(metrics: dict[str, float]) -> bool:
            return sign * metrics.get(metric, math.nan) >= sign * value

        curves = [record["curve"] for record in self.records if "curve" in record]
        curves = [x for x in curves if any(metric in metrics for metrics in x.values())]
        reached = ([int(step) for step in curve if is_reached(curve[step])] for curve in curves)
        return [min(steps, default=None) for steps in reached]


def check_measured(
    title: str, named: Sequence[tuple[str, str]], records: Sequence[RunRecord]
) -> None:
    """Check that a run has measured the metrics that a study names.

    Args:
      title: title of the study.
      named: fields of the study, each with the metric that it names.
      records: records of runs.

    Raises:
      UserError: no finished run has one of the metrics; the message names the field.
    """
    finished = [record for record in records if "metrics" in record]
    evaluations = [x for record in finished for x in record.get("curve", {}).values()]
    metrics = [name for x in (*(x["metrics"] for x in finished), *evaluations) for name in x]
    costs = {name for x in finished for name in x if isinstance(x.get(name), int | float)}
    for where, name in named:
        if finished and name not in {*metrics, *costs}:
            raise UserError(
                f"{where} of {title!r}: {name!r} is not measured; choose one of "
                f"{', '.join(dict.fromkeys(metrics))}"
            )


def is_larger_better(metric: str) -> bool:
    """Whether larger values of a metric are better: accuracies, not losses."""
    return "accuracy" in metric.split("_")


def table(
    results: Sequence[Comparison],
    metric: str,
    extra_metrics: Sequence[str],
    reached: tuple[str, float] | None = None,
) -> str:
    """Table of the results: labels, costs, mean and spread of the metric, and each seed; the extra
    metrics; and the updates until the metric `reached[0]` was first as good as `reached[1]`."""
    axes = [*results[0].compared, *results[0].tuned]
    costs = ["parameters", "state_bytes"]
    head = [*axes, *costs, metric, "by seed", *extra_metrics]
    if reached is not None:
        head.append(f"updates until {reached[0]} {reached[1]:g}")
    lines = []
    for result in results:
        measured = [(_value(record, metric), record) for record in result.records]
        each = [record.get("failed", "") if x is None else f"{x:.4f}" for x, record in measured]
        mean, *others = (_with_spread(result, name) for name in (metric, *extra_metrics))
        numbers = [f"{result.mean(cost):,.0f}" for cost in costs]
        labels = [*result.compared.values(), *result.tuned.values()]
        if reached is not None:
            updates = result.updates_until(*reached)
            words = ("never" if number is None else str(number) for number in updates)
            others.append(", ".join(words))
        lines.append([*labels, *numbers, mean, ", ".join(each), *others])
    return markdown_table(head, lines)


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Table with the names in `head`, whose underscores are replaced by spaces."""
    rows = [[x.replace("_", " ") for x in head], ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _with_spread(result: Comparison, metric: str) -> str:
    if not (values := result.values(metric)):
        return ""
    mean = f"{result.mean(metric):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {result.spread(metric):.4f}"


def _value(record: RunRecord, name: str) -> float | None:
    return record.get("metrics", {}).get(name, record.get(name))
