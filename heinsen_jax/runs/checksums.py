"""Checksums of checkpoints, so that a damaged one is never loaded.

The file of checksums is written into a step's folder before the folder gets its final name: a step
without it was not finished. Orbax then writes two small files, whose checksums are added later.

XXH3 detects damage as well as SHA-256, at ten times the speed, so that the disk is the limit. It
does not resist forgery, and nothing here is secret. Earlier checkpoints have SHA-256.
"""

import errno
import hashlib
import io
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import xxhash

from heinsen_jax.errors import parse_json
from heinsen_jax.storage.buckets import AnyPath, files_below
from heinsen_jax.storage.files import write_atomically

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
"""Hash functions by name; new checkpoints use the first one."""

WRITTEN_LAST = {"_CHECKPOINT_METADATA", "commit_success.txt"}

ARRAYS = "d"
"""Name of the folders of TensorStore that hold the content of arrays."""

NO_CHECKSUMS = "its file of checksums is missing or damaged"

THREADS = 16
"""Files that are read concurrently; hash functions and reads release Python's global lock."""


class Checksums(NamedTuple):
    """Hashes of the files of a step, by their paths in its folder."""

    algorithm: str
    files: dict[str, str]


def write_checksums(folder: AnyPath) -> None:
    """Record the hash of every file in the folder of a step that is being written."""
    algorithm = next(iter(ALGORITHMS))
    names = set(_files(folder)) - WRITTEN_LAST
    _write(folder, Checksums(algorithm, _hashes(folder, names, algorithm)))


def add_last_checksums(folder: AnyPath) -> None:
    """Add the checksums of the files that Orbax writes last."""
    recorded = _read(folder)
    if recorded is not None and WRITTEN_LAST.isdisjoint(recorded.files):
        hashes = _hashes(folder, WRITTEN_LAST & set(_files(folder)), recorded.algorithm)
        _write(folder, recorded._replace(files=recorded.files | hashes))


def find_damage(folder: AnyPath) -> str | None:
    """Describe the damage of a step's folder, except in the content of its arrays: missing,
    additional or changed files. None if it is intact."""
    recorded = _read(folder)
    if recorded is None:
        return NO_CHECKSUMS
    files = set(_files(folder))
    if WRITTEN_LAST.isdisjoint(recorded.files):  # the process was killed before it could add them
        files -= WRITTEN_LAST
    for name in sorted(recorded.files.keys() | files):
        if name not in files:
            return f"{name} is missing"
        if name not in recorded.files and not _is_of_system(name):
            return f"{name} does not belong there"
    files &= recorded.files.keys()
    return _first_changed(folder, recorded, (x for x in files if not _is_of_arrays(x)))


def find_damaged_array(folder: AnyPath, share: int = 0, shares: int = 1) -> str | None:
    """Describe the first damaged file of arrays in a share of them; None if they are intact.

    Args:
      folder: folder of a step without the damage that `find_damage` finds.
      share: index of the share, from 0.
      shares: number of shares.
    """
    recorded = _read(folder)
    if recorded is None:
        return NO_CHECKSUMS
    arrays = sorted(filter(_is_of_arrays, recorded.files))
    return _first_changed(folder, recorded, arrays[share::shares])


def _is_of_system(name: str) -> bool:
    """Whether a file is one that file browsers, archives and network file systems create."""
    *folders, last = name.split("/")
    known = last in (".DS_Store", "Thumbs.db", "desktop.ini") or last.startswith(("._", ".nfs"))
    return known or "@eaDir" in folders


def _is_of_arrays(name: str) -> bool:
    return ARRAYS in name.split("/")[:-1]


def _first_changed(folder: AnyPath, recorded: Checksums, names: Iterable[str]) -> str | None:
    try:
        hashes = _hashes(folder, names, recorded.algorithm)
    except FileNotFoundError as error:  # removed meanwhile
        return f"{error.filename or error} is missing"
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"
    changed = (name for name, digest in hashes.items() if digest != recorded.files[name])
    name = next(changed, None)
    return name and f"{name} is not as it was written"


def _files(folder: AnyPath) -> list[str]:
    """Paths of all files in a step's folder, except the file of checksums."""
    own = tuple(map(_name, ALGORITHMS))  # and partial ones, of a killed process
    return [name for name in files_below(folder) if not name.startswith(own)]


def _hashes(folder: AnyPath, names: Iterable[str], algorithm: str) -> dict[str, str]:
    def hash_of(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(
                cast(io.BufferedReader, file), ALGORITHMS[algorithm]
            ).hexdigest()

    names = sorted(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(hash_of, names), strict=True))


def _name(algorithm: str) -> str:
    return f"{algorithm}.json"


def _read(folder: AnyPath) -> Checksums | None:
    """The checksums of a step; None if their file is missing or damaged. Other errors, such as
    missing permissions or a failed network, do not mean damage."""
    for algorithm in ALGORITHMS:
        try:
            text = (folder / _name(algorithm)).read_bytes()
        except OSError as error:
            if error.errno == errno.EIO or isinstance(
                error, (FileNotFoundError, NotADirectoryError)
            ):
                continue
            raise
        try:
            content = parse_json(text)
            hashes = content["files"]
            if content[algorithm] == _hash_of(hashes, algorithm):
                return Checksums(algorithm, hashes)
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _write(folder: AnyPath, checksums: Checksums) -> None:
    algorithm, hashes = checksums
    content = {"files": hashes, algorithm: _hash_of(hashes, algorithm)}
    write_atomically(folder / _name(algorithm), json.dumps(content, indent=1).encode())


def _hash_of(hashes: dict[str, str], algorithm: str) -> str:
    return ALGORITHMS[algorithm](json.dumps(hashes, sort_keys=True).encode()).hexdigest()
