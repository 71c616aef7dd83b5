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
