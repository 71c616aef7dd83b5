"""One process at a time in a folder."""

import contextlib
import errno
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from heinsen_jax.errors import UserError, parse_json, printable
from heinsen_jax.storage.owners import LOCK_FILE, describe_owner, in_use, owner

WITHOUT_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS
"""Error codes of file systems without locks."""


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Context manager that locks an existing folder against other processes.

    The file `.lock` in it names the owner: host, process id, start time. The operating system
    releases the lock when its owner exits for any reason, so a killed owner does not keep others
    out. A file system without locks causes a warning.

    Args:
      folder: the folder.
      wait: whether to wait for another owner instead of refusing.

    Raises:
      UserError: another process, named in the message, holds the lock; or the lock file cannot be
        opened.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, fallback_to_soft=False)  # a soft lock outlives its owner
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise in_use(folder, _read_owner(path)) from None
        message = printable(f"{folder} is in use by {describe_owner(_read_owner(path))}")
        print(f"{message}: waiting until it ends", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(
                f"{path} cannot be opened ({error.strerror}); make it writable, or choose another "
                "folder"
            ) from None
        warnings.warn(
            f"{folder} cannot be locked ({error}): ensure that no other process uses it",
            stacklevel=3,
        )
        yield
        return
    try:
        with contextlib.suppress(OSError):  # no space: the lock holds without a name
            path.write_text(json.dumps(owner()))
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text("")
        lock.release()


def _read_owner(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return parse_json(path.read_bytes())
