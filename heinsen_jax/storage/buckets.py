"""Files in buckets of Google Cloud Storage, `gs://bucket/folder`.

Objects appear whole and cannot be appended to, and folders are prefixes of their names.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
from etils import epath
from fsspec.config import conf

from heinsen_jax.errors import UserError, converting, installation, parse_json, printable
from heinsen_jax.storage.owners import LOCK_FILE, describe_owner, in_use, owner

# Other processes write, so listings are not cached. `epath` keeps the file system of its first use,
# which is after this import, unless a program has used `epath` for buckets before.
conf.setdefault("gcs", {})["use_listings_cache"] = False

AnyPath: TypeAlias = Path | epath.Path
"""A path on a disk, or in a bucket."""

SCHEME = "gs://"
LOGIN = "gcloud auth application-default login"
OWNER = {"id", "host", "pid", "start"}
"""Fields of a lock that identify its owner."""
REFRESHED_AFTER = 10.0
"""Seconds after which the owner of a lock renews it."""
ABANDONED_AFTER = 60.0
"""Seconds without renewal after which a lock has no owner."""


def is_remote(path: str | Path) -> bool:
    """Whether a path has a scheme, such as gs://."""
    return "://" in str(path)


def absolute_path(path: str) -> str:
    """The absolute form of a path on a disk; a path with a scheme is returned as it is."""
    return path if is_remote(path) else str(Path(path).absolute())


def resolved_path(path: str) -> str:
    """One spelling of a path: on a disk, absolute and without links."""
    return path.rstrip("/") if is_remote(path) else str(Path(path).resolve())


def local_path(path: str | Path, field: str) -> Path:
    """The path of a file or folder on a disk.

    Args:
      path: the path.
      field: option or field with that path, for messages.

    Raises:
      UserError: it is an address, such as gs://bucket/folder (which `Path` shortens to
        gs:/bucket/folder): it would create a local folder `gs:`.
    """
    if re.match("[a-z][a-z0-9]+:/", str(path)):
        raise UserError(f"{field} {path}: must be on a disk; give a local path")
    return Path(path)


def bucket_path(url: str, field: str) -> epath.Path:
    """The path of a folder in a bucket.

    Args:
      url: its address.
      field: option or field with that address, for messages.

    Raises:
      UserError: the scheme is not gs://, the address has no folder, or the extra `gcs` is missing.
    """
    bucket, _, folder = url.removeprefix(SCHEME).strip("/").partition("/")
    if not url.startswith(SCHEME):
        raise UserError(
            f"{field} {url}: only buckets of Google Cloud Storage, gs://, are supported; give one, "
            "or a folder that all hosts mount"
        )
    if not (bucket and folder):
        raise UserError(
            f"{field} {url}: the bucket or the folder is missing; give gs://bucket/folder"
        )
    try:
        file_system()
    except ImportError:
        raise UserError(
            f"{field} {url}: buckets need the extra gcs; {installation('gcs')}"
        ) from None
    return epath.Path(f"{SCHEME}{bucket}/{folder}")


def file_system() -> Any:
    """The file system of `epath` for buckets."""
    return fsspec.filesystem("gcs", finalize_on_close=True)


def files_below(folder: AnyPath) -> list[str]:
    """Paths, relative to a folder, of all files in it and in its subfolders."""
    if isinstance(folder, Path):
        files = (path for path in folder.rglob("*") if path.is_file())
        return [path.relative_to(folder).as_posix() for path in files]
    prefix = f"{folder}/".removeprefix(SCHEME)
    return [name.removeprefix(prefix) for name in file_system().find(prefix)]


def _is_error(error: BaseException) -> bool:
    """Whether a block that only uses a bucket failed: by credentials, HTTP or the system."""
    return isinstance(error, Exception)


def upload(content: bytes, target: epath.Path) -> None:
    """Write an object.

    Raises:
      UserError: it cannot be written.
    """
    remedy = "check the network and the credentials, and give the same command again"
    with converting(_is_error, f"{target} cannot be written", remedy):
        file_system().pipe_file(str(target), content)


def reading(path: epath.Path, field: str) -> contextlib.AbstractContextManager[None]:
    """Convert errors, in a block that only reads from a bucket, to `UserError`.

    Args:
      path: the object or folder that the block reads.
      field: option or field with its address, for messages.
    """
    remedy = f"check the name, the network and the credentials ({LOGIN})"
    return converting(_is_error, f"{field} {path} cannot be read", remedy)


