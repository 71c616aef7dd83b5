"""Cost of windows in additive pooling, which should not depend on their size.

    python benchmarks/additive.py [--output benchmarks/results/additive.json]

Forward and backward, float32, one sequence, 8 heads of dimension 32, in interleaved runs. Needs
about 30 seconds on 2 cores of an AMD EPYC. Writes a JSON record.

- Windows of 4 and of 1024 tokens are compared; a window of 1000, which is not a multiple of chunks,
and no window are also reported.
- The obvious implementation, an associative scan of (largest logit, sum of weights, weighted sum)
without a window, is timed for comparison.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from common import ROOT, SETTING, interleaved_medians, random_tokens
from jax import lax
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops.additive import additive_pooling
from heinsen_jax.runtime.environment import environment

LENGTHS = (1024, 4096)
WINDOWS = (4, 1000, 1024, None)
REQUIRED = 1.2  # maximum time of a window of 1024, in units of one of 4


@dataclass(frozen=True)
class Options:
    """Measure additive pooling.

    Attributes:
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/additive.json"
    repeats: int = 5


def scan(x: jax.Array, logits: jax.Array) -> jax.Array:
    def joined(earlier, later):
        (largest1, total1, sum1), (largest2, total2, sum2) = earlier, later
        largest = jnp.maximum(largest1, largest2)
        kept, added = jnp.exp(largest1 - largest), jnp.exp(largest2 - largest)
        return largest, kept * total1 + added * total2, kept * sum1 + added * sum2

    tokens = logits[..., None], jnp.ones_like(logits)[..., None], x
    _, total, weighted = lax.associative_scan(joined, tokens, axis=1)
    return weighted / total


@partial(jax.jit, static_argnames="window")
def forward_backward(x: jax.Array, logits: jax.Array, cotangent: jax.Array, window: Any):
    function = scan if window == "scan" else partial(additive_pooling, local_window_size=window)
    output, pullback = jax.vjp(function, x, logits)
    return output, pullback(cotangent)


def check(arrays: tuple[jax.Array, ...]) -> None:
    """Check windows against averages by definition; nothing is timed before."""
    x, logits, _ = (a[:, :1024] for a in arrays)
    index = jnp.arange(x.shape[1])
    age = index[:, None] - index[None]
    for window in WINDOWS:
        visible = (age >= 0) & (age < (window or len(index)))
        weights = jnp.where(visible[None, :, :, None], logits[:, None], -jnp.inf)
        expected = jnp.einsum("btsn,bsnd->btnd", jax.nn.softmax(weights, 2), x)
        have = additive_pooling(x, logits, local_window_size=window)
        error = float(jnp.max(jnp.abs(have - expected)))
        assert error < 1e-5, f"a window of {window} is wrong by {error:.1e}"


def measure(length: int, repeats: int) -> dict[str, Any]:
    x, key, _, cotangent = random_tokens(length)
    arrays = x, key[..., 0], cotangent
    check(arrays)
    calls = {str(w): partial(forward_backward, *arrays, window=w) for w in (*WINDOWS, "scan")}
    seconds = interleaved_medians(calls, repeats)
    ratio = seconds["1024"] / seconds["4"]
    return {"seconds": seconds, "1024_over_4": ratio, "requirement": ratio <= REQUIRED}


def show(record: dict[str, Any], console: Console) -> None:
    table = Table("tokens", "window", "ms")
    for length, result in record["lengths"].items():
        table.add_section()
        for window, seconds in result["seconds"].items():
            table.add_row(str(length), window, f"{1e3 * seconds:.2f}")
    console.print(table)
    for length, result in record["lengths"].items():
        ratio = result["1024_over_4"]
        console.print(
            f"{length} tokens: 1024 needs {ratio:.2f} times as long as 4, at most {REQUIRED}"
        )


def main(options: Options) -> int:
    console = Console()
    record: dict[str, Any] = {
        "environment": environment(),
        "setting": SETTING,
        "lengths": {n: measure(n, options.repeats) for n in LENGTHS},
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    show(record, console)
    console.print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
