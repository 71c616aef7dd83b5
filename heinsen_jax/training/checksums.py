"""Checksums of checkpoints, so that a damaged one is never loaded.

The file of checksums is written into a step's folder before the folder gets its final name: a step
without it was not finished. Orbax then writes two small files, whose checksums are added later.
"""

import hashlib
import json
import os
from pathlib import Path

CHECKSUM_FILE = "sha256.json"
PARTIAL = f"{CHECKSUM_FILE}.partial"
WRITTEN_LAST = {"_CHECKPOINT_METADATA", "commit_success.txt"}


def write_checksums(folder: Path) -> None:
    """Record the SHA-256 of every file in the folder of a step that is being written."""
    _write(folder, _hashes(folder, set(_files(folder)) - WRITTEN_LAST))


def add_last_checksums(folder: Path) -> None:
    """Add the checksums of the files that Orbax writes last."""
    checksums = _read(folder)
    if checksums is not None and WRITTEN_LAST.isdisjoint(checksums):
        _write(folder, checksums | _hashes(folder, WRITTEN_LAST & set(_files(folder))))


def find_damage(folder: Path) -> str | None:
    """Describe the damage of a step's folder; None if it is intact."""
    checksums = _read(folder)
    if checksums is None:
        return f"{CHECKSUM_FILE} is missing or damaged"
    files = set(_files(folder))
    if WRITTEN_LAST.isdisjoint(checksums):  # the process was killed before it could add them
        files -= WRITTEN_LAST
    for name in sorted(checksums.keys() | files):
        if name not in files:
            return f"{name} is missing"
        if name not in checksums:
            return f"{name} does not belong there"
    try:
        found = _hashes(folder, files)
    except FileNotFoundError as error:  # removed meanwhile
        return f"{error.filename} is missing"
    for name, digest in found.items():
        if digest != checksums[name]:
            return f"{name} is not as it was written"
    return None


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name not in (CHECKSUM_FILE, PARTIAL)]


def _hashes(folder: Path, names: set[str]) -> dict[str, str]:
    found = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _read(folder: Path) -> dict[str, str] | None:
    """Hashes by file; None if the file of checksums is missing or damaged."""
    try:
        content = json.loads((folder / CHECKSUM_FILE).read_text())
        hashes = content["files"]
        return hashes if content["sha256"] == _hash_of(hashes) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, hashes: dict[str, str]) -> None:
    """Write the file of checksums atomically."""
    path = folder / PARTIAL
    path.write_text(json.dumps({"files": hashes, "sha256": _hash_of(hashes)}, indent=1))
    os.replace(path, folder / CHECKSUM_FILE)


def _hash_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
