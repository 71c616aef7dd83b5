"""Command lines: options are the fields of configuration classes, validated by pydantic.

A field `num_layers` is given as `--num-layers 3` or `--num-layers=3`, a boolean as `--latest` or
`--no-latest`, and a tuple as several values. A field's docstring is its help text.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic

from heinsen_jax.errors import UserError

Options = TypeVar("Options")

FLAG = re.compile(r"--?[A-Za-z]")
"""Start of an option; -1 is a value."""


@dataclass(frozen=True)
class Form:
    """Metadata of a field that is parsed differently.

    Attributes:
      parse: function from the values on the command line to the field's value; None if the field
        cannot be given there.
      is_positional: whether the values have no flag.
    """

    parse: Callable[[Sequence[str]], Any] | None = None
    is_positional: bool = False


POSITIONAL = Form(tuple, is_positional=True)
"""For a field of several values without a flag."""


def only(values: Sequence[str]) -> str:
    """The only value of a positional field."""
    if len(values) != 1:
        raise UserError(f"give one value without a flag, not {len(values)}: {' '.join(values)}")
    return values[0]


@dataclass(frozen=True)
class Option:
    """A field on the command line.

    Attributes:
      name: its name, with a section if any: `model.num_layers`.
      hint: its annotation.
      owner: the class that defines it.
      default: its default, or its present value; `dataclasses.MISSING` if it is required.
    """

    name: str
    hint: Any
    owner: type
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def form(self) -> Form | None:
        metadata = getattr(self.hint, "__metadata__", ())
        return next((x for x in metadata if isinstance(x, Form)), None)

    @property
    def is_positional(self) -> bool:
        return self.form is not None and self.form.is_positional

    @property
    def types(self) -> tuple[Any, ...]:
        """Alternatives of the annotation, without metadata."""
        return tuple(_alternatives(self.hint))

    @property
    def is_switch(self) -> bool:
        return self.types == (bool,)

    @property
    def choices(self) -> tuple[str, ...]:
        """Values of a `Literal`, alone or in a tuple; none for other types."""
        kinds = [y for x in self.types for y in (get_args(x) if get_origin(x) is tuple else (x,))]
        return tuple(y for x in kinds if get_origin(x) is Literal for y in get_args(x))

    @property
    def capacity(self) -> int | None:
        """Number of values; None for any number."""
        if self.is_switch:
            return 0
        several = any(get_origin(x) is tuple for x in self.types)
        return None if self.form or several else 1

    def read(self, values: Sequence[str]) -> Any:
        """The field's value, which pydantic has not validated yet.

        Raises:
          UserError: a value is missing, or the option cannot be given.
        """
        if (form := self.form) is not None:
            if form.parse is None:
                raise UserError(
                    f"{self.flag} cannot be given on a command line; set it in a configuration file"
                )
            try:
                return form.parse(values)
            except UserError as error:
                name = self.name.upper() if self.is_positional else self.flag
                raise UserError(f"{name}: {error}") from None
        if self.capacity is None:
            return tuple(values)
        if not values:
            shown = self.default
            if shown in (None, dataclasses.MISSING) or not str(shown).strip():
                shown = "VALUE"
            dash = f", or {self.flag}=VALUE if it begins with a dash" if str in self.types else ""
            raise UserError(f"{self.flag}: the value is missing; write {self.flag} {shown}{dash}")
        return None if values[0] == "None" and type(None) in self.types else values[0]

    def explain(
        self, problem: Mapping[str, Any], values: Sequence[str], synonyms: Mapping[str, str]
    ) -> str:
        """Describe an error of pydantic in the terms of the command line."""
        given = " ".join([self.flag, *values])
        or_none = " or None" if type(None) in self.types else ""
        kind = problem["type"]
        if kind == "literal_error":
            return _wrong_choice(self.flag, str(problem["input"]), self.choices, synonyms)
        if self.capacity is None and kind.endswith(("_parsing", "_type")):
            wanted = {"int": "integers", "float": "numbers"}.get(kind.partition("_")[0], "others")
            return f"{given}: a value has the wrong type; give {wanted}, separated by spaces"
        if kind.startswith("int_"):
            return f"{given}: not an integer{or_none}; {_as_integer(values, self.flag)}"
        if kind.startswith("float_"):
            return f"{given}: not a number{or_none}; write it as in 0.001 or 1e-3"
        return f"{self.flag}: {problem['msg'].removeprefix('Value error, ')}"

    @property
    def help(self) -> str:
        """The field's docstring, with its choices."""
        text = _description(self.owner, self.name.rpartition(".")[2])
        missing = [x for x in self.choices if not re.search(rf"\b{re.escape(str(x))}\b", text)]
        return f"{text} One of {', '.join(map(str, self.choices))}." if missing else text


