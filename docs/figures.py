"""Figures of the pages: numbers and tables from the committed records.

Pages in docs/ are templates of Jinja. Results of a study have its name, as in
`{{ long_context("FoX", "loss_2048") }}`; `{{ record("gated").times_linear.gla | digits(2) }}` is a
value of benchmarks/results/gated.json. A float without a filter has three decimals.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jinja2
import numpy as np
from flax import nnx
from scipy import stats

from docs.options import Text, mechanism_reference, trainer_reference
from heinsen_jax import attention
from heinsen_jax.config import load_config
from heinsen_jax.models import LanguageModel
from heinsen_jax.models.flops import flops_per_token
from heinsen_jax.training.utilization import PEAK_FLOPS
from studies import (
    Comparison,
    Difference,
    PowerLawPlot,
    Study,
    adjusted_p_values,
    differences_of,
    linearization,
    load_study,
    results_of,
)
from studies.power_law import Fit
from studies.runs import costs

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"


def digits(value: float, number: int = 3) -> str:
    """Decimal number with thousands separators."""
    return f"{value:,.{number}f}"


def percent(value: float, number: int = 0) -> str:
    return f"{value:.{number}%}"


def milliseconds(seconds: float, number: int = 1) -> str:
    return digits(1e3 * seconds, number)


def span(values: Iterable[float], number: int = 2) -> str:
    """Smallest and largest value, such as the ends of a confidence interval."""
    numbers = [*values]
    return f"{min(numbers):.{number}f} to {max(numbers):.{number}f}"


def size(number: float, kilobyte_digits: int = 0) -> str:
    """Bytes in kB, with this number of digits, or in MB or GB."""
    units = {"kB": 1e6, "MB": 1e9, "GB": 1e12}
    unit, limit = next(item for item in units.items() if number < item[1])
    return f"{number / limit * 1e3:.{kilobyte_digits if unit == 'kB' else 1}f} {unit}"


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Rows of a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@cache
def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


class StudyResults:
    """Results of a committed study. Their labels are given in the order of the compared axes."""

    COLUMN = re.compile(r"(?:(.+): )?(\w+)(/1000)?(?: (.+))?")

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def study(self) -> Study:
        return load_study(self.name)

    @cached_property
    def results(self) -> dict[tuple[str, ...], Comparison]:
        results = results_of(self.study, RESULTS / "studies" / self.name)
        return {tuple(x.compared.values()): x for x in results}

    @cached_property
    def differences(self) -> list[Difference]:
        """Differences from the study's baseline."""
        return differences_of(self.study, [*self.results.values()])

    def restricted(self, axis: str, *labels: str) -> "StudyResults":
        """Results of the runs with these labels of an axis."""
        restricted = StudyResults(self.name)
        restricted.study = self.study.restricted(axis, labels)
        return restricted

    def __call__(self, *at: Any) -> Any:
        """Mean over the seeds at the labels, for the study's metric or the one named after them;
        an array if the first is a list of labels."""
        if isinstance(at[0], list):
            return np.array([self(label, *at[1:]) for label in at[0]])
        result, metric = self._find(at)
        return result.mean(metric)

    def seeds(self, *at: str) -> list[float]:
        result, metric = self._find(at)
        return result.values(metric)

    def spread(self, *at: Any) -> float:
        """Half the range of the seeds; the largest if the first is a list of labels."""
        if isinstance(at[0], list):
            return max(self.spread(label, *at[1:]) for label in at[0])
        result, metric = self._find(at)
        return result.spread(metric)

    def all(self, *metric: str) -> np.ndarray:
        """Means of all results."""
        return np.array([x.mean([*metric, self.study.metric][0]) for x in self.results.values()])

    def less(self, label: Any, other: Any, *metric: str) -> Any:
        """Mean at a label minus that at another."""
        return self(label, *metric) - self(other, *metric)

    def gain(self, label: Any, metric: str, later: str) -> Any:
        return self(label, metric) - self(label, later)

    def ratio(self, label: str, other: str, metric: str = "state_bytes") -> float:
        return self(label, metric) / self(other, metric)

    def _find(self, at: Sequence[str]) -> tuple[Comparison, str]:
        axes = len(next(iter(self.results)))
        return self.results[tuple(at[:axes])], [*at[axes:], self.study.metric][0]

    def difference(self, label: str, baseline: str, *metric: str, at: str = "") -> Difference:
        """Difference between two labels of an axis, at a label of the other axis, if any."""
        metrics = {"metric": [*metric, self.study.metric][0], "extra_metrics": ()}
        study = replace(self.study, baseline=baseline, **metrics)
        differences = differences_of(study, [*self.results.values()])
        (difference,) = (x for x in differences if {*x.compared.values()} == {label, at} - {""})
        return difference

    def p_values(self, *metric: str) -> dict[tuple[str, ...], float]:
        """P-values after Holm's correction."""
        return adjusted_p_values(self.differences, [*metric, self.study.metric][0])

    def tuned_to(self, *rates: str) -> int:
        """Number of results with one of these learning rates."""
        return sum(x.tuned["learning_rate"] in rates for x in self.results.values())

    def largest_spread(self) -> float:
        return max(x.spread(self.study.metric) for x in self.results.values())

    def _seeds(self, prefix: str) -> list[list[float]]:
        """Metrics of the seeds of each result whose label begins with a prefix."""
        named = ((" ".join(labels), x) for labels, x in self.results.items())
        return [x.values(self.study.metric) for name, x in named if name.startswith(prefix)]

    def deviation(self, prefix: str = "") -> float:
        """Standard deviation of seeds, pooled over the results whose labels begin with a prefix."""
        seeds = self._seeds(prefix)
        squares = sum((len(x) - 1) * statistics.variance(x) for x in seeds)
        return math.sqrt(squares / sum(len(x) - 1 for x in seeds))

    def inconclusive_below(self, comparisons: int, prefix: str = "") -> float:
        """Difference of two seeds at 5% by Bonferroni's correction, with the pooled deviation."""
        freedom = sum(len(x) - 1 for x in self._seeds(prefix))
        quantile = float(stats.t.ppf(1 - 0.025 / comparisons, freedom))
        return quantile * math.sqrt(2) * self.deviation(prefix)

    def rows(
        self, *columns: str, names: Sequence[str] = (), but: Sequence[str] = (), by: str = ""
    ) -> str:
        """Rows of a table, each with a label and its columns.

        Args:
          columns: each is `metric`, `metric .2f`, `metric ±.2f` with the spread of several seeds,
            `metric verdict` with the spread of the difference from the baseline, or `size 1024` for
            the state after that many tokens; of studies with two compared axes, after a label of
            the other: `1%: loss`. `/1000` divides a metric.
          names: labels of the rows; by default all.
          but: labels that are left out.
          by: the column of decreasing order; by default the study's.
        """
        others = {column.rpartition(": ")[0] for column in columns}
        all_names = dict.fromkeys(x for labels in self.results for x in labels if x not in others)
        kept = [name for name in names or all_names if name not in but]
        if by:
            kept.sort(key=lambda name: float(self._cell(name, f"{by} .9f")), reverse=True)
        rows = [[name, *(self._cell(name, column) for column in columns)] for name in kept]
        if empty := [x for x, *cells in zip(("", *columns), *rows, strict=True) if not any(cells)]:
            raise ValueError(f"columns={empty}: no values in {self.name}")
        return lines(row for row in rows if any(row[1:]))

    def _cell(self, name: str, column: str) -> str:
        match = self.COLUMN.fullmatch(column)
        assert match is not None, column
        other, metric, divisor, form = match.groups(default="")
        labels = next((x for x in ((name,), (name, other), (other, name)) if x in self.results), ())
        if not labels:
            return ""
        result, unit = self.results[labels], 1000 if divisor else 1
        if metric == "size":
            run = self.study.run(result.records[0].get("labels", {}))
            return size(LanguageModel.abstract(run.config.model).state_size(int(form)))
        if form == "verdict":
            at_labels = (x for x in self.differences if tuple(x.compared.values()) == labels)
            return next((x.verdict for x in at_labels if x.metric == metric), "")
        if not result.values(metric):
            return ""
        number = form.removeprefix("±") or ".3f"
        mean = format(result.mean(metric) / unit, number)
        if "±" not in form or len(result.values(metric)) == 1:
            return mean
        return f"{mean}\u00a0±\u00a0{result.spread(metric):{number}}"


