"""Time to verify a checkpoint, compared with reading its files without hashes.

    python benchmarks/checkpoint_verify.py --gigabytes 10 --folder FOLDER

Saves random arrays in a subfolder, which it deletes at the end: states of 2 GB, one after another,
whose files become one step, as if several processes had written it. First a flipped bit must be
found. Then it measures, alternately: reading with the same threads, verification, and verification
as in earlier versions, SHA-256 of one file after another. Cold: the files are removed from the page
cache before each measurement. Linux only. Writes a JSON record.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, write_record

from heinsen_jax.runs import checksums
from heinsen_jax.training.checkpoint import Checkpoints

ARRAY_BYTES, ARRAYS = 1 << 27, 15  # 2 GB per state


@dataclass(frozen=True)
class Options:
    """Measure the verification of a checkpoint.

    Attributes:
      gigabytes: size of the state, in 1e9 bytes.
      folder: folder on the disk to measure.
      repeats: number of measurements of each kind.
      output: path of the JSON record.
    """

    gigabytes: float = 10.0
    folder: Path = Path("build")
    repeats: int = 3
    output: Path = ROOT / "benchmarks/results/checkpoint_verify.json"


def save(workdir: Path, gigabytes: float) -> Path:
    """Save states and return the folder of a step with their files."""
    rng, folder = np.random.default_rng(0), workdir / "1"
    (folder / "default").mkdir(parents=True)
    for number in range(max(1, round(gigabytes * 1e9 / (ARRAYS * ARRAY_BYTES)))):
        state = {
            str(i): jnp.asarray(rng.integers(0, 1 << 32, ARRAY_BYTES // 4, np.uint32))
            for i in range(ARRAYS)
        }
        with Checkpoints(workdir / "state") as checkpoints:
            checkpoints.save(1, state)
        saved = checkpoints.folder / "1/default/ocdbt.process_0"
        saved.rename(folder / f"default/ocdbt.process_{number}")
        shutil.rmtree(workdir / "state")
    checksums.write_checksums(folder)
    return folder


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def check_damage(folder: Path) -> None:
    """Check that a flipped bit in the largest file is found."""
    assert find_damage(folder) is None
    largest = max(files(folder), key=lambda path: path.stat().st_size)
    flip(largest)
    assert find_damage(folder) == f"{largest.relative_to(folder)} is not as it was written"
    flip(largest)
    assert find_damage(folder) is None


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def find_damage(folder: Path) -> str | None:
    return checksums.find_damage(folder) or checksums.find_damaged_array(folder)


def read(folder: Path) -> None:
    def read_one(path: Path) -> None:
        buffer = bytearray(1 << 18)  # the size of hashlib.file_digest
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(checksums.THREADS) as pool:
        list(pool.map(read_one, files(folder)))


def earlier(folder: Path) -> None:
    for path in files(folder):
        with path.open("rb") as file:
            file_digest(file, "sha256")


def evict(folder: Path) -> None:
    """Remove the files from the page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


KINDS: dict[str, Callable[[Path], object]] = {
    "read": read,
    "verify": find_damage,
    "earlier": earlier,
}


def measure(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of each kind, cold and warm."""
    times = {cache: {kind: [] for kind in KINDS} for cache in ("cold", "warm")}
    for _ in range(repeats):
        for cache, kinds in times.items():
            for kind, seconds in kinds.items():
                if cache == "cold":
                    evict(folder)
                else:
                    read(folder)
                start = time.perf_counter()
                KINDS[kind](folder)
                seconds.append(time.perf_counter() - start)
    return {
        cache: {kind: statistics.median(seconds) for kind, seconds in kinds.items()}
        for cache, kinds in times.items()
    }


def main(options: Options) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as workdir:
        folder = save(Path(workdir), options.gigabytes)
        check_damage(folder)
        sizes = [path.stat().st_size for path in files(folder)]
        seconds = measure(folder, options.repeats)
    record = {
        "bytes": sum(sizes),
        "files": len(sizes),
        "threads": checksums.THREADS,
        "seconds": seconds,
        "gigabytes_per_second": {
            cache: {kind: sum(sizes) / x / 1e9 for kind, x in kinds.items()}
            for cache, kinds in seconds.items()
        },
    }
    print(json.dumps(record["gigabytes_per_second"], indent=2))
    write_record(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
