"""Errors of storage in saves and reads of checkpoints: recognized, and reported in one line."""

import contextlib
import logging
import re
import sys

import jax

from heinsen_jax.errors import converting, wants_tracebacks
from heinsen_jax.storage.buckets import AnyPath

EXPECTED = "Metadata file does not exist"
"""Warning of Orbax about a checkpoint that is read by itself, without its manager."""
OF_SYSTEM = re.compile(
    r"os.error|errno|No space left|Permission.denied|RESOURCE_EXHAUSTED|UNAVAILABLE"
    r"|HTTP response code",
    re.IGNORECASE,
)
"""Pattern of errors of a disk or a bucket in messages of TensorStore and Orbax."""
CLIENTS = {"gcsfs", "aiohttp", "google"}
"""Packages that read and write buckets; most of their errors are not an OSError."""


def is_of_storage(error: BaseException) -> bool:
    """Whether a save or a read failed because of storage, not because of a device or a bug.
    TensorStore raises ValueError with the message of the operating system."""
    if isinstance(error, jax.errors.JaxRuntimeError) or not isinstance(error, Exception):
        return False
    causes = [error, error.__cause__, error.__context__]
    return any(
        isinstance(x, OSError)
        or type(x).__module__.partition(".")[0] in CLIENTS
        or OF_SYSTEM.search(str(x))
        for x in causes
    )


def reading_steps(folder: AnyPath) -> contextlib.AbstractContextManager[None]:
    """Convert errors of storage, in a block that reads a folder, to `UserError`: they do not mean
    that it is damaged."""
    remedy = "check the disk, the network or permissions, and give the same command again"
    return converting(is_of_storage, f"{folder} cannot be read", remedy)


def writing_steps(folder: AnyPath) -> contextlib.AbstractContextManager[None]:
    """Convert errors of storage, in a block that writes checkpoints, to `UserError`."""
    return converting(
        is_of_storage,
        f"{folder}: a checkpoint cannot be written",
        "free space, or make the folder writable, and give the command again: earlier checkpoints "
        "are kept",
    )


def quiet_failed_saves() -> None:
    """Silence the logs of libraries about failed saves, permanently: their threads outlive the
    save."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _ignore_closed_loop


def _ignore_closed_loop(unraisable: "sys.UnraisableHookArgs") -> None:
    """Ignore callbacks of TensorStore's threads to an event loop that Orbax has closed after a
    failed save; each would print a traceback."""
    if wants_tracebacks() or str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _is_news(record: logging.LogRecord) -> bool:
    """False for log records of failed saves, which this module reports as one `UserError`."""
    message = record.getMessage()
    is_of_save = "orbax" in record.pathname or "orbax" in message
    is_reported = is_of_save and record.levelno >= logging.ERROR and record.exc_info
    return not message.startswith(EXPECTED) and (wants_tracebacks() or not is_reported)