STUDIES = {path.name: StudyResults(path.name) for path in (RESULTS / "studies").iterdir()}


def positions(reference: str, *others: str) -> str:
    """Rows of losses by position: one model's losses, and differences of others from them."""
    metrics = [f"test_loss_2048_at_{end}" for end in (32, 128, 256, 512, 1024, 2048)]
    study = STUDIES["code_contexts"]
    first = np.array([study(reference, x) for x in metrics])
    rows = [[f"{reference}: loss", *(f"{x:.2f}" for x in first)]]
    for name in others:
        differences = np.array([study(name, x) for x in metrics]) - first
        rows.append([name, *(f"{x:+.2f}" for x in differences.round(2) + 0)])  # no -0
    return lines(rows)


def at_budgets(model: str) -> np.ndarray:
    """Mean losses with the FLOPs and time of 300 and of 600 updates; NaN where not measured."""
    losses = record("equal_budgets")["models"][model]["loss"]
    seeds = [losses[updates][budget] for updates in losses for budget in ("flops", "time")]
    return np.array([math.nan if None in x else statistics.mean(x) for x in seeds])


def equal_budgets() -> str:
    rows = []
    for name, measured in record("equal_budgets")["models"].items():
        losses = (STUDIES["long_context_updates"](name, x) for x in ("150", "300", "600"))
        numbers = [*losses, measured["seconds_per_update"], *at_budgets(name)]
        rows.append([name, *("" if math.isnan(x) else f"{x:.2f}" for x in numbers)])
    return lines(rows)


