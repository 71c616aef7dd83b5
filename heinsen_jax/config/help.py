"""Help texts of configuration fields: the most common ones, or a section."""

import ast
import dataclasses
import inspect
import textwrap
from typing import Annotated, get_type_hints

import tyro

from heinsen_jax.config.override import COMMAND_LINE
from heinsen_jax.errors import UserError
from heinsen_jax.training.config import ExperimentConfig

FIRST = (
    "seed",
    "model.attention",
    "model.block",
    "model.num_layers",
    "model.model_dim",
    "model.num_heads",
    "data.corpus",
    "data.tokenizer",
    "data.sequence_length",
    "data.batch_size",
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "training.steps",
    "training.evaluate_every",
    "training.checkpoint_every",
    "mesh.data",
    "mesh.fsdp",
)
SECTIONS = tuple(x.name for x in dataclasses.fields(ExperimentConfig) if x.name != "seed")


def print_help(config: ExperimentConfig, section: str) -> None:
    """Print the fields of a configuration with their values and descriptions.

    Args:
      config: the configuration.
      section: a section (model, data, ...), or "all"; "" for the most common fields.

    Raises:
      UserError: unknown section.
    """
    if section in (*SECTIONS, "all"):
        _print_section(config, SECTIONS if section == "all" else (section,))
        return
    if section:
        raise UserError(
            f"--help {section}: no such section; choose one of {', '.join(SECTIONS)}, all"
        )
    print("\nmost common fields, with their values here:\n")
    for name in FIRST:
        part, _, field = name.rpartition(".")
        holder = getattr(config, part) if part else config
        if hasattr(holder, field):  # a task has no corpus
            print(f"  --{name.replace('_', '-')} {_shown(getattr(holder, field))}")
            print(textwrap.indent(textwrap.fill(_description(type(holder), field), 88), " " * 6))
    print(f"\nall fields of a section: --help SECTION, one of {', '.join(SECTIONS)}; or --help all")


def _print_section(config: ExperimentConfig, sections: tuple[str, ...]) -> None:
    shown = {name: _described(getattr(config, name)) for name in sections}
    fields = [(name, type(section), section) for name, section in shown.items()]
    part = dataclasses.make_dataclass("Part", fields, frozen=True)
    try:
        tyro.cli(part, args=["--help"], prog="train.py", description="", registry=COMMAND_LINE)
    except SystemExit:
        return


def _described(section: object) -> object:
    """A copy of a section whose help texts are in one line: tyro keeps the line breaks of the
    source."""
    cls = type(section)
    fields = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if hasattr(section, name):
            described = Annotated[hint, tyro.conf.arg(help=_description(cls, name))]
            fields.append((name, described, getattr(section, name)))
    copy = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    copy.__doc__ = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    return copy()


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


def _description(config: type, field: str) -> str:
    """The docstring of a field: the string that follows it in its class, or in a base class."""
    for cls in config.__mro__:
        if field not in inspect.get_annotations(cls):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        (definition,) = tree.body
        assert isinstance(definition, ast.ClassDef)
        pairs = zip(definition.body, definition.body[1:], strict=False)
        for statement, following in pairs:
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if name == field:
                    return " ".join(text.split())
    return ""
