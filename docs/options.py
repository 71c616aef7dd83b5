"""Tables of all options of the mechanisms and of the trainer, from their classes."""

from collections.abc import Iterable
from itertools import groupby

from heinsen_jax import attention
from heinsen_jax.config import ExperimentConfig
from heinsen_jax.runtime.arguments import Option, options_of

SHOWN = "members: [], show_bases: false, show_root_heading: true, heading_level: 3"
"""Options of mkdocstrings."""


class Text(str):
    """Text that has no figures."""


def mechanism_reference() -> Text:
    """Every mechanism: its formula and paper, and a table of its options."""
    parts = []
    for name in attention.names():
        layer = attention.mechanism(name)
        shown = f"::: {layer.__module__}.{layer.__name__}\n    options: {{{SHOWN}}}"
        table = options_table((x.name, x) for x in options_of(layer.Config).values())
        parts.append(f"## {name}\n\n{shown}\n\n{table}\n")
    return Text("\n".join(parts))


def trainer_reference() -> Text:
    """Every field of an experiment, by section."""
    options = sorted(options_of(ExperimentConfig).values(), key=lambda x: "." in x.name)
    parts = []
    for section, fields in groupby(options, key=lambda x: x.name.rpartition(".")[0]):
        parts.append(f"## {section or 'General'}\n\n{options_table((x.flag, x) for x in fields)}\n")
    return Text("\n".join(parts))


def options_table(options: Iterable[tuple[str, Option]]) -> str:
    rows = [
        f"| `{name}`<br>`{x.default!r}` | {values_of(x)} | {x.help.replace('|', chr(92) + '|')} |"
        for name, x in options
    ]
    head = ["| option, default | values | |", "|---|---|---|"]
    return "\n".join(['<div class="options" markdown>\n', *head, *rows, "\n</div>"])


def values_of(option: Option) -> str:
    """The values that an option may have."""
    words = [f"`{x}`" for x in option.choices]
    types = [x for x in option.types if isinstance(x, type)]
    words += ["`None`" if x is type(None) else x.__name__ for x in types]
    return ", ".join(words) or "several"
