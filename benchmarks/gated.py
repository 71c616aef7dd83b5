"""Speed of the gated delta rule and of mLSTM beside linear attention and log-attention.

    python benchmarks/gated.py [--length 4096] [--repeats 9]

Forward and backward, float32, one sequence, 8 heads of dimension 32, interleaved in one process.
Decays are as in layers at initialization, or large: their sums exceed what the fast form of decays
by feature admits. A sequence is also split over two devices, the cores of this machine, that
exchange states: bytes per device, and time relative to one device. Exits with 1 if a requirement is
not met. Needs about a minute on 2 cores of an AMD EPYC.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import DEPTH, HEADS, ROOT, SETTING, interleaved_medians, random_tokens, write_record
from compile_cases import apart, delta, gated, in_two_steps, mlstm
from jax.sharding import AxisType, PartitionSpec
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops import (
    MatrixState,
    gated_delta_rule,
    heinsen_attention,
    linear_attention,
    over_context,
)
from heinsen_jax.ops.gated_delta_rule import matrix_summary

REQUIRED = {  # maximum time, as a multiple of linear attention's
    "mamba2": 1.5,
    "gla": 1.5,
    "deltanet": 3.0,
    "gated_deltanet": 3.0,
    "kda": 3.0,
}
OF_KDA = {"rwkv7": 2.0}
"""Maximum time, as a multiple of KDA's."""
LARGE = 100.0  # factor of large decays


@dataclass(frozen=True)
class Options:
    """Measure the gated delta rule.

    Attributes:
      length: number of tokens.
      repeats: number of measurements of which the median is reported.
      output: path of the JSON record.
    """

    length: int = 4096
    repeats: int = 9
    output: Path = ROOT / "benchmarks/results/gated.json"


def cases(length: int) -> dict[str, tuple[Callable, tuple[jax.Array, ...]]]:
    """Return each function with its arguments."""
    query, key, value, _ = random_tokens(length)
    unit_query, unit_key = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    rng = np.random.default_rng(1)
    feature_decay = jnp.asarray(-0.05 * rng.exponential(size=key.shape), jnp.float32)
    head_decay = jnp.asarray(-0.1 * rng.exponential(size=key.shape[:-1]), jnp.float32)
    share = jnp.asarray(rng.uniform(size=key.shape[:-1]), jnp.float32)
    shares = jnp.asarray(rng.uniform(size=key.shape), jnp.float32)
    plain, unit = (query, key, value), (unit_query, unit_key, value)
    return {
        "linear": (linear_attention, plain),
        "log": (heinsen_attention, plain),
        "no gates": (gated_delta_rule, plain),
        "mamba2": (gated, (*plain, head_decay)),
        "gla": (gated, (*plain, feature_decay)),
        "gla, large decays": (gated, (*plain, LARGE * feature_decay)),
        "deltanet": (delta, (*unit, share)),
        "gated_deltanet": (gated, (*unit, head_decay, share)),
        "kda": (gated, (*unit, feature_decay, share)),
        "kda, large decays": (gated, (*unit, LARGE * feature_decay, share)),
        "rwkv7": (apart, (*plain, feature_decay, shares, unit_query)),
        "gated_deltaproduct, 2 steps": (
            in_two_steps,
            (query, *(jnp.repeat(x, 2, 1) for x in unit[1:]), head_decay, jnp.repeat(share, 2, 1)),
        ),
        "mlstm": (mlstm, (*plain, head_decay, head_decay)),
    }


def differentiated(function: Callable, arrays: tuple[jax.Array, ...]) -> Callable[[], Any]:
    @jax.jit
    def run(arrays: tuple[jax.Array, ...]) -> Any:
        output, pullback = jax.vjp(function, *arrays)
        return output, pullback(output)

    return partial(run, arrays)


