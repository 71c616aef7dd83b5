"""The owner of a locked folder, as its lock file describes it."""

import os
import socket
from datetime import UTC, datetime
from typing import Any

from heinsen_jax.errors import UserError

LOCK_FILE = ".lock"


def owner() -> dict[str, Any]:
    """The content of a lock that names this process as its owner."""
    start = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": start}


def describe_owner(content: Any) -> str:
    """Describe the owner of a lock, whose content may be damaged."""
    try:
        return f"process {content['pid']} on {content['host']}, since {content['start']}"
    except (KeyError, TypeError):
        return "another process"


def in_use(folder: os.PathLike[str], content: Any) -> UserError:
    """The error for a folder whose lock another process holds."""
    return UserError(
        f"{folder} is in use by {describe_owner(content)}; wait until it ends, stop it, or choose "
        "another folder"
    )
