"""A model's weights as .safetensors: one file, or shards of it and an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from heinsen_jax.data.files import write_atomically
from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array, PyTree

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def named(tree: PyTree) -> dict[str, Any]:
    """The arrays of a pytree by their paths: what is saved does not depend on container classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists()


def save_weights(
    folder: Path,
    arrays: Mapping[str, Array | np.ndarray],
    *,
    step: int,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes arrays by their names. More than `shard_bytes` are cut into files of at most so many,
    or of one array."""
    shards: list[dict[str, Array | np.ndarray]] = [{}]
    for name, x in arrays.items():
        if shards[-1] and sum(y.nbytes for y in shards[-1].values()) + x.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = x
    metadata = {"format": "flax", "step": str(step)}
    stem, suffix = WEIGHTS_FILE.split(".")
    place = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        file = WEIGHTS_FILE if len(shards) == 1 else file
        place |= dict.fromkeys(shard, file)
        held = {name: np.ascontiguousarray(x) for name, x in shard.items()}
        save_file(held, folder / file, metadata)
    if len(shards) == 1:
        (folder / INDEX_FILE).unlink(missing_ok=True)  # of what was there before
    else:
        total = sum(x.nbytes for x in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": place}
        write_atomically(folder / INDEX_FILE, json.dumps(index, indent=2).encode())


def load_weights(
    folder: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, Array], int]:
    """Arrays of the names, shapes, dtypes and shardings of `abstract`, and the step they are of.

    Raises:
      UserError: a file is missing or damaged, or holds other arrays; the message names it.
    """
    place = _index(folder) or dict.fromkeys(abstract, WEIGHTS_FILE)
    if problems := place.keys() ^ abstract.keys():
        raise UserError(_mismatch(folder / INDEX_FILE, min(problems), "of another model"))
    arrays, step = {}, 0
    for file in sorted(set(place.values())):
        path = folder / file
        names = [name for name in place if place[name] == file]
        try:
            with safe_open(path, framework="numpy") as opened:
                if problems := {*names} ^ {*opened.keys()}:
                    raise UserError(_mismatch(path, min(problems), "of another model"))
                step = int((opened.metadata() or {}).get("step", 0))
                for name in names:
                    x, want = opened.get_tensor(name), abstract[name]
                    if x.shape != want.shape or x.dtype != want.dtype:
                        what = f"{x.dtype}{[*x.shape]}, not {want.dtype}{[*want.shape]}"
                        raise UserError(_mismatch(path, name, what))
                    arrays[name] = jax.device_put(x, want.sharding)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}): fetch it again") from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): fetch it again") from None
    return arrays, step


def _index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    try:
        place = json.loads(path.read_text())["weight_map"]
        return {name: Path(file).name for name, file in place.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}): fetch it again") from None


def _mismatch(path: Path, name: str, what: str) -> str:
    return f"{path}: the entry {name!r} is {what}: it does not belong to {path.parent}/config.json"