def exponent(fit: Fit | None) -> str:
    if fit is None:
        return ""
    number, low, high = (round(x, 3) + 0.0 for x in (fit.exponent, *fit.interval))  # no -0
    return f"{number:.3f} [{low:.3f}, {high:.3f}]"


@cache
def power_laws(cost: str) -> tuple[dict[str, Fit | None], dict[str, Fit | None]]:
    """Fits of the study of scaling, and those relative to log-attention."""
    study, results = STUDIES["scaling"].study, [*STUDIES["scaling"].results.values()]
    (plot,) = (x for x in study.plots if isinstance(x, PowerLawPlot) and x.x == cost)
    return plot.fits(results), plot.differences(results, "log, decay by head")


def scaling_rows() -> str:
    laws = [fits for cost in ("parameters", "tokens") for fits in power_laws(cost)]
    return lines([name, *(exponent(fits.get(name)) for fits in laws)] for name in laws[0])


def attention_times(name: str, *sizes: str) -> str:
    """Rows of plain calls of a record of attention on a GPU, each with these sizes of its shape."""
    rows = []
    for shape in (x for x in record(name)["shapes"] if x.get("call", "plain") == "plain"):
        cells = [f"{x:,}" if isinstance(x := shape[field], int) else x for field in sizes]
        for way in ("chunked", "gpu", "cudnn", "torch softmax"):
            seconds = shape["results"][way].get("seconds")
            cells.append(milliseconds(seconds["both"]) if seconds else "–")
        rows.append(cells)
    return lines(rows)


def decoding_times() -> str:
    rows: dict[tuple[str, int], list[str]] = {}
    for x in sorted(record("gpu_decoding")["rows"], key=lambda x: x["batch"]):
        name = f"{x['model']}-attention" if x["model"] == "log" else f"{x['model']} attention"
        row = rows.setdefault((name, x["batch"]), [name, str(x["batch"])])
        row.append(milliseconds(x["seconds"]) if "seconds" in x else x["refused"])
    return lines(rows.values())


