"""The exception for mistakes of the user, and how command lines report it."""

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TextIO

import pydantic

TRACEBACK = "HEINSEN_JAX_TRACEBACK"
"""Environment variable that restores tracebacks and the logs of libraries."""

LESS_MEMORY = (
    "use fewer rows (batch size) or shorter sequences; in training also --model.remat, "
    "--training.accumulation-steps, or --mesh.fsdp over more devices"
)


class UserError(ValueError):
    """Invalid input. The message is one line that names the field or file and the fix."""


def explain(error: Exception, within: str = "") -> str:
    """Describe a validation error in one line; field names are prefixed with `within`."""
    if not isinstance(error, pydantic.ValidationError):
        return " ".join(str(error).split())
    problems = []
    for problem in error.errors():
        field = ".".join(filter(None, [within, *map(str, problem["loc"])]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "unexpected_keyword_argument":
            message = "no such field"
        problems.append(f"{field}: {message}" if field else message)
    return "; ".join(problems)


def first_line(error: Exception) -> str:
    """First line of the message of an error, or of its cause."""
    cause = error.__cause__ or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def wants_tracebacks() -> bool:
    return bool(os.environ.get(TRACEBACK))


def command_line(main: Callable[[], int | None]) -> Callable[[], int]:
    """Wrap `main` so that errors are one line: exit code 2 after a `UserError` or when a device is
    out of memory, 130 after Ctrl-C, 141 when the reader of a pipe exits. Warnings are one line,
    too."""

    @functools.wraps(main)
    def wrapped() -> int:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line
            try:
                return main() or 0
            except UserError as error:
                if wants_tracebacks():
                    raise
                print(f"error: {error}", file=sys.stderr)
                return 2
            except RuntimeError as error:
                if wants_tracebacks() or "Out of memory" not in str(error):
                    raise
                reason = next(iter(str(error).splitlines()))
                print(f"error: out of memory ({reason}): {LESS_MEMORY}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print("\ninterrupted", file=sys.stderr)
                return 130
            except BrokenPipeError:  # the reader has exited, as in `... | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141

    return wrapped


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {message}", file=file or sys.stderr)


def without_extra(missing: ImportError, extra: str, module: str) -> BaseException:
    """The exception for a module whose extra is not installed; if the module is the program, print
    one line and return SystemExit(2)."""
    message = (
        f"{missing}; install the extra, pip install 'heinsen_jax[{extra}]', or in a clone "
        f"pip install -e '.[{extra}]'"
    )
    if module != "__main__":
        return ImportError(message)
    print(f"error: {message}", file=sys.stderr)
    return SystemExit(2)


def extra_module(name: str) -> ModuleType:
    """Import a module that needs an extra.

    Raises:
      UserError: the extra is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise UserError(str(missing)) from missing
