"""Atomic files, and a progress bar that prints plain lines without a terminal."""

import hashlib
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from heinsen_jax.errors import UserError, printable
from heinsen_jax.storage.buckets import AnyPath, file_system

Location = TypeVar("Location", bound=AnyPath)

_SECONDS_BETWEEN_LINES = 5


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if the block ends without an error.

    Every writer has its own partial file, so that two processes that write the same content do not
    interfere. A killed process may leave a `*.partial` file, which is safe to delete.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: AnyPath, content: bytes) -> None:
    """Write a small file, or an object, atomically."""
    if not isinstance(path, Path):  # objects appear whole
        file_system().pipe_file(str(path), content)
        return
    with replacing(path) as file:
        file.write(content)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the operating system, in a block that writes files to `folder`, to
    `UserError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{error.filename or folder} cannot be written ({reason}); free space, or make it "
            "writable, and give the same command again"
        ) from error


def check_new_folder(folder: Path) -> None:
    """Raise UserError unless `folder` is a new or an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; give the name of a new folder")


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield a partial folder, whose files move to the new or empty `folder` if the block ends
    without an error. Errors of the operating system become `UserError`."""
    folder = folder.resolve()
    holder = folder if folder.exists() else folder.parent
    partial = free_name(holder / f"{folder.name}.partial")
    try:
        with storage_errors(folder.parent):
            partial.mkdir(parents=True)
            yield partial
            folder.mkdir(parents=True, exist_ok=True)
            for path in partial.iterdir():
                path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def free_name(path: Location) -> Location:
    """Return an unused name, with a number appended if necessary."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not name.exists())


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def joint_hash(*parts: str) -> str:
    """SHA-256 of a sequence of strings."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress in bytes; yield the function that reports further bytes."""
    console, description = Console(stderr=True), printable(description)
    if not console.is_terminal:
        yield _plain_progress(description, total, console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)


def _plain_progress(description: str, total: int, console: Console) -> Callable[[int], None]:
    """Print a line at intervals."""
    done, printed = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        if time.monotonic() - printed > _SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            console.print(
                f"{description}: {done / 1e6:.0f} of {total / 1e6:.0f} MB",
                highlight=False,
                markup=False,
            )

    return advance
