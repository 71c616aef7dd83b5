"""Prepared data in a bucket, downloaded once to a local folder, since tokens are read from memory
maps."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath

from heinsen_jax.data.manifest import MANIFEST_FILE, Manifest, Shard, numpy_dtype
from heinsen_jax.errors import UserError
from heinsen_jax.storage.buckets import reading
from heinsen_jax.storage.files import (
    byte_progress,
    joint_hash,
    replacing,
    storage_errors,
)
from heinsen_jax.storage.locks import locked

FIELD = "data.corpus"
"""Field with the address of the bucket."""

CONCURRENT = 8
"""Number of shards that are downloaded concurrently."""


def fetch_prepared(remote: epath.Path, cache: Path) -> Path:
    """Download a prepared folder, unless the cache has it, and return the local folder.

    Interrupted downloads resume with the missing shards. Other content of the bucket gets another
    local folder.

    Args:
      remote: the folder in the bucket.
      cache: local folder, which processes of a host may share.

    Raises:
      UserError: the bucket has no such folder, it cannot be read, or a shard has another hash than
        in the manifest.
    """
    path = remote / MANIFEST_FILE
    with reading(remote, FIELD):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(
                f"{FIELD} {remote} holds no {MANIFEST_FILE}; prepare the data locally with "
                "python -m heinsen_jax.data.prepare, and copy that folder to the bucket"
            ) from None
    manifest = Manifest.parse(content, path)
    folder = cache / f"{remote.name}-{joint_hash(content.decode())[:12]}"
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=True):
            if not (folder / MANIFEST_FILE).exists():
                _download(remote, folder, manifest)
                _copy(remote / MANIFEST_FILE, folder / MANIFEST_FILE)  # last: all others exist
    return folder


def _download(remote: epath.Path, folder: Path, manifest: Manifest) -> None:
    with reading(remote, FIELD):
        tokenizers = list(remote.glob("tokenizer*"))
    for path in tokenizers:
        _copy(path, folder / path.name)
    shards = [shard for shard in manifest.shards() if not (folder / shard.file).exists()]
    total = sum(shard.tokens for shard in shards) * numpy_dtype(manifest.dtype).itemsize
    with (
        byte_progress(f"downloading {remote}", total) as advance,
        ThreadPoolExecutor(CONCURRENT) as pool,
    ):
        list(pool.map(lambda shard: advance(_fetch_shard(remote, folder, shard)), shards))


def _fetch_shard(remote: epath.Path, folder: Path, shard: Shard) -> int:
    """Download a shard, check its hash, and return its size."""
    _copy(remote / shard.file, folder / shard.file, shard.sha256)
    return (folder / shard.file).stat().st_size


def _copy(source: epath.Path, target: Path, sha256: str | None = None) -> None:
    """Download a file, and compare its hash with a given one."""
    digest = hashlib.sha256()
    with replacing(target) as copy:
        for block in _blocks(source):
            copy.write(block)
            digest.update(block)
        if sha256 not in (None, digest.hexdigest()):
            raise UserError(
                f"{source} is damaged (its content has another hash than in {MANIFEST_FILE}); copy "
                "it to the bucket again"
            )


def _blocks(source: epath.Path) -> Iterator[bytes]:
    with reading(source, FIELD), source.open("rb") as file:
        while block := file.read(1 << 24):
            yield block