def generation_times() -> str:
    """Rows of prompts and of new tokens, by library."""
    times: dict[str, dict[str, float]] = {}
    for x in record("generation")["rows"]:
        what = {"prompt": "a prompt of {tokens} tokens", "decoding": "a new token"}
        name = what.get(x["measure"], "a new token on request").format(**x)
        name += f" of each of {x['batch']} sequences" if x["batch"] > 1 else ""
        times.setdefault(name, {})[x["library"]] = x["seconds"]
    libraries = "heinsen_jax", "transformers"
    return lines(
        [name, *(milliseconds(row[x], 0) if x in row else "–" for x in libraries)]
        for name, row in times.items()
    )


def served(model: str, context: int = 65_536, rows: int = 1) -> Any:
    """Record of a model that generates text after prompts of this length."""
    at = {"model": model, "context": context, "rows": rows}
    return next(x for x in record("linearized_serving")["rows"] if x.items() >= at.items())


def serving() -> str:
    contexts, table = (1024, 16_384, 65_536), []
    for name in dict.fromkeys(x["model"] for x in record("linearized_serving")["rows"]):
        settings = [*((context, 1) for context in contexts), (16_384, 8)]
        speeds = (rows / served(name, n, rows)["seconds_per_token"] for n, rows in settings)
        first = (served(name, context)["first_token_seconds"] for context in contexts)
        seconds = (f"{x:.2g}" if x < 100 else f"{x:.0f}" for x in first)
        row = [name, *(digits(x, 0) for x in speeds), *seconds]
        table.append([*row, size(served(name)["state_bytes"])])
    return lines(table)


def layer_size(name: str, **options: Any) -> str:
    """Cells of a layer of width 128: head dimensions, parameters, and bytes of state."""
    build = partial(attention.build, name, model_dim=128, num_heads=4, **options)
    layer: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    grows = layer.state_size(2) != layer.state_size(1)
    state = f"{layer.state_size(1):,}{' per token' if grows else ''}"
    return f"{layer.key_depth} | {layer.value_depth} | {parameters:,} | {state}"


@cache
def training_flops(name: str) -> float:
    """FLOPs of a token of training."""
    config = load_config(name)
    parameters = costs(config)["parameters"]
    return flops_per_token(config.model, parameters, config.data.sequence_length) or math.nan


def gpu_hours(name: str, utilization: float, updates: int | None = None) -> float:
    """Hours of an H100 for the updates of a configuration, or a number of them."""
    config = load_config(name)
    tokens = config.data.sequence_length * config.data.batch_size
    flops = training_flops(name) * tokens * (updates or config.training.steps)
    return flops / (PEAK_FLOPS["NVIDIA H100 80GB HBM3"] * utilization * 3600)


def text_of(value: object) -> str:
    """Text of an expression in a page, which is finite and not empty."""
    if isinstance(value, Text):
        return value
    if isinstance(value, jinja2.Undefined):
        return str(value)  # raises
    text = digits(value) if isinstance(value, float) else str(value)
    if not text or re.search(r"\b(nan|inf|None)\b", text):
        raise ValueError(f"a figure without a value: {text!r}")
    return text


FILTERS = {"digits": digits, "percent": percent, "ms": milliseconds, "span": span, "size": size}
FUNCTIONS = (
    *(record, positions, at_budgets, equal_budgets, power_laws, scaling_rows),
    *(
        attention_times,
        decoding_times,
        generation_times,
        served,
        serving,
        layer_size,
        training_flops,
        gpu_hours,
    ),
    *(load_config, mechanism_reference, trainer_reference, statistics.mean),
)
ENVIRONMENT = jinja2.Environment(
    undefined=jinja2.StrictUndefined, finalize=text_of, keep_trailing_newline=True
)
ENVIRONMENT.filters |= FILTERS
ENVIRONMENT.globals |= {x.__name__: x for x in FUNCTIONS}
ENVIRONMENT.globals |= {**FILTERS, **STUDIES, "linearized": linearization.MAIN}


def render(page: str) -> str:
    """Replace the expressions of a page."""
    return ENVIRONMENT.from_string(page).render()
