"""Weights of a model as .safetensors: one file, or shards and an index.

The metadata of a file have the hash of its content, so that damage is detected when it is read.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from heinsen_jax.errors import UserError, check_regular, parse_json
from heinsen_jax.storage.files import replacing, storage_errors, write_atomically
from heinsen_jax.typing import Array

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
HASH = "sha256"


def has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists()


def save_weights(
    folder: Path,
    arrays: Mapping[str, Array | np.ndarray],
    *,
    step: int,
    shard_bytes: int = SHARD_BYTES,
    framework: str = "flax",
) -> None:
    """Write named arrays, in shards of at most `shard_bytes` or of one array; the metadata
    name the `framework` whose names and layouts they have."""
    shards: list[dict[str, Array | np.ndarray]] = [{}]
    for name, x in arrays.items():
        if shards[-1] and sum(y.nbytes for y in shards[-1].values()) + x.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = x
    metadata = {"format": framework, "step": str(step)}
    stem, suffix = WEIGHTS_FILE.split(".")
    files = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        file = WEIGHTS_FILE if len(shards) == 1 else file
        files |= dict.fromkeys(shard, file)
        with storage_errors(folder):
            save_hashed(folder / file, shard, metadata)
    if len(shards) == 1:
        (folder / INDEX_FILE).unlink(missing_ok=True)  # the index of earlier shards
    else:
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)  # a single file precedes an index
        total = sum(x.nbytes for x in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        with storage_errors(folder):
            write_atomically(folder / INDEX_FILE, json.dumps(index, indent=2).encode())


def load_weights(
    folder: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, Array | np.ndarray], int]:
    """Read arrays with the names, shapes, dtypes and shardings of `abstract`, and their step.
    Arrays without a sharding are NumPy arrays.

    Raises:
      UserError: a file is missing or damaged, or has other arrays; the message names it.
    """
    files = weight_files(folder) or dict.fromkeys(abstract, WEIGHTS_FILE)
    if problems := files.keys() ^ abstract.keys():
        raise UserError(_mismatch(folder / INDEX_FILE, min(problems), "of another model"))
    arrays, step = {}, 0
    for file in sorted(set(files.values())):
        path = folder / file
        names = [name for name in files if files[name] == file]
        loaded, metadata = load_hashed(path, "fetch it again")
        if problems := {*names} ^ loaded.keys():
            raise UserError(_mismatch(path, min(problems), "of another model"))
        if not (number := metadata.get("step", "0")).isdecimal():
            raise UserError(f"{path}: its step {number!r} is not an integer; fetch it again")
        step = int(number)
        for name, x in loaded.items():
            want = abstract[name]
            if x.shape != want.shape or x.dtype != want.dtype:
                what = f"{x.dtype}{[*x.shape]}, not {want.dtype}{[*want.shape]}"
                raise UserError(_mismatch(path, name, what))
            arrays[name] = x if want.sharding is None else jax.device_put(x, want.sharding)
    return arrays, step


def save_hashed(
    path: str | Path, arrays: Mapping[str, Array | np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write named arrays, and metadata with the hash of everything, atomically.

    Raises:
      OSError: the file cannot be written.
    """
    contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    try:
        with replacing(Path(path)) as file:
            save_file(contiguous, file.name, {**metadata, HASH: _hash_of(contiguous, metadata)})
            os.chmod(file.name, os.fstat(file.fileno()).st_mode)  # safetensors makes it private
            with open(file.name, "rb") as made:
                os.fsync(made.fileno())
    except SafetensorError as error:
        raise OSError(str(error)) from error


def load_hashed(path: str | Path, remedy: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and metadata that `save_hashed` wrote.

    Raises:
      UserError: the file cannot be read or is damaged; the message ends with the remedy.
    """
    check_regular(Path(path))
    with reading_arrays(path, remedy), safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata() or {})
        arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if HASH not in metadata:
        raise UserError(f"{path} is damaged, or not of this package (it has no {HASH}); {remedy}")
    if metadata.pop(HASH) != _hash_of(arrays, metadata):
        raise UserError(f"{path} is damaged (its content has another hash); {remedy}")
    return arrays, metadata


@contextlib.contextmanager
def reading_arrays(path: str | Path, remedy: str) -> Iterator[None]:
    """Convert errors, in a block that only reads a .safetensors file, to `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from None
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None


def _hash_of(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, x in sorted(arrays.items()):
        digest.update(json.dumps([name, str(x.dtype), x.shape]).encode())
        digest.update(x.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def weight_files(folder: Path) -> dict[str, str] | None:
    """The file of each array, from the index of shards; None if a single file has all arrays.

    As in transformers, a single file precedes an index: shards beside it are from another model.
    """
    path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not path.exists():
        return None
    try:
        files = parse_json(path.read_bytes())["weight_map"]
        outside = {file for file in files.values() if Path(file).name != file}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); fetch it again") from None
    if outside:
        raise UserError(f"{path}: {min(outside)!r} is not a file in this folder; correct the index")
    return files


def check_finite(value: Array | np.ndarray, name: str, path: Path, remedy: str) -> None:
    """Refuse a tensor with NaN or infinite values."""
    if not np.isfinite(np.asarray(value)).all():
        raise UserError(f"{path}: tensor {name} has NaN or infinite values; {remedy}")


def _mismatch(path: Path, name: str, what: str) -> str:
    return f"{path}: the entry {name!r} is {what}: it does not belong to {path.parent}/config.json"
