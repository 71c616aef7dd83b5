"""The exception for mistakes of the user, and how command lines report it."""

import contextlib
import errno
import functools
import importlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pydantic

TRACEBACK = "HEINSEN_JAX_TRACEBACK"
"""Environment variable that restores tracebacks and the logs of libraries."""

LESS_MEMORY = (
    "use fewer rows (batch size) or shorter sequences; in training also --model.remat, "
    "--training.accumulation-steps, or --mesh.fsdp over more devices"
)

EXTRAS = {
    "train": (
        *("filelock", "grain", "matplotlib", "optax", "orbax", "tensorboardX", "tiktoken"),
        *("tiktoken_ext", "tokenizers", "xxhash", "zstandard"),
    ),
    "datasets": ("datasets",),
    "gguf": ("gguf",),
    "harness": ("lm_eval",),
    "hub": ("huggingface_hub",),
    "mlflow": ("mlflow",),
    "parquet": ("pyarrow",),
    "ray": ("ray",),
    "studies": ("scipy", "textalloc"),
    "trackio": ("trackio",),
    "transformers": ("jinja2",),
    "wandb": ("wandb",),
}
"""Modules that the package and studies import, by the extra that installs them."""

_CONTROL = r"\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_CONTROL}]")
_UNPRINTABLE_IN_LINES = re.compile(f"(?![\\n\\t])[{_CONTROL}]")
_BAD_PATHS = {
    errno.ENOENT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENXIO,
    errno.EROFS,
}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class UserError(ValueError):
    """Invalid input. The message is one line that names the field or file and the fix."""


class MissingExtra(ImportError, UserError):
    """A module is missing that an extra installs."""


def printable(text: object, *, lines: bool = False) -> str:
    """Escape control characters, which could control a terminal: C0, C1, DEL, overrides of the
    direction of text, and surrogates.

    Args:
      text: the text.
      lines: whether newlines and tabs stay as they are.

    Examples:
      >>> print(printable("red: \\x1b[31m"))
      red: \\x1b[31m
    """
    pattern = _UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE
    return pattern.sub(lambda match: ascii(match[0])[1:-1], str(text))


def parse_json(content: str | bytes) -> Any:
    """Parse JSON, in UTF-8 if it is bytes, with or without a byte order mark.

    Raises:
      ValueError: it is invalid, or nested too deeply.
    """
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_regular(path: Path) -> None:
    """Raise UserError if a path exists and is not a file: reading a pipe or a device may never
    end."""
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "pipe or a device"
        raise UserError(f"{path} is a {kind}, not a file; give a file")


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


def first_line(error: BaseException) -> str:
    """First line of the message of an error, or of its cause."""
    cause = error.__cause__ or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def wants_tracebacks() -> bool:
    return bool(os.environ.get(TRACEBACK))


def failure(error: BaseException) -> str | None:
    """Describe in one line an error that is due to the input or the machine's limits, or None."""
    text = printable(error)
    match error:
        case UserError():
            return text
        case MemoryError():
            return f"out of memory ({text}): {LESS_MEMORY}"
        case RecursionError():
            return f"the input is nested too deeply ({text}); make it flatter"
        case RuntimeError() if "out of memory" in str(error).lower():
            return f"out of memory ({printable(first_line(error))}): {LESS_MEMORY}"
        case OSError(filename=name) if name is not None and error.errno in _BAD_PATHS:
            return f"{_path_text(name)}: {error.strerror}; give another path"
        case OSError() if error.errno in _FULL:
            place = "output" if error.filename is None else _path_text(error.filename)
            return f"{place} cannot be written ({error.strerror}); free space, and try again"
        case UnicodeError():
            return f"the input is not valid text ({text}); give UTF-8"
        case OverflowError():
            return f"a number is out of range ({text}); give a smaller one"
    if _is_panic(error):
        return f"a library cannot process the input ({text}); correct the files of the tokenizer"
    return None


def _path_text(name: str | bytes | int) -> str:
    """The `filename` of an OSError: a path, or the number of an open file."""
    return printable(os.fsdecode(name) if isinstance(name, bytes) else name)


def _is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has panicked: its exception does not derive from `Exception`."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def converting(
    matches: Callable[[BaseException], bool], problem: str, remedy: str
) -> Iterator[None]:
    """Raise UserError, "<problem> (<the error>); <remedy>", for other errors that match."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) or not matches(error):
            raise
        raise UserError(f"{problem} ({first_line(error)}); {remedy}") from error


def refusing_panics(what: str, remedy: str) -> contextlib.AbstractContextManager[None]:
    """Raise UserError, "<what> (<the panic>); <remedy>", if a library in Rust panics."""
    return converting(_is_panic, what, remedy)


def command_line(main: Callable[[], int | None]) -> Callable[[], int]:
    """Wrap `main` so that errors are one line: exit code 2 after a `UserError` or another error
    that `failure` describes, 130 after Ctrl-C, 141 when the reader of a pipe exits. Warnings are
    one line, too. Characters that the encoding of stdout lacks are escaped."""

    @functools.wraps(main)
    def wrapped() -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        with warnings.catch_warnings():
            warnings.showwarning = _one_line
            try:
                code = main() or 0
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, where errors are caught
                return code
            except KeyboardInterrupt:
                print("\ninterrupted", file=sys.stderr)
                return 130
            except BrokenPipeError:  # the reader has exited, as in `... | head`
                _discard_output()
                return 141
            except BaseException as error:
                line = failure(error)
                if line is None or wants_tracebacks():
                    raise
                print(f"error: {line}", file=sys.stderr)
                if isinstance(error, OSError) and error.filename is None:
                    _discard_output()
                return 2

    return wrapped


def _discard_output() -> None:
    """Redirect stdout, which cannot be written, so that Python can flush it when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {printable(message)}", file=file or sys.stderr)


def installation(extra: str) -> str:
    """The commands that install an extra, for error messages."""
    return f"pip install 'heinsen_jax[{extra}]', or in a clone pip install -e '.[{extra}]'"


def _extra_of(module: str | None) -> str | None:
    """The extra that installs a module, if any."""
    top = (module or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)


def without_extra(missing: ImportError, module: str = "") -> BaseException:
    """The exception that names the extra of a missing module, for `raise ... from missing`.

    Args:
      missing: the error of the import.
      module: the importing module; if it is the program, one line is printed.

    Returns:
      A `MissingExtra`, or for the program SystemExit(2); or `missing`, if no extra is known.
    """
    error, extra = missing, _extra_of(missing.name)
    if extra is None:
        return missing
    if not isinstance(missing, MissingExtra):
        message = f"{missing}; install the extra, {installation(extra)}"
        error = MissingExtra(message, name=missing.name)
    if module != "__main__":
        return error
    print(f"error: {error}", file=sys.stderr)
    return SystemExit(2)


def extra_module(name: str) -> ModuleType:
    """Import a module that may need an extra.

    Raises:
      MissingExtra: the extra is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise without_extra(missing) from missing
