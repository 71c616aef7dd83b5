"""Downloads that are verified before use."""

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from heinsen_jax.errors import UserError, check_regular
from heinsen_jax.storage.files import byte_progress, replacing, sha256_of

_TIMEOUT_SECONDS = 30
_CHUNK_BYTES = 1 << 20
# The host of WikiText rejects the user agent of Python's own client.
_HEADERS = {"User-Agent": "heinsen_jax"}


@dataclass(frozen=True)
class Remote:
    """Published file and its expected content."""

    url: str
    size: int
    sha256: str


def ensure_downloaded(remote: Remote, path: Path) -> None:
    """Ensure that `path` contains exactly `remote`; download it if the file does not exist."""
    check_regular(path)
    if path.exists():
        _check(sha256_of(path), remote, path, f"{path} is not the published file; delete it, or")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        try:
            received = _copy(remote, path.name, file)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise UserError(f"{remote.url} failed ({error}); {_by_hand(remote, path)}") from error
        _check(
            received,
            remote,
            path,
            f"{remote.url} sent different content than published; try again, or",
        )


def _copy(remote: Remote, name: str, file: BinaryIO) -> str:
    """Write the remote content to `file` and return its SHA-256."""
    digest = hashlib.sha256()
    request = urllib.request.Request(remote.url, headers=_HEADERS)
    with (
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response,
        byte_progress(f"downloading {name}", remote.size) as advance,
    ):
        while chunk := response.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _check(sha256: str, remote: Remote, path: Path, complaint: str) -> None:
    if sha256 != remote.sha256:
        raise UserError(f"{complaint} {_by_hand(remote, path)} (this one has {sha256})")


def _by_hand(remote: Remote, path: Path) -> str:
    return (
        f"download {remote.url} by hand ({remote.size} bytes) and save it as {path}; "
        f"its sha256 must be {remote.sha256}"
    )
