"""The attention layers of a language model: a pattern of mechanisms with their options."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import pydantic

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.errors import UserError, explain
from heinsen_jax.runtime.arguments import Form
from heinsen_jax.typing import JSON

T = TypeVar("T")


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class Layers:
    """Consecutive attention layers of one mechanism.

    On the command line they are written as `log:repeats=3,decay=head`, which `str` returns and
    `parse_pattern` reads.

    Examples:
      >>> str(Layers("log", repeats=3, options={"decay": "head"}))
      'log:repeats=3,decay=head'
    """

    mechanism: str
    """Name of the mechanism."""
    repeats: pydantic.PositiveInt = 1
    """Number of consecutive layers."""
    options: Mapping[str, FieldValue] = dataclasses.field(default_factory=dict)
    """Fields of the mechanism's configuration; fields that are left out have the defaults of the
    block and of the mechanism."""
    norm_after: bool | Literal["both"] = False
    """Whether the norms of a block follow attention and MLP, as in OLMo 2, instead of preceding
    them: x + norm(attention(x)). both: norms precede and follow them, as in Gemma 2."""
    has_mlp: bool = True
    """Whether the MLP of the block, if it has one, follows these layers."""

    def __hash__(self) -> int:
        options = frozenset(self.options.items())
        return hash((self.mechanism, self.repeats, options, self.norm_after, self.has_mlp))

    def __str__(self) -> str:
        fields = ({"repeats": self.repeats} if self.repeats > 1 else {}) | {**self.options}
        fields |= {"norm_after": self.norm_after} if self.norm_after else {}
        fields |= {} if self.has_mlp else {"has_mlp": False}
        pairs = ",".join(f"{name}={value}" for name, value in fields.items())
        return f"{self.mechanism}:{pairs}" if pairs else self.mechanism


def _kind(value: object) -> str:
    """The kind of a pattern, so that errors are reported for this kind only."""
    if isinstance(value, str):
        return "name"
    return "pattern" if isinstance(value, list | tuple) else "layers"


Entry: TypeAlias = Annotated[
    Annotated[str, pydantic.Tag("name")] | Annotated[Layers, pydantic.Tag("layers")],
    pydantic.Discriminator(_kind),
]
Pattern: TypeAlias = Annotated[
    Annotated[str, pydantic.Tag("name")]
    | Annotated[Layers, pydantic.Tag("layers")]
    | Annotated[tuple[Entry, ...], pydantic.Tag("pattern")],
    pydantic.Discriminator(_kind),
    Form(lambda values: parse_pattern(values)),
]
"""A mechanism by name or with options, or several, in the order of the layers."""


def single_layers(pattern: Pattern) -> tuple[Layers, ...]:
    """The layers of a pattern one by one.

    Examples:
      >>> [str(layer) for layer in single_layers((Layers("log", repeats=2), "softmax"))]
      ['log', 'log', 'softmax']
    """
    entries = pattern if isinstance(pattern, tuple) else (pattern,)
    named = (Layers(entry) if isinstance(entry, str) else entry for entry in entries)
    return tuple(dataclasses.replace(x, repeats=1) for x in named for _ in range(x.repeats))


def shortest_period(layers: list[T]) -> list[T]:
    """The shortest list that yields the layers if it is repeated."""
    number = len(layers)
    periods = (n for n in range(1, number + 1) if number % n == 0)
    return next(layers[:n] for n in periods if layers == layers[:n] * (number // n))


def parse_pattern(arguments: Sequence[str]) -> Pattern:
    """Read mechanisms, or layers of them with options, from the command line.

    Raises:
      UserError: one is not of the form `mechanism:option=value,option=value`.

    Examples:
      >>> parse_pattern(["log:repeats=3,max_timescale=64", "softmax"])
      (Layers(mechanism='log', repeats=3, options={'max_timescale': 64}), 'softmax')
    """
    entries = tuple(_entry(argument) for argument in arguments)
    return entries[0] if len(entries) == 1 else entries


def _entry(argument: str) -> str | Layers:
    mechanism, colon, text = argument.partition(":")
    if not colon:
        return mechanism
    fields: dict[str, FieldValue] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if not (name and value) or name in fields:
            raise UserError(
                f"{argument}: {pair!r} must be an option with its value, once; write "
                "mechanism:option=value,option=value"
            )
        fields[name] = _value(value)
    names = "repeats", "norm_after", "has_mlp"
    own = {name: fields.pop(name) for name in names if name in fields}
    values = {"mechanism": mechanism, "options": fields, **own}
    try:
        return pydantic.TypeAdapter(Layers).validate_python(values)
    except pydantic.ValidationError as error:
        raise UserError(f"{argument}: {explain(error)}") from None


def _value(text: str) -> FieldValue:
    """A value of an option from the command line."""
    constants = {"True": True, "true": True, "False": False, "false": False, "None": None}
    if text in constants:  # "none" is a value of some options
        return constants[text]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


class _Former(pydantic.BaseModel):
    """Mechanisms and their options as earlier versions saved them: pairs of `mechanism.option` or
    `index.option` and a value."""

    attention: str | list[str] = "log"
    attention_options: list[tuple[str, FieldValue]]


def with_layers(model: dict[str, JSON]) -> dict[str, JSON]:
    """A saved model configuration, with `attention_options` of earlier versions in `attention`.

    Raises:
      UserError: the field has another form.
    """
    if "attention_options" not in model:
        return model
    try:
        former = _Former.model_validate(model)
    except pydantic.ValidationError as error:
        raise UserError(explain(error, "model")) from None
    is_one = isinstance(former.attention, str)
    pattern: list[JSON] = []
    for index, name in enumerate([former.attention] if is_one else former.attention):
        options = {
            option.rpartition(".")[2]: value
            for option, value in former.attention_options
            if option.rpartition(".")[0] in (name, str(index))
        }
        layer = {"mechanism": name, "repeats": 1, "options": options}
        pattern.append(layer if options else name)
    rest = {name: value for name, value in model.items() if name != "attention_options"}
    return rest | {"attention": pattern[0] if is_one else pattern}