def split(arrays: tuple[jax.Array, ...]) -> Callable:
    """Return the gated delta rule with the sequence split over two devices."""
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "context")

    def options(gates: tuple[jax.Array, ...]) -> dict[str, Any]:
        log_decay, *share = gates
        erasure = {"erase": share[0], "write": share[0]} if share else {}
        return {"log_decay": log_decay, **erasure}

    def op(query: Any, key: Any, value: Any, *gates: Any, initial_state: Any, **_: Any) -> Any:
        state = initial_state.matrix
        y, matrix = gated_delta_rule(
            query, key, value, **options(gates), initial_state=state, return_state=True
        )
        return y, MatrixState(matrix)

    def summary(query: Any, key: Any, value: Any, *gates: Any) -> MatrixState:
        return matrix_summary(query, key, value, **options(gates))

    def on_device(*arrays: jax.Array) -> jax.Array:
        empty = MatrixState.empty((1,), HEADS, DEPTH, DEPTH)
        return over_context(op, *arrays, summary=summary, empty=empty)[0]

    specs = (spec,) * len(arrays)
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=spec)


def exchanged_bytes(arrays: tuple[jax.Array, ...]) -> int:
    """Return the bytes of a device's state and transition."""
    query, key, value, log_decay, *share = arrays
    options = {"erase": share[0], "write": share[0]} if share else {}
    call = partial(matrix_summary, log_decay=log_decay, **options)
    return sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(call, query, key, value))
    )


def check(name: str, arrays: tuple[jax.Array, ...], output: jax.Array) -> None:
    """Compare the first tokens of `gated_delta_rule` with its recurrence in float64."""
    query, key, value, log_decay, *share = (np.asarray(x, np.float64)[0] for x in arrays)
    gate = share[0] if share else np.zeros(key.shape[:-1])
    state = np.zeros((HEADS, DEPTH, DEPTH))
    for t in range(64):
        k, v, b = key[t], value[t], gate[t][:, None]
        state = np.exp(log_decay[t].reshape(HEADS, -1))[..., None] * state
        read = np.einsum("nk,nkv->nv", b * k, state)
        state += np.einsum("nk,nv->nkv", k, (b if share else 1) * v - read)
        y = np.einsum("nk,nkv->nv", query[t], state) / DEPTH**0.5
        np.testing.assert_allclose(output[0, t], y, atol=1e-5, err_msg=name)


def main(options: Options) -> int:
    jax.config.update("jax_num_cpu_devices", 2)
    all_cases = cases(options.length)
    calls = {name: differentiated(*case) for name, case in all_cases.items()}
    for name, (function, arrays) in all_cases.items():
        if function is gated:
            check(name, arrays, jax.jit(gated)(*arrays))
    names = "mamba2", "gla", "gated_deltanet", "kda"
    for name in names:
        arrays = all_cases[name][1]
        calls[f"{name}, two devices"] = differentiated(split(arrays), arrays)
        for a, b in zip(
            *(jax.tree.leaves(calls[x]()) for x in (name, f"{name}, two devices")), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.max(jnp.abs(a))))
    seconds = interleaved_medians(calls, options.repeats)
    ratios = {name: x / seconds["linear"] for name, x in seconds.items()}
    of_kda = {name: seconds[name] / seconds["kda"] for name in OF_KDA}
    met = {name: ratios[name] <= limit for name, limit in REQUIRED.items()}
    met |= {name: of_kda[name] <= limit for name, limit in OF_KDA.items()}
    record = {
        "setting": SETTING | {"length": options.length, "large_decays": LARGE},
        "seconds": seconds,
        "times_linear": ratios,
        "times_kda": of_kda,
        "requirements": met,
        "exchanged_bytes": {name: exchanged_bytes(all_cases[name][1]) for name in names},
    }
    table = Table("", "ms", "times linear", "at most")
    for name, ratio in ratios.items():
        limit = f"{REQUIRED[name]:g}" if name in REQUIRED else ""
        table.add_row(name, f"{1e3 * seconds[name]:.1f}", f"{ratio:.2f}", limit)
    Console().print(table)
    write_record(options.output, record)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
