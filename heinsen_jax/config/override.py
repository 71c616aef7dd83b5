"""Overrides of the fields of an experiment, `--section.field VALUE`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pydantic

from heinsen_jax.config.load import check_range
from heinsen_jax.config.suggestions import OTHER_VALUES, stray, unrecognized
from heinsen_jax.errors import UserError
from heinsen_jax.runtime.arguments import describe_errors, options_of, read
from heinsen_jax.training.config import ExperimentConfig, as_json, flat


def override(config: ExperimentConfig, arguments: Sequence[str]) -> ExperimentConfig:
    """Replace fields of a configuration from `--section.field VALUE` arguments.

    Raises:
      UserError: a name is misspelled, or a value has the wrong type or is out of range.

    Examples:
      >>> override(ExperimentConfig(), ["--model.num-layers", "3"]).model.num_layers
      3
    """
    options = options_of(ExperimentConfig, values=config)
    given = read(options, arguments)
    fields = flat(as_json(config))
    if given.unknown:
        raise UserError(unrecognized(given.unknown, fields))
    if first := given.first:
        raise UserError(f"Unrecognized options: {', '.join(first)}; {stray(first[0], fields)}")
    if given.extra:
        raise UserError(given.extra[0].explain())
    mixture = given.values.get("data.mixture", getattr(config.data, "mixture", None))
    if "data.corpus" in given.values and mixture is not None:
        raise UserError(
            "--data.corpus has no effect beside data.mixture; give --data.mixture None, too, or "
            "leave it out"
        )
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in given.values.items():
        section, _, field = name.rpartition(".")
        by_section.setdefault(section, {})[field] = value
    changed = by_section.pop("", {})
    for section in [*by_section, ""]:
        try:
            if section:
                part = dataclasses.replace(getattr(config, section), **by_section[section])
                changed[section] = part
            else:
                config = dataclasses.replace(config, **changed)
        except pydantic.ValidationError as error:
            words = given.words
            message = describe_errors(error, options, words, section, OTHER_VALUES)
            raise UserError(message) from None
    return check_range(config)