def _alternatives(hint: Any) -> Iterable[Any]:
    if get_origin(hint) is Annotated:
        yield from _alternatives(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for alternative in get_args(hint):
            yield from _alternatives(alternative)
    else:
        yield hint


def options_of(owner: type, section: str = "", values: object = None) -> dict[str, Option]:
    """Options for the fields of a class and of its sections, fields that are such classes, by name,
    with the values of an instance if given."""
    hints, options = get_type_hints(owner, include_extras=True), {}
    for field in dataclasses.fields(owner):  # pyright: ignore[reportArgumentType]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if values is not None:
            default = getattr(values, field.name)
        name = f"{section}.{field.name}" if section else field.name
        option = Option(name, hints[field.name], owner, default)
        is_section = dataclasses.is_dataclass(default) and option.form is None
        options |= options_of(type(default), name, default) if is_section else {name: option}
    return options


class Given(NamedTuple):
    """An option on the command line, with the values after it."""

    flag: str
    values: list[str]
    words: list[str]

    def named(self, options: Mapping[str, Option]) -> tuple[Option | None, bool]:
        """The option, None if unknown, and whether it is negated."""
        name = self.flag.lstrip("-").replace("-", "_") if self.flag.startswith("--") else ""
        if name in options and not options[name].is_positional:
            return options[name], False
        section, dot, field = name.rpartition(".")
        option = options.get(section + dot + field.removeprefix("no_"))
        is_negated = field.startswith("no_") and option is not None and option.is_switch
        return (option if is_negated else None), is_negated


def split(arguments: Iterable[str]) -> tuple[list[str], list[Given]]:
    """The values before the first option, and the options."""
    first: list[str] = []
    given: list[Given] = []
    for argument in arguments:
        if FLAG.match(argument):
            flag, equals, value = argument.partition("=")
            given.append(Given(flag, [value] if equals else [], [argument]))
        elif given:
            given[-1].values.append(argument)
            given[-1].words.append(argument)
        elif argument != "--":
            first.append(argument)
    return first, given


class Extra(NamedTuple):
    """A surplus value after an option."""

    option: Option
    flag: str
    value: str

    def explain(self) -> str:
        if self.option.is_switch:
            section, _, field = self.option.flag.removeprefix("--").rpartition(".")
            negated = f"--{section}.no-{field}" if section else f"--no-{field}"
            fix = f"a switch has no value: write {self.option.flag} or {negated}"
        else:
            fix = f"{self.flag} has one value: leave out {self.value}, or quote a value with spaces"
        return f"Unrecognized options: {self.value}; {fix}"


@dataclass(frozen=True)
class Arguments:
    """Arguments that are read, and not validated yet.

    Attributes:
      values: the field's value by the name of its option.
      words: the values on the command line by the name of their option.
      first: values before the first option.
      unknown: unknown options.
      extra: surplus values.
    """

    values: dict[str, Any]
    words: dict[str, list[str]]
    first: list[str]
    unknown: list[Given]
    extra: list[Extra]


def read(options: Mapping[str, Option], arguments: Iterable[str]) -> Arguments:
    """Read arguments.

    Raises:
      UserError: a value is missing, or an option cannot be given on a command line.
    """
    first, given = split(arguments)
    done = Arguments({}, {}, first, [], [])
    for each in given:
        option, is_negated = each.named(options)
        if option is None:
            done.unknown.append(each)
            continue
        taken = len(each.values) if option.capacity is None else option.capacity
        if option.capacity is None and option.name in done.words:
            values = " ".join([*done.words[option.name], *each.values])
            raise UserError(f"{each.flag} is given twice; give all values together: {values}")
        done.words[option.name] = words = each.values[:taken]
        done.values[option.name] = not is_negated if option.is_switch else option.read(words)
        done.extra.extend(Extra(option, each.flag, value) for value in each.values[taken:])
    return done


def describe_errors(
    error: pydantic.ValidationError,
    options: Mapping[str, Option],
    words: Mapping[str, Sequence[str]],
    section: str = "",
    synonyms: Mapping[str, str] | None = None,
) -> str:
    """Describe in one line why pydantic refused fields.

    Args:
      error: the error.
      options: the options of the fields.
      words: the values on the command line by the name of their option.
      section: the section of the fields, if any.
      synonyms: choices by the names that other libraries have for them.
    """
    lines = []
    for problem in error.errors():
        path = [*filter(None, [section]), *map(str, problem["loc"])]
        names = (".".join(path[:count]) for count in range(len(path), 0, -1))
        if name := next((x for x in names if x in options), None):
            lines.append(options[name].explain(problem, words.get(name, []), synonyms or {}))
        else:
            text = problem["msg"].removeprefix("Value error, ")
            lines.append(f"--{section}: {text}" if section else text)
    return "; ".join(lines)


def _wrong_choice(
    flag: str, value: str, choices: Sequence[str], synonyms: Mapping[str, str]
) -> str:
    names = [x for x in [synonyms.get(value.lower())] if x in choices]
    names += difflib.get_close_matches(value.lower(), choices, 1)
    meant = f"; perhaps {names[0]} is meant" if names else ""
    return f"{flag} {value}: no such choice; choose one of {', '.join(choices)}{meant}"


def _as_integer(given: Sequence[str], flag: str) -> str:
    try:
        number = float(given[0].replace(",", ""))
        return f"write {flag} {number:.0f}" if number.is_integer() else "round it"
    except (ValueError, IndexError, OverflowError):
        return "give digits"


def parse(
    kind: type[Options],
    *,
    prog: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    unknown: list[str] | None = None,
) -> Options:
    """Read the options of a command; `--help` prints them and exits.

    Args:
      kind: configuration class, whose fields are the options.
      prog: the command.
      description: text above the options.
      arguments: the arguments; `sys.argv[1:]` when None.
      unknown: a list to which unknown arguments are appended; they are refused when None.

    Raises:
      UserError: an option is unknown, missing or invalid.
    """
    words = ["--help" if x == "-h" else x for x in _given(arguments)]
    options = options_of(kind)
    if _wants_help(options, words) and "help" not in options:
        print_options(prog, description, options)
        raise SystemExit(0)
    given = read(options, words)
    position = next((x for x in options.values() if x.is_positional), None)
    if position is not None:
        if values := [*given.first, *(x.value for x in given.extra)]:
            given.values[position.name] = position.read(values)
        given.first.clear()
    elif given.extra:
        raise UserError(given.extra[0].explain())
    rest = [*given.first, *(x for each in given.unknown for x in each.words)]
    if unknown is not None:
        unknown += rest
    elif rest:
        flag = given.unknown[0].flag.replace("_", "-") if given.unknown else ""
        close = difflib.get_close_matches(flag, [x.flag for x in options.values()], n=1)
        fix = f"perhaps {close[0]} is meant" if close else f"{prog} --help lists the options"
        raise UserError(f"Unrecognized options: {', '.join(rest)}; {fix}")
    for option in options.values():
        if option.name not in given.values and option.default is dataclasses.MISSING:
            name = option.name.upper() if option.is_positional else option.flag
            raise UserError(f"{name} is missing; {prog} --help lists the options")
    fields: dict[str, Any] = {}
    for name, value in given.values.items():
        section, _, field = name.rpartition(".")
        (fields.setdefault(section, {}) if section else fields)[field] = value
    try:
        return kind(**fields)
    except pydantic.ValidationError as error:
        raise UserError(describe_errors(error, options, given.words)) from None


def parse_command(
    commands: Mapping[str, type[Options]],
    *,
    prog: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
) -> Options:
    """As `parse`, for a program whose first argument is one of several commands."""
    name, *given = _given(arguments) or [""]
    if name in ("-h", "--help"):
        print(f"usage: {prog} {{{','.join(commands)}}} [options]\n")
        print(inspect.cleandoc(description or ""))
        raise SystemExit(0)
    if name not in commands:
        raise UserError(f"{name or 'the command is missing'}: choose one of {', '.join(commands)}")
    kind = commands[name]
    return parse(kind, prog=f"{prog} {name}", description=kind.__doc__, arguments=given)


def _wants_help(options: Mapping[str, Option], words: Sequence[str]) -> bool:
    """Whether --help is given, and not as the value of the option before it."""
    _, given = split(words)
    for before, each in zip([None, *given], given, strict=False):
        if each.flag == "--help":
            option = before.named(options)[0] if before else None
            return option is None or option.capacity == 0 or bool(before and before.values)
    return False


def _given(arguments: Sequence[str] | None) -> Sequence[str]:
    return sys.argv[1:] if arguments is None else arguments


def print_options(prog: str, description: str | None, options: Mapping[str, Option]) -> None:
    """Print the help text of a command."""
    required = [x for x in options.values() if x.default is dataclasses.MISSING]
    names = [_usage(x) for x in required]
    print(f"usage: {' '.join([prog, *names])} [options]\n")
    if description:
        print(f"{inspect.cleandoc(description)}\n")
    print_fields(options.values())


def _usage(option: Option) -> str:
    name = option.name.upper()
    if option.is_positional:
        return f"{name} ..." if option.form is POSITIONAL else name
    return f"{option.flag} {name}"


def print_fields(options: Iterable[Option], *, flags: bool = True) -> None:
    """Print options with their values and descriptions, as flags or as `name=value`."""
    width = min(shutil.get_terminal_size().columns, 100) - 2
    for option in options:
        if not flags:
            print(f"  {option.name}={option.default}")
        elif option.default is dataclasses.MISSING:
            print(f"  {_usage(option)}")
        else:
            print(f"  {option.flag} {_shown(option)}".rstrip())
        indent = " " * 6
        print(textwrap.fill(option.help, width, initial_indent=indent, subsequent_indent=indent))


def _shown(option: Option) -> str:
    if option.is_switch:
        return f"(now {'on' if option.default else 'off'})"
    if option.default is None or option.default == ():
        return f"{option.name.rpartition('.')[2].upper()}{' ...' if option.default == () else ''}"
    several = isinstance(option.default, tuple)
    return " ".join(map(str, option.default)) if several else str(option.default)


def _description(owner: type, field: str) -> str:
    """The docstring of a field: the string that follows it in its class, or in a base class."""
    for cls in owner.__mro__:
        if field not in inspect.get_annotations(cls):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except OSError:  # installed without sources
            return ""
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
