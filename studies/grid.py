"""The grid of a study: a base experiment and its variations."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from heinsen_jax.config import CONFIGS, ExperimentConfig, find_file, run_file
from heinsen_jax.data import AnyDataConfig
from heinsen_jax.errors import UserError, explain
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.training.config import DistillationConfig, OptimizerConfig, TrainingConfig
from heinsen_jax.typing import JSON
from studies.plots import Plot

Section: TypeAlias = (
    AnyDataConfig | LanguageModelConfig | OptimizerConfig | TrainingConfig | DistillationConfig
)
FieldValue: TypeAlias = (
    int | float | bool | str | Layers | tuple[Layers | str | int, ...] | Section | None
)
"""The value of a field, or of a section."""
Axes = Mapping[str, Mapping[str, Mapping[str, FieldValue]]]


@runtime_checkable
class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


Config = TypeVar("Config", bound=DataclassInstance)

ADDED = {"distillation"}
"""Sections that earlier versions did not have, which the fingerprint leaves out by default."""
MEASURED_AFTER = {"test_examples"}
"""Fields that affect neither training nor validation, which the fingerprint leaves out."""


@dataclass(frozen=True)
class Study:
    """A grid of runs, reported with the best values of tuned axes and all seeds.

    Attributes:
      title: title of the report.
      about: question, sizes and interpretation, in Markdown.
      base: the base experiment.
      axes: values of each axis by their labels: label -> {"section.field": value, ...}. Later axes
        override fields of earlier ones.
      metric: the compared metric of the last evaluation. The largest accuracy is the best, and the
        smallest value of any other metric; among equals, the run with the smallest loss.
      selected_by: the metric by which values of tuned axes are chosen; `metric` by default. Data
        with a test split have metrics of both splits, such as `loss` of validation, which should
        choose, and `test_loss`, which should be reported.
      tuned: axes of which only the best value is reported, such as learning rates.
      search: which tuned values are run with the first seed: all ("grid"), or those that lead to
        the best ("neighbors"). The latter is for one tuned axis whose labels are in order, such as
        increasing learning rates: the middle label and its neighbors are run first, then the
        neighbors of the best, until the best has none that are left or better.
      seeds: axis of the random seeds. Tuned values are run with its first label, and only the best
        with the others.
      extra_metrics: further metrics in the report's table.
      reached: a metric and a value, for a column with the number of updates until an evaluation was
        at least as good, such as ("accuracy", 0.9).
      baseline: label of a compared axis, for a table of the differences from its results.
      plots: plots of the report.
      select: function of labels that returns whether to run their combination; by default all are.
        It may leave out seeds other than the first.
      stages: function of the labels and the experiment of a run that returns its stages. Each
        starts from the weights of the previous one, so that all have a `distillation.teacher`; all
        but the last are evaluated on one batch only. By default a run has one stage, the
        experiment.
    """

    title: str
    about: str
    base: ExperimentConfig
    axes: Axes
    metric: str = "loss"
    selected_by: str | None = None
    tuned: tuple[str, ...] = ("learning_rate",)
    search: Literal["grid", "neighbors"] = "grid"
    seeds: str = "seed"
    extra_metrics: tuple[str, ...] = ()
    reached: tuple[str, float] | None = None
    baseline: str | None = None
    plots: tuple[Plot, ...] = ()
    select: Callable[[Mapping[str, str]], bool] = lambda _: True
    stages: Callable[[Mapping[str, str], ExperimentConfig], Sequence[ExperimentConfig]] = (
        lambda _, config: (config,)
    )

    def __post_init__(self) -> None:
        compared = self.compared(dict.fromkeys(self.axes, ""))
        ordered = [axis for axis in self.tuned if axis in self.axes]
        if self.search == "neighbors" and len(ordered) != 1:
            raise ValueError(
                f"search='neighbors' needs one tuned axis, not {len(ordered)}; set tuned to the "
                "name of one axis, or search='grid'"
            )
        if self.baseline is not None:
            matching = [axis for axis in compared if self.baseline in self.axes[axis]]
            if len(matching) != 1:
                raise ValueError(
                    f"baseline={self.baseline!r} must be a label of one compared axis, not of "
                    f"{len(matching)}"
                )
        for plot in self.plots:
            try:
                plot.check({axis: self.axes[axis] for axis in compared}, self.base)
            except ValueError as error:
                raise ValueError(f"plots of {self.title!r}: {error}") from None

    @property
    def selection_metric(self) -> str:
        """The metric by which values of tuned axes are chosen."""
        return self.selected_by or self.metric

    def named_metrics(self) -> list[tuple[str, str]]:
        """The fields that name metrics, each with a metric."""
        return [
            ("metric", self.metric),
            ("selected_by", self.selection_metric),
            *(("reached", name) for name, _ in filter(None, [self.reached])),
            *(("extra_metrics", name) for name in self.extra_metrics),
            *(("plots", name) for plot in self.plots for name in plot.metrics),
        ]

    def restricted(self, axis: str, labels: Sequence[str]) -> "Study":
        """Restrict an axis to these labels. Plots of other labels only are left out, and so is the
        baseline if it is another label.

        Raises:
          ValueError: the study has no such axis, or the axis no such label.
        """
        if axis not in self.axes:
            raise ValueError(
                f"axis={axis!r}: not in {self.title!r}; choose one of {', '.join(self.axes)}"
            )
        if unknown := [label for label in labels if label not in self.axes[axis]]:
            raise ValueError(
                f"labels={unknown}: not of the axis {axis!r} of {self.title!r}; choose from "
                f"{[*self.axes[axis]]}"
            )
        left_out = self.axes[axis].keys() - {*labels}
        plots = [plot.restricted(axis, left_out) for plot in self.plots]
        return replace(
            self,
            axes={**self.axes, axis: {label: self.axes[axis][label] for label in labels}},
            baseline=None if self.baseline in left_out else self.baseline,
            plots=tuple(plot for plot in plots if plot is not None),
        )

    def first_seed_runs(self) -> list["Run"]:
        """All runs with the first seed.

        Raises:
          UserError: a field is misspelled or its value is invalid; the message names the run.
        """
        choices = {axis: list(labels) for axis, labels in self.axes.items()}
        if self.seeds in choices:
            choices[self.seeds] = choices[self.seeds][:1]
        grid = (
            dict(zip(choices, labels, strict=True))
            for labels in itertools.product(*choices.values())
        )
        return [self.run(labels) for labels in grid if self.select(labels)]

    def all_runs(self) -> list["Run"]:
        """The runs with all tuned values and all seeds; raises as `first_seed_runs` does."""
        first = self.first_seed_runs()
        return [run for best in first for run in (best, *self.other_seed_runs(best.labels))]

    def groups(self) -> list[list["Run"]]:
        """All runs with the first seed, in groups that differ only in tuned values."""
        groups: dict[tuple[str, ...], list[Run]] = {}
        for run in self.first_seed_runs():
            groups.setdefault(tuple(self.compared(run.labels).values()), []).append(run)
        return list(groups.values())

    def other_seed_runs(self, best: Mapping[str, str]) -> list["Run"]:
        """The runs with the other seeds, given the labels of the best run."""
        others = [{**best, self.seeds: seed} for seed in [*self.axes.get(self.seeds, {})][1:]]
        return [self.run(labels) for labels in others if self.select(labels)]

    def compared(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels of a run that distinguish the compared results."""
        apart = {*self.tuned, self.seeds}
        return {axis: label for axis, label in labels.items() if axis not in apart}

    def baseline_of(self, compared: Mapping[str, str]) -> dict[str, str]:
        """The labels of the baseline of a result, which differ only in the baseline's axis."""
        assert self.baseline is not None
        axis = next(axis for axis in compared if self.baseline in self.axes[axis])
        return {**compared, axis: self.baseline}

    def run(self, labels: Mapping[str, str]) -> "Run":
        """The run with one label of each axis."""
        fields: dict[str, FieldValue] = {}
        for axis, label in labels.items():
            for field, value in self.axes[axis][label].items():
                inside = f"{field}."  # a section replaces its fields
                fields = {x: fields[x] for x in fields if not x.startswith(inside)} | {field: value}
        try:
            return Run(dict(labels), tuple(self.stages(labels, _with(self.base, fields))))
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.title}, {describe(labels)}: {explain(error)}") from error


