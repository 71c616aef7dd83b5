"""Speed and memory of L1 attention, compared with materializing all differences of queries and
keys.

    python benchmarks/l1.py [--output benchmarks/results/l1.json]

Forward and backward, float32, one sequence, 4 heads of dimension 32; results are checked before
anything is timed. Runs are interleaved, each in a separate process. The form with all differences,
`[T, S, N, K]`, is compiled as one function and needs about 5 GB at 2048 tokens. For sparse
attention the time per edge is measured. Needs about 4 minutes on 2 cores of an AMD EPYC. Writes a
JSON record.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import DEPTH, ROOT, added_memory, interleaved_medians

from heinsen_jax.ops.l1 import l1_attention
from heinsen_jax.ops.l1_sparse import l1_sparse_attention
from heinsen_jax.runtime.environment import environment

HEADS = 4
LENGTH = 2048
ROUNDS = 3
EDGES = (2048, 8192, 32_768)
REQUIREMENTS = {
    "memory": "less than an eighth of materializing all differences",
    "speed": "faster than materializing all differences",
    "edges": "time for an edge at 32,768 at most twice that at 2,048",
}
MEASURE = "--measure"


@dataclass(frozen=True)
class Options:
    """Measure L1 attention.

    Attributes:
      output: path of the JSON record.
      repeats: number of measurements of edges of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/l1.json"
    repeats: int = 7


def naive(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool) -> jax.Array:
    differences = query[:, :, None] - key[:, None]
    # |x| with derivative 0 at 0, where jnp.abs has 1: equal features occur.
    distances = jnp.sum(differences * jax.lax.stop_gradient(jnp.sign(differences)), -1)
    scores = -distances / math.sqrt(query.shape[-1])
    if is_causal:
        visible = jnp.tri(query.shape[1], dtype=bool)[None, :, :, None]
        scores = jnp.where(visible, scores, -jnp.inf)
    return jnp.einsum("btsn,bsnv->btnv", jax.nn.softmax(scores, 2), value)


FORMS = {
    "tiled": partial(l1_attention, is_causal=False),
    "tiled_causal": partial(l1_attention, is_causal=True),
    "naive": partial(naive, is_causal=False),
    "naive_causal": partial(naive, is_causal=True),
}
COMPARED = {"tiled": "naive", "tiled_causal": "naive_causal"}


def inputs(length: int) -> list[jax.Array]:
    """Return query, key, value and a cotangent."""
    rng = np.random.default_rng(0)
    shape = 1, length, HEADS, DEPTH
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(4)]


@partial(jax.jit, static_argnames="form")
def forward_backward(query, key, value, cotangent, form: str):
    y, pullback = jax.vjp(FORMS[form], query, key, value)
    return y, pullback(cotangent)


@jax.jit
def along_edges(query, key, value, cotangent, edges):
    y, pullback = jax.vjp(partial(l1_sparse_attention, edges=edges), query, key, value)
    return y, pullback(cotangent)


def worst_error(length: int = 300) -> float:
    """Return the errors of tiled forms, relative to the largest entry of each array, against
    float64."""
    arrays = inputs(length)
    worst = 0.0
    for form, other in COMPARED.items():
        actual = forward_backward(*arrays, form)
        with jax.enable_x64(True):
            exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]
            expected = forward_backward(*exact, other)
            for have, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                have, want = np.asarray(have, np.float64), np.asarray(want)
                worst = max(worst, float(np.max(np.abs(have - want)) / np.max(np.abs(want))))
    return worst


def measure(form: str) -> dict[str, float]:
    """Return the bytes that a call adds to this process, and its seconds."""
    call = partial(forward_backward, *inputs(LENGTH), form)
    jax.block_until_ready(call())  # compiled
    peak = added_memory(call)
    start = time.perf_counter()
    jax.block_until_ready(call())
    return {"peak_bytes": peak, "seconds": time.perf_counter() - start}


def measure_apart() -> dict[str, dict[str, float]]:
    """Return the median of several rounds of interleaved runs."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({})
        for form in FORMS:
            command = [sys.executable, __file__, MEASURE, form]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rounds[-1][form] = json.loads(result.stdout)
    return {
        form: {
            unit: statistics.median(measured[form][unit] for measured in rounds)
            for unit in rounds[0][form]
        }
        for form in FORMS
    }


def edge_calls() -> dict[str, Callable[[], Any]]:
    arrays, rng = inputs(LENGTH), np.random.default_rng(1)
    return {
        str(count): partial(along_edges, *arrays, jnp.asarray(rng.integers(0, LENGTH, (count, 2))))
        for count in EDGES
    }


def main(options: Options) -> int:
    error = worst_error()
    assert error < 1e-5, error
    forms = measure_apart()
    seconds_by_edges = interleaved_medians(edge_calls(), options.repeats)
    for_each = {count: seconds_by_edges[count] / int(count) for count in seconds_by_edges}
    first, *_, last = for_each.values()
    record: dict[str, Any] = {
        "environment": environment(),
        "setting": {"tokens": LENGTH, "heads": HEADS, "depth": DEPTH, "dtype": "float32"},
        "worst_relative_error": error,
        "forms": forms,
        "seconds_by_edges": seconds_by_edges,
        "seconds_for_an_edge": for_each,
        "requirements": {
            "memory": all(
                8 * forms[x]["peak_bytes"] < forms[y]["peak_bytes"] for x, y in COMPARED.items()
            ),
            "speed": all(forms[x]["seconds"] < forms[y]["seconds"] for x, y in COMPARED.items()),
            "edges": last <= 2 * first,
        },
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    for form, of in forms.items():
        print(f"{form:14} {1e3 * of['seconds']:8.0f} ms {of['peak_bytes'] / 1e6:8.0f} MB")
    for count, each in for_each.items():
        print(f"{count:>6} edges: {1e9 * each:.0f} ns each")
    for name, is_met in record["requirements"].items():
        print(f"{'met' if is_met else 'MISSED'}: {REQUIREMENTS[name]}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        sys.exit(main(tyro.cli(Options)))
