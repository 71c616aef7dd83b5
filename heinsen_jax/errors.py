"""The one exception for what a person can mend, and how a command line reports it."""

import functools
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Input is wrong. The message names the field or file and says how to mend it, in one line."""


def command_line(main: Callable[[], int | None]) -> Callable[[], int]:
    """Wraps a `main` so that a `UserError` ends it with one clear line and exit code 2."""

    @functools.wraps(main)
    def wrapped() -> int:
        try:
            return main() or 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped


def without_extra(missing: ImportError, extra: str, module: str) -> BaseException:
    """What a module that needs an extra of this package raises without it: where the module is the
    program, an end with one clear line."""
    message = f"{missing}: install what it needs, pip install 'heinsen_jax[{extra}]'"
    return SystemExit(f"error: {message}") if module == "__main__" else ImportError(message)