@dataclass(frozen=True)
class Run:
    """A run of a study: its labels, and its stages, most often one."""

    labels: dict[str, str]
    stages: tuple[ExperimentConfig, ...]

    @property
    def config(self) -> ExperimentConfig:
        """The last stage."""
        return self.stages[-1]

    @property
    def fingerprint(self) -> str:
        """Hash of the settings of training and validation that are not defaults, which identifies
        the result of the run.

        New settings do not change it; after a change of a default, or of the meaning of a setting,
        studies must be repeated.
        """
        settings = self.config if len(self.stages) == 1 else self.stages
        text = json.dumps(settings, default=_chosen, sort_keys=True)
        text = text.replace(f"{CONFIGS}/", "configs/")  # the same in all checkouts and folders
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{axis} {label}" for axis, label in labels.items())


def load_study(path: str | Path) -> Study:
    """Load the study that `get_study()` of a Python file returns.

    Args:
      path: path of the file, or name of a shipped study.

    Raises:
      UserError: the file does not exist, it defines no study, or a value is invalid.

    Examples:
      >>> load_study("copying").seeds
      'seed'
    """
    return run_file(find_file(path, Path(__file__).parent / "grids"), "get_study", Study)


def _chosen(config: DataclassInstance) -> dict[str, JSON]:
    """The tag of a nested configuration and its fields that differ from the defaults."""
    chosen: dict[str, JSON] = {"of": type(config).__name__}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in MEASURED_AFTER or (field.name in ADDED and value == field.default):
            continue
        if dataclasses.is_dataclass(type(value)):
            chosen[field.name] = _chosen(value)
        elif value != field.default:
            chosen[field.name] = value
    return chosen


def _with(config: Config, fields: Mapping[str, FieldValue]) -> Config:
    """A nested configuration with these fields replaced."""
    changed: dict[str, Any] = {}
    inner: dict[str, dict[str, FieldValue]] = {}
    for field, value in fields.items():
        name, _, rest = field.partition(".")
        if not hasattr(config, name):
            raise ValueError(f"{type(config).__name__} has no field {name!r}")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changed[name] = value
    for name, section_fields in inner.items():
        changed[name] = _with(changed.get(name, getattr(config, name)), section_fields)
    return replace(config, **changed)
