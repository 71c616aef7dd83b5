"""Options of commands: forms, defaults, and one line for each mistake."""

from pathlib import Path
from typing import Annotated, Literal

import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.runtime.arguments import POSITIONAL, Form, only, parse, parse_command
from heinsen_jax.typing import config_dataclass


@config_dataclass
class Options:
    """Options of a program."""

    inputs: Annotated[tuple[str, ...], POSITIONAL]
    """Files."""
    output: Path
    """A folder."""
    number: int = 3
    """A number."""
    kind: Literal["first", "second"] | None = None
    """Which of them."""
    others: tuple[int, ...] = ()
    """Further numbers."""
    is_fast: bool = True
    """Whether it is fast."""


@config_dataclass
class One:
    """Options of a command."""

    name: Annotated[str, Form(only, is_positional=True)]
    """The only value without a flag."""


def given(words: str) -> Options:
    return parse(Options, prog="program", description="A program.", arguments=words.split())


def test_values_are_read_in_any_order():
    ours = Options(inputs=("a", "b"), output=Path("out"), number=5, others=(1, -2), is_fast=False)
    assert given("a b --output out --number 5 --others 1 -2 --no-is-fast") == ours
    assert given("--others=1 -2 --number=5 a --no-is_fast b --output=out") == ours
    assert given("--kind None a --output out") == Options(inputs=("a",), output=Path("out"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a", "--output is missing; program --help lists the options"),
        ("--output out", "INPUTS is missing"),
        ("a --output", "--output: the value is missing; write --output VALUE"),
        ("a --output out --numbr 3", "Unrecognized options: --numbr, 3; perhaps --number is meant"),
        ("a --output out --number 1.5", "--number 1.5: not an integer; round it"),
        (
            "a --output out --kind third",
            "--kind third: no such choice; choose one of first, second",
        ),
        ("a --output out --others x", "--others x: a value has the wrong type"),
    ],
)
def test_a_mistake_is_named(words, message):
    with pytest.raises(UserError) as caught:
        given(words)
    assert message in str(caught.value)


def test_values_may_begin_with_a_dash():
    assert given("a --output=-x").output == Path("-x")
    with pytest.raises(UserError, match=r"--output: the value is missing"):
        given("a --output --help")
    unknown: list[str] = []
    words = ["a", "--output", "out", "--section.text=-x"]
    parse(Options, prog="program", description="", arguments=words, unknown=unknown)
    assert unknown == ["--section.text=-x"]


def test_positional_values_have_no_flag():
    with pytest.raises(UserError, match=r"Unrecognized options: --inputs, b"):
        given("a --inputs b --output out")
    assert given("-- a --output out").inputs == ("a",)


def test_help_has_all_fields(capsys):
    with pytest.raises(SystemExit, match="0"):
        given("-h")
    text = capsys.readouterr().out
    assert text.startswith("usage: program INPUTS ... --output OUTPUT [options]\n\nA program.\n")
    assert "  --number 3\n      A number.\n" in text
    assert "  --kind KIND\n      Which of them. One of first, second.\n" in text
    assert "  --is-fast (now on)\n" in text


def test_the_first_argument_is_a_command():
    def chosen(*arguments: str) -> object:
        commands = {"one": One, "many": Options}
        return parse_command(commands, prog="program", description="", arguments=arguments)

    assert chosen("one", "x") == One(name="x")
    assert chosen("many", "x", "--output", "y") == Options(inputs=("x",), output=Path("y"))
    with pytest.raises(UserError, match="choose one of one, many"):
        chosen("three")
    with pytest.raises(UserError, match="give one value without a flag, not 2: x y"):
        chosen("one", "x", "y")
