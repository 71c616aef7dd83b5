"""Cost of exactness in log-attention: tiers, their selection, and the matmul rate.

    python benchmarks/tiers.py [--output benchmarks/results/tiers.json]

Forward and backward, float32, one sequence, 8 heads of head dimension 32, each tier on inputs that
need it, in interleaved runs. Needs about 3 minutes on 2 cores of an AMD EPYC. Writes a JSON record.

- Tiers are run by the public functions, including the selection among all tiers.
- Cost of the selection: the measurement of a block alone, relative to a whole call.
- Matmul rate: floating-point operations per second of the forward pass's matrix products, masked
ones included, relative to one large matrix product.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from common import DEPTH, HEADS, ROOT, SETTING, interleaved_medians, random_tokens, write_record
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops import heinsen_attention, log_attention
from heinsen_jax.ops.log_attention.chunked import Chunked, measure
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs

LENGTHS = (1024, 4096)
CHUNK = 64  # chunk size for the matmul rate
LARGE = 2048  # rows and columns of the reference product
REQUIRED = {"two": 2.5, "two, decay": 3.5, "three": 8.0}
TEST_COSTS = 0.05


@dataclass(frozen=True)
class Options:
    """Measure the tiers.

    Attributes:
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/tiers.json"
    repeats: int = 9


def inputs(length: int) -> dict[str, tuple[dict[str, jax.Array], jax.Array]]:
    """Return moderate arguments ("one") and three kinds that need the exact tier, with a cotangent:
    keys that rise by 2 nats per token ("two"), also with queries and keys whose largest features
    differ by 80 nats, so that scores are summed term by term ("terms"), or log-values with a
    standard deviation of 100 ("three")."""
    query, key, log_value, cotangent = random_tokens(length)
    decay = -jnp.abs(random_tokens(length, seed=1)[0]) / 2
    rises = 2.0 * jnp.arange(length, dtype=jnp.float32)[None, :, None, None]
    lower = 80.0 * (jnp.arange(DEPTH) % 2)
    arguments = {"query": query, "key": key, "log_value": log_value}
    tiers = {
        "one": arguments,
        "two": arguments | {"key": key + rises},
        "terms": arguments | {"query": query - lower, "key": key + rises - (80 - lower)},
        "three": arguments | {"log_value": 100 * log_value},
    }
    with_decay = {"log_decay": decay}
    tiers |= {f"{name}, decay": tier | with_decay for name, tier in tiers.items()}
    return {name: (tier, cotangent) for name, tier in tiers.items()}


def in_linear_space(arguments: dict[str, jax.Array]) -> dict[str, jax.Array]:
    value = arguments["log_value"]
    rest = {name: x for name, x in arguments.items() if name != "log_value"}
    return rest | {"value": value}


def differentiate(function: Callable, arguments: dict[str, jax.Array], cotangent: jax.Array):
    output, pullback = jax.vjp(lambda arguments: function(**arguments), arguments)
    return output, pullback(cotangent)


forward_backward = jax.jit(differentiate, static_argnums=0)


def check(arguments: dict[str, jax.Array], cotangent: jax.Array, name: str) -> None:
    """Check results against another implementation; nothing is timed before."""
    have, want = (
        forward_backward(partial(log_attention, implementation=i), arguments, cotangent)
        for i in ("chunked", "scan")
    )
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        assert error < 2e-3, f"tier {name} differs from scan by {error:.1e}"


def time_tiers(function: Callable, length: int, repeats: int) -> dict[str, Any]:
    calls = {}
    attention = partial(function, implementation="chunked")
    for name, (arguments, cotangent) in inputs(length).items():
        if function is heinsen_attention:
            if name.startswith("three"):
                continue
            arguments = in_linear_space(arguments)
        elif length == LENGTHS[0]:
            check(arguments, cotangent, name)
        calls[name] = partial(forward_backward, attention, arguments, cotangent)
    seconds = interleaved_medians(calls, repeats)
    times_one = {
        name: s / seconds["one, decay" if name.endswith("decay") else "one"]
        for name, s in seconds.items()
        if not name.startswith("one")
    }
    met = {name: times_one[name] <= limit for name, limit in REQUIRED.items() if name in times_one}
    return {"seconds": seconds, "times_tier_one": times_one, "requirements": met}


def time_test(repeats: int) -> dict[str, Any]:
    """Return the cost of `measure` relative to forward and backward passes."""
    arguments, cotangent = inputs(LENGTHS[0])["one"]
    block = Inputs(arguments["query"][..., None, :], arguments["key"], arguments["log_value"])
    empty = jnp.full((HEADS, DEPTH, DEPTH), -jnp.inf)
    state = Averages(empty[..., 0], empty)
    plan = Chunked().plan(block, is_log=True)
    attention = partial(log_attention, implementation="chunked")
    calls = {
        "measure": partial(jax.jit(partial(measure, plan)), block, state),
        "whole": partial(forward_backward, attention, arguments, cotangent),
    }
    seconds = interleaved_medians(calls, repeats)
    cost = seconds["measure"] / seconds["whole"]
    return {"seconds": seconds, "cost": cost, "requirement": cost <= TEST_COSTS}


def matmul_rate(repeats: int) -> dict[str, Any]:
    length, size = LENGTHS[0], CHUNK
    arguments, _ = inputs(length)["one"]
    forward = jax.jit(partial(log_attention, implementation=Chunked(CHUNK)))
    square = jnp.ones((LARGE, LARGE))
    calls = {
        "forward": lambda: forward(**arguments),
        "matmul": partial(jax.jit(jnp.matmul), square, square),
    }
    seconds = interleaved_medians(calls, repeats)
    # per token: weights and averages of `size` tokens, one query and one update of the state
    operations = 2 * length * HEADS * (2 * size * DEPTH + 2 * DEPTH * DEPTH)
    rates = {
        "forward": operations / seconds["forward"],
        "matmul": 2 * LARGE**3 / seconds["matmul"],
    }
    return {"operations_per_second": rates, "fraction": rates["forward"] / rates["matmul"]}


def show(record: dict[str, Any], console: Console) -> None:
    table = Table("tokens", "tier", "ms", "times tier one", "at most")
    for name, lengths in record["tiers"].items():
        table.add_section()
        table.add_row(name)
        for length, result in lengths.items():
            for tier, seconds in result["seconds"].items():
                ratio = result["times_tier_one"].get(tier, 1.0)
                limit = str(REQUIRED.get(tier, ""))
                table.add_row(str(length), tier, f"{1e3 * seconds:.2f}", f"{ratio:.2f}", limit)
    console.print(table)
    console.print(f"the selection costs {100 * record['test']['cost']:.1f}%, at most 5% required")
    console.print(f"fraction of the matmul rate, forward: {record['matmul']['fraction']:.2f}")


def main(options: Options) -> int:
    console = Console()
    functions = {"log_attention": log_attention, "heinsen_attention": heinsen_attention}
    record: dict[str, Any] = {
        "setting": SETTING,
        "tiers": {
            name: {n: time_tiers(function, n, options.repeats) for n in LENGTHS}
            for name, function in functions.items()
        },
        "test": time_test(2 * options.repeats),
        "matmul": matmul_rate(options.repeats),
    }
    write_record(options.output, record)
    show(record, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