def move(path: AnyPath, target: AnyPath) -> None:
    """Rename a file or a folder. In a bucket all objects are copied, within it, then removed."""
    if isinstance(path, Path):
        path.rename(target)
        return
    system = file_system()
    names = [f"/{name}" for name in files_below(path)] or [""]  # "": an object, not a folder
    system.copy([f"{path}{name}" for name in names], [f"{target}{name}" for name in names])
    system.rm([f"{path}{name}" for name in names])


def check_writable(folder: epath.Path, field: str) -> None:
    """Check that a folder in a bucket can be written and read.

    Raises:
      UserError: it cannot be written, or not be read.
    """
    path = folder / f".writable-{uuid.uuid4().hex}"
    remedy = f"check its name, the credentials ({LOGIN}) and the role Storage Object User"
    with converting(_is_error, f"{field} {folder} cannot be written", remedy):
        path.write_text("")
        path.read_text()
        path.unlink()


@contextlib.contextmanager
def locked(folder: epath.Path) -> Iterator[None]:
    """Context manager that locks a folder in a bucket against other processes.

    The object `.lock` names the owner, which renews it. A lock that its owner has not renewed for
    a minute, or whose owner is a dead process of this host, is abandoned. An owner that was
    suspended for so long that another process has taken the lock ends immediately.

    Raises:
      UserError: another process, named in the message, holds the lock.
    """
    lock = _Lock(folder)
    lock.acquire()
    released = threading.Event()
    thread = threading.Thread(target=lock.renew, args=(released,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        lock.release()


class _Lock:
    """The lock object of a folder."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder, self._path = folder, str(folder / LOCK_FILE)
        self._id = uuid.uuid4().hex
        self._owner = owner() | {"id": self._id, "processes": _process_namespace()}

    def acquire(self) -> None:
        if (content := self._read()) is not None:
            self._wait_until_abandoned(content)
            self.release(content["id"])
        try:
            self._write("create")  # fails if another process has created it since
        except FileExistsError:
            raise in_use(self._folder, self._read() or {}) from None

    def _wait_until_abandoned(self, content: dict[str, Any]) -> None:
        is_here = all(content.get(name) == self._owner[name] for name in ("host", "processes"))
        if is_here and not _is_running(content["pid"]):
            return
        message = printable(f"{self._folder} may be in use by {describe_owner(content)}")
        limit = f"up to {ABANDONED_AFTER:g} s"
        print(f"{message}: waiting for its next sign, {limit}", file=sys.stderr)
        deadline = time.monotonic() + ABANDONED_AFTER
        while time.monotonic() < deadline:
            time.sleep(REFRESHED_AFTER / 10)
            if (now := self._read()) is None:
                return
            if now != content:
                raise in_use(self._folder, now)

    def renew(self, released: threading.Event) -> None:
        """Renew the lock until it is released."""
        while not released.wait(REFRESHED_AFTER):
            try:
                if (self._read() or {}).get("id") == self._id:
                    self._write("overwrite")
                else:
                    folder = printable(self._folder)
                    print(f"error: another process has locked {folder}", file=sys.stderr)
                    os._exit(1)  # never write into the other process's run
            except Exception as error:  # a failure of the network: try again
                failed = printable(f"{self._path} cannot be renewed ({error})")
                print(f"warning: {failed}", file=sys.stderr)

    def release(self, owner: str | None = None) -> None:
        """Remove the lock of an owner, by default of this process."""
        with contextlib.suppress(FileNotFoundError):
            if (self._read() or {}).get("id") == (owner or self._id):
                file_system().rm_file(self._path)

    def _read(self) -> dict[str, Any] | None:
        """The content of the lock; None if it is free. For a damaged lock, the raw bytes are its
        id, so that a renewal is noticed."""
        try:
            raw = file_system().cat_file(self._path)
        except FileNotFoundError:
            return None
        with contextlib.suppress(ValueError):
            content = parse_json(raw)
            if isinstance(content, dict) and content.keys() >= OWNER:
                return content
        return {"id": repr(raw)}

    def _write(self, mode: str) -> None:
        content = self._owner | {"renewed": time.time()}
        file_system().pipe_file(self._path, json.dumps(content).encode(), mode=mode)


def _process_namespace() -> str:
    """Identity of the namespace of process ids. Containers with the same host name have different
    namespaces; hosts have the same initial namespace, but different boot ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
