"""Program with 8 virtual devices: prints errors of sharded log-attention."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from heinsen_jax.ops import LogAttentionState, log_attention, sharded_log_attention  # noqa: E402

BATCH, LENGTH, HEADS, DEPTH = 8, 8 * 24, 2, 4
BY_ROWS, BY_TOKENS = PartitionSpec("devices"), PartitionSpec(None, "devices")
BY_HEADS = PartitionSpec(None, None, "devices")
WHOLE = PartitionSpec()


def inputs(rng: np.random.Generator, *, decay: bool, segments: bool, state: bool) -> dict[str, Any]:
    """Arrays by keyword."""

    def normal() -> np.ndarray:
        return rng.standard_normal((BATCH, LENGTH, HEADS, DEPTH)).astype(np.float32)

    arrays: dict[str, Any] = {"query": normal(), "key": normal(), "log_value": normal()}
    if decay:
        arrays["log_decay"] = -np.abs(0.1 * normal())
    if segments:  # from 1 token to more than two devices, some ending at a device boundary
        lengths = rng.choice([1, 7, 24, 48, 60], (BATCH, LENGTH))
        ends = np.cumsum(lengths, 1)
        arrays["segment_ids"] = (
            np.stack(
                [np.searchsorted(row, np.arange(LENGTH), side="right") for row in ends]
            ).astype(np.int32)
            * 70_000
            % (1 << 30)
        )
    if state:
        log_s = rng.standard_normal((BATCH, HEADS, DEPTH, DEPTH)).astype(np.float32)
        log_z = rng.standard_normal((BATCH, HEADS, DEPTH)).astype(np.float32)
        total = np.zeros_like(log_z) if decay else None
        arrays["initial_state"] = LogAttentionState(log_s, log_z, total)
    return arrays


def errors(one: Callable, other: Callable, arrays: dict[str, Any]) -> list[float]:
    """Return the largest relative differences of outputs and gradients of two functions."""
    floats = {name: x for name, x in arrays.items() if name != "segment_ids"}
    others = {name: x for name, x in arrays.items() if name == "segment_ids"}

    @partial(jax.jit, static_argnums=0)
    def differentiate(function: Callable, floats: Any) -> Any:
        outputs, pullback = jax.vjp(lambda floats: function(**floats, **others), floats)
        key = jax.random.key(0)
        return outputs, pullback(jax.tree.map(lambda x: jax.random.normal(key, x.shape), outputs))

    pairs = zip(
        *(jax.tree.leaves(differentiate(function, floats)) for function in (one, other)),
        strict=True,
    )
    return [
        float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)) for a, b in pairs
    ]


def sharded(
    op: Callable, spec: PartitionSpec, arrays: dict[str, Any], returns: Any, **others: PartitionSpec
) -> Callable:
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    specs = {name: WHOLE if name == "initial_state" else spec for name in arrays} | others

    def function(**arrays: Any) -> Any:
        call = lambda arrays: op(**arrays)  # noqa: E731
        part = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=returns)
        return part(arrays)

    return function


def without_total(op: Callable, **options: Any) -> Callable:
    """Remove the total decay of a state, which is not compared."""

    def function(**arrays: Any) -> Any:
        result = op(**arrays, **options)
        return (
            (result[0], (result[1].log_s, result[1].log_z)) if options["return_state"] else result
        )

    return function


def main() -> None:
    rng, names, found = np.random.default_rng(json.loads(sys.argv[1])), sys.argv[2:], {}
    if "by rows" in names:
        arrays = inputs(rng, decay=True, segments=False, state=False)
        found["by rows"] = errors(
            sharded(log_attention, BY_ROWS, arrays, BY_ROWS), log_attention, arrays
        )
    if "by query heads" in names:
        arrays = {
            "query": rng.standard_normal((2, 40, 8, DEPTH)).astype(np.float32),
            "key": rng.standard_normal((2, 40, 1, DEPTH)).astype(np.float32),
            "log_value": rng.standard_normal((2, 40, 1, DEPTH)).astype(np.float32),
            "log_decay": -rng.exponential(0.1, (2, 40, 1, DEPTH)).astype(np.float32),
        }
        part = sharded(log_attention, WHOLE, arrays, BY_HEADS, query=BY_HEADS)
        found["by query heads"] = errors(part, log_attention, arrays)
    cases = {
        "segments": {"decay": False, "segments": True, "state": False},
        "all, from a state to a state": {"decay": True, "segments": True, "state": True},
        "both ways": {"decay": False, "segments": False, "state": True, "is_causal": False},
    }
    for name in [name for name in names if name in cases]:
        case = cases[name]
        options = {"is_causal": case.pop("is_causal", True), "return_state": case["state"]}
        options["implementation"] = "chunked" if case["state"] else "scan"  # compiles faster
        arrays = inputs(rng, **case)
        returns = (BY_TOKENS, WHOLE) if case["state"] else BY_TOKENS
        part = without_total(sharded_log_attention, axis_name="devices", **options)
        part = sharded(part, BY_TOKENS, arrays, returns)
        found[name] = errors(part, without_total(log_attention, **options), arrays)
    print(json.dumps({"devices": jax.device_count(), "errors": found}))


if __name__ == "__main__":
    main()
