"""What a study runs: an experiment, and the ways in which its runs differ."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from heinsen_jax.config import CONFIGS, ExperimentConfig, explain, find_file, run_file
from heinsen_jax.data import AnyDataConfig
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.study.report import Plot, Ranking
from heinsen_jax.training.optimizer import OptimizerConfig
from heinsen_jax.training.settings import TrainingConfig
from heinsen_jax.typing import JSON

Option: TypeAlias = tuple[str, int | float | bool | str]
"""A field of a mechanism's configuration, as in `model.attention_options`."""
Section: TypeAlias = AnyDataConfig | LanguageModelConfig | OptimizerConfig | TrainingConfig
Choice: TypeAlias = int | float | bool | str | tuple[Option | str | int, ...] | Section | None
"""The value of a field, or of a whole section."""
Axes = Mapping[str, Mapping[str, Mapping[str, Choice]]]


@runtime_checkable
class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


Config = TypeVar("Config")


@dataclass(frozen=True)
class Study:
    """A grid of runs, of which the best along some axis is shown, and all seeds.

    Attributes:
      title: of the report.
      about: what is asked, at what size, and what to make of the answer, in Markdown.
      base: what all runs have in common.
      axes: by their names, what may be chosen along each: label -> {"section.field": value, ...}.
        A later axis overrides what an earlier one says of a field.
      metric: what is compared, of the last evaluation.
      mode: whether the smallest ("min") or the largest ("max") value is the best.
      tuned: the axes along which only the best is shown, such as learning rates.
      seeds: the axis of runs that differ by chance alone. All tuned choices are run with its first
        label, and only the best with the others.
      extra_metrics: further metrics in the report's table.
      plots: what is drawn.
    """

    title: str
    about: str
    base: ExperimentConfig
    axes: Axes
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    tuned: tuple[str, ...] = ("learning_rate",)
    seeds: str = "seed"
    extra_metrics: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()

    def __post_init__(self) -> None:
        compared = self.compared(dict.fromkeys(self.axes, ""))
        for plot in self.plots:
            if not isinstance(plot, Ranking) and plot.lines not in compared:
                raise ValueError(
                    f"{plot}: lines must be an axis that is compared, one of {', '.join(compared)}"
                )

    def first(self) -> list["Run"]:
        """All runs with the first seed.

        Raises:
          UserError: a field is misspelt or its value does not fit; the message names the run.
        """
        choices = {axis: list(labels) for axis, labels in self.axes.items()}
        if self.seeds in choices:
            choices[self.seeds] = choices[self.seeds][:1]
        grid = itertools.product(*choices.values())
        return [self.run(dict(zip(choices, labels, strict=True))) for labels in grid]

    def then(self, best: Mapping[str, str]) -> list["Run"]:
        """The runs with other seeds of one that was the best, given its labels."""
        others = list(self.axes.get(self.seeds, {}))[1:]
        return [self.run({**best, self.seeds: seed}) for seed in others]

    def compared(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Of a run's labels those that tell apart what is compared."""
        apart = {*self.tuned, self.seeds}
        return {axis: label for axis, label in labels.items() if axis not in apart}

    def run(self, labels: Mapping[str, str]) -> "Run":
        """The run of one label of each axis."""
        fields: dict[str, Choice] = {}
        for axis, label in labels.items():
            for field, value in self.axes[axis][label].items():
                inside = f"{field}."  # a section replaces what was said of its fields
                fields = {x: fields[x] for x in fields if not x.startswith(inside)} | {field: value}
        try:
            return Run(dict(labels), _with(self.base, fields))
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.title}, {describe(labels)}: {explain(error)}") from error


@dataclass(frozen=True)
class Run:
    """One run of a study: where it stands in the grid, and its experiment."""

    labels: dict[str, str]
    config: ExperimentConfig

    @property
    def fingerprint(self) -> str:
        """Of all settings that are not defaults: a result with another one is not of this run.

        So a result stays of its run when a later version has more settings. Whoever changes a
        default, or what a setting means, must repeat the studies.
        """
        text = json.dumps(_chosen(self.config), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{axis} {label}" for axis, label in labels.items())


def load_study(path: str | Path) -> Study:
    """The study that a Python file's `get_study()` returns.

    Args:
      path: of the file; or the name of a study that comes with this package.

    Raises:
      UserError: there is no such file, it defines no study, or a value in it does not fit.

    Examples:
      >>> load_study("copying").seeds
      'seed'
    """
    return run_file(find_file(path, CONFIGS / "studies"), "get_study", Study)


def _chosen(config: DataclassInstance) -> dict[str, JSON]:
    """What a nested configuration is of, and where it differs from the defaults."""
    found: dict[str, JSON] = {"of": type(config).__name__}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, DataclassInstance):
            found[field.name] = _chosen(value)
        elif value != field.default:
            found[field.name] = value
    return found


def _with(config: Config, fields: Mapping[str, Choice]) -> Config:
    """A nested configuration with all these fields replaced at once."""
    changed: dict[str, Choice] = {}
    inner: dict[str, dict[str, Choice]] = {}
    for field, value in fields.items():
        name, _, rest = field.partition(".")
        if not hasattr(config, name):
            raise ValueError(f"{type(config).__name__} has no field {name!r}")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changed[name] = value
    for name, of_section in inner.items():
        changed[name] = _with(changed.get(name, getattr(config, name)), of_section)
    assert isinstance(config, DataclassInstance)
    return replace(config, **changed)
