"""One process at a time in a folder."""

import contextlib
import errno
import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from heinsen_jax.errors import UserError

LOCK_FILE = ".lock"
WITHOUT_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS
"""What a file system answers that has no locks."""


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """A context in which no other process can lock `folder`, an existing one.

    The file `.lock` in it names the owner: host, process id, start. The lock itself is the
    operating system's, which releases it when its owner ends, however that happens: the name of an
    owner that was killed keeps nobody out. Where a file system has no locks, a warning says so.

    Args:
      folder: what to lock.
      wait: whether to wait for an owner to end instead of refusing.

    Raises:
      UserError: another process holds the lock, and the message names it; or the file cannot be
        written.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, fallback_to_soft=False)  # that one outlives its owner
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise UserError(
                f"{folder} is in use by {_owner(path)}: wait for its end, stop it, or choose "
                "another folder"
            ) from None
        print(f"{folder} is in use by {_owner(path)}: waiting for its end", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(
                f"{path} cannot be opened ({error.strerror}): make it writable, or choose another "
                "folder"
            ) from None
        warnings.warn(
            f"{folder} cannot be locked ({error}): see to it that no other process uses it",
            stacklevel=3,
        )
        yield
        return
    try:
        start = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "start": start}
        with contextlib.suppress(OSError):  # no space: the lock holds without a name
            path.write_text(json.dumps(owner))
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text("")
        lock.release()


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f"process {owner['pid']} on {owner['host']}, since {owner['start']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
