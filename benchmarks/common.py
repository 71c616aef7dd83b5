"""Records, timing and memory measurement shared by all benchmarks."""

import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.runtime.environment import environment

ROOT = Path(__file__).resolve().parents[1]
HEADS, DEPTH = 8, 32  # sizes of attention measured alone
Name = TypeVar("Name", bound=Hashable)
SETTING = {"batch": 1, "heads": HEADS, "depth": DEPTH, "dtype": "float32"}


def with_implementation(config: LanguageModelConfig, name: str) -> LanguageModelConfig:
    """Return the model with this implementation of its log-attention."""

    def chosen(layer: Layers) -> Layers:
        if layer.mechanism != "log":
            return layer
        return replace(layer, options={**layer.options, "implementation": name})

    return replace(config, attention=tuple(map(chosen, config.layers)))


def interleaved_medians(
    functions: dict[Name, Callable[[], Any]], repeats: int, seconds: float = 0.4, min_calls: int = 3
) -> dict[Name, float]:
    """Return the median seconds of each function, interleaved so that disturbances affect all.

    Each function runs for about the same time per repeat: one call that is not counted, since the
    other functions occupied the caches and memory, then at least `min_calls`, until `seconds` have
    passed.
    """
    times: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            jax.block_until_ready(function())
            began, calls = time.perf_counter(), 0
            while calls < min_calls or time.perf_counter() < began + seconds:
                start = time.perf_counter()
                jax.block_until_ready(function())
                times[name].append(time.perf_counter() - start)
                calls += 1
    return {name: statistics.median(seconds_per_call) for name, seconds_per_call in times.items()}


def random_tokens(length: int, seed: int = 0) -> list[jax.Array]:
    """Return query, key, log_value and a cotangent `[1, T, N, K]`."""
    rng = np.random.default_rng(seed)
    shape = 1, length, HEADS, DEPTH
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(4)]


def added_memory(call: Callable[[], Any]) -> int:
    """Return the peak bytes that a compiled call adds to this process. Linux only.

    The recorded peak is reset, since compilation needs more than the call; `ru_maxrss` cannot be
    reset. Freed memory is first returned to the system, so that its reuse counts.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_memory("VmRSS")
    outputs = jax.block_until_ready(call())
    peak = resident_memory("VmHWM") - before
    output_size = sum(x.nbytes for x in jax.tree.leaves(outputs))
    assert peak >= output_size, f"a peak of {peak} bytes cannot hold outputs of {output_size}"
    return peak


def resident_memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record with hardware, versions and commit, and print where it is."""
    path.write_text(json.dumps({"environment": environment(), **record}, indent=2) + "\n")
    print(f"written to {path}")
