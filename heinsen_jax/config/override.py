"""Overrides of the fields of an experiment, `--section.field VALUE`."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import get_args

import pydantic
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from heinsen_jax.config.load import check_range
from heinsen_jax.config.suggestions import refusal
from heinsen_jax.errors import UserError, explain
from heinsen_jax.models.layers import Layers, Pattern, parse_pattern
from heinsen_jax.training.config import ExperimentConfig, as_json, flat

COMMAND_LINE = ConstructorRegistry()
"""Rules by which tyro reads fields from the command line, besides its own."""


@COMMAND_LINE.primitive_rule
def _attention(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Pattern] | None:
    """The rule for `model.attention`."""
    if field.type != get_args(Pattern)[0]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="MECHANISM[:OPTION=VALUE,...] ...",
        instance_from_str=parse_pattern,
        is_instance=lambda value: isinstance(value, str | Layers | tuple),
        str_from_instance=lambda value: [*map(str, value if isinstance(value, tuple) else [value])],
    )


def override(config: ExperimentConfig, arguments: Sequence[str]) -> ExperimentConfig:
    """Replace fields of a configuration from `--section.field VALUE` arguments.

    Raises:
      UserError: a name is misspelled, or a value has the wrong type or is out of range.

    Examples:
      >>> override(ExperimentConfig(), ["--model.num-layers", "3"]).model.num_layers
      3
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            changed = tyro.cli(
                ExperimentConfig,
                default=config,
                args=list(arguments),
                config=(tyro.conf.AvoidSubcommands,),
                registry=COMMAND_LINE,
            )
    except ValueError as error:
        raise UserError(explain(error)) from error
    except SystemExit as ended:
        if not ended.code:
            print(said.getvalue())
            raise
        raise UserError(_refusal(config, ended.__context__, said.getvalue(), arguments)) from None
    return check_range(changed)


def _refusal(
    config: ExperimentConfig, error: BaseException | None, box: str, arguments: Sequence[str]
) -> str:
    """Describe in one line why tyro refused an argument, from its error or its printed box."""
    cause = error and (error.__cause__ or error.__context__)
    if isinstance(cause, pydantic.ValidationError):
        sections = (x.name for x in dataclasses.fields(config))
        by_class = {type(getattr(config, name)).__name__: name for name in sections}
        said = explain(cause, f"--{by_class.get(cause.title, cause.title)}")
        return re.sub(r"--[\w.]+", lambda flag: flag[0].replace("_", "-"), said)
    lines = [re.sub(r"[│╭╮╰╯─]|--{5,}", " ", line) for line in box.splitlines()]
    body = " ".join(" ".join(lines[1:]).split())  # below its title
    parts = "Perhaps you meant|Arguments similar to|Argument helptext|For full helptext"
    reason = re.split(rf" (?={parts})", body)[0].removeprefix("Error parsing ")
    return refusal(reason, flat(as_json(config)), arguments)
