"""Queries and keys that heads of values share in the gated delta rule, compared with repeated ones.

    python benchmarks/shared_keys.py [--length 2048] [--repeats 5]

Gated DeltaNet as in Qwen 3.5: 16 heads of queries and keys, 48 of values, head dimension 128, one
sequence, float32. Forward and backward, interleaved in one process; bytes of arguments and results,
and of the workspace, of the compiled function.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, interleaved_medians

from heinsen_jax.ops import gated_delta_rule
from heinsen_jax.runtime.environment import environment

KEY_HEADS, VALUE_HEADS, DEPTH = 16, 48, 128


@dataclass(frozen=True)
class Options:
    """Measure shared queries and keys.

    Attributes:
      length: number of tokens.
      repeats: number of measurements of which the median is reported.
      output: path of the JSON record.
    """

    length: int = 2048
    repeats: int = 5
    output: Path = ROOT / "benchmarks/results/shared_keys.json"


def arrays(length: int, key_heads: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, length, KEY_HEADS, DEPTH))
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    query, key = (np.repeat(x, key_heads // KEY_HEADS, 2) for x in unit)
    heads = 1, length, VALUE_HEADS
    share = rng.uniform(size=heads)
    named = {"query": query, "key": key, "value": rng.standard_normal((*heads, DEPTH))}
    named |= {"log_decay": -0.1 * rng.exponential(size=heads), "erase": share, "write": share}
    return {name: jnp.asarray(x, jnp.float32) for name, x in named.items()}


@jax.jit
def gradients(arguments: dict[str, jax.Array]) -> Any:
    return jax.grad(lambda x: jnp.sum(jnp.sin(gated_delta_rule(**x))))(arguments)


def main(options: Options) -> None:
    forms = {"shared": KEY_HEADS, "repeated": VALUE_HEADS}
    given = {name: arrays(options.length, heads) for name, heads in forms.items()}
    seconds = interleaved_medians(
        {name: lambda x=x: gradients(x) for name, x in given.items()}, options.repeats
    )
    results = {}
    for name, x in given.items():
        memory = gradients.lower(x).compile().memory_analysis()
        assert memory is not None
        results[name] = {
            "seconds": seconds[name],
            "argument_and_result_bytes": memory.argument_size_in_bytes
            + memory.output_size_in_bytes,
            "workspace_bytes": memory.temp_size_in_bytes,
        }
        print(name, results[name])
    sizes = {"length": options.length, "key_heads": KEY_HEADS, "value_heads": VALUE_HEADS}
    record = {"environment": environment(), **sizes, "depth": DEPTH, "forms": results}
    options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
