"""Panics of libraries in Rust, which do not derive from `Exception`, as errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from heinsen_jax.errors import UserError


@contextmanager
def refusing_panics(what: str, remedy: str) -> Iterator[None]:
    """Raise UserError, "<what> (<the panic>); <remedy>", if a library panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise UserError(f"{what} ({reason}); {remedy}") from None
