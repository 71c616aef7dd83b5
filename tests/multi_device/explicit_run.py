"""Program with 4 virtual devices: ops on meshes with explicit axes, and of other kinds.

Arguments: the kind of the axes and the names of ops in the catalogue. Kinds: explicit; auto, with
`use_rules`; mixed, of one explicit and one Auto axis; manual, inside the user's `jax.shard_map`
over one of two explicit axes.

Prints for each op, with sequences or heads split or both, the largest difference of values and
gradients from one device's, relative to the largest; the shardings of the output under `jit`, with
`jax.set_mesh` and eagerly; and the collective operations of a forward pass.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from heinsen_jax.sharding import use_rules  # noqa: E402
from tests.ops.catalogue import LENGTH, OPS, Op  # noqa: E402

ROWS = 4
KINDS = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "auto": (AxisType.Auto, AxisType.Auto),
    "mixed": (AxisType.Explicit, AxisType.Auto),
    "manual": (AxisType.Explicit, AxisType.Explicit),
}
LAYOUTS = {
    "rows": (("data", "model"), ()),
    "heads": ((), ("model",)),
    "both": (("data",), ("model",)),
}
WITHOUT_HEADS = {"mla", "tglobal", "rmt"}
"""Ops whose arrays `[*B, T, D]` have no heads."""
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
Arrays = Sequence[Any]


def value_and_gradients(apply: Callable, weights: Any, arrays: Arrays, constants: Arrays) -> Any:
    def loss(arrays: Arrays, constants: Arrays) -> Any:
        y = apply(arrays, constants)
        return jnp.sum(y * weights), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays, constants)
    return y, gradients


def difference(actual: Any, expected: Any) -> float:
    """Largest difference, relative to the largest element of an array, or 1e-3 of all arrays."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in leaves]
    least = 1e-3 * max(np.max(np.abs(b)) for _, b in pairs)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), least)) for a, b in pairs)


def collectives(apply: Callable, *arguments: Any) -> dict[str, int]:
    text = jax.jit(lambda *x: apply(*x)).lower(*arguments).compile().as_text()
    return Counter(re.findall(rf"\b({COLLECTIVES})(?:-start)?\(", text))


def check(kind: str, name: str) -> dict[str, Any]:
    op, rng = OPS[name], np.random.default_rng(0)
    arrays = [rng.standard_normal((ROWS, LENGTH, *x)).astype(np.float32) for x in op.features]
    constants = [rng.standard_normal(x).astype(np.float32) / 2 for x in op.constants]
    weights = rng.standard_normal(jax.eval_shape(op, arrays, constants).shape).astype(np.float32)
    expected = jax.jit(partial(value_and_gradients, op))(weights, arrays, constants)
    inputs = weights, arrays, constants
    return {
        layout: on_mesh(kind, op, name, rows, heads, inputs, jax.tree.map(np.asarray, expected))
        for layout, (rows, heads) in LAYOUTS.items()
        if kind != "manual" or layout == "both"
    }


def on_mesh(
    kind: str, op: Op, name: str, rows: tuple, heads: tuple, inputs: Any, expected: Any
) -> dict[str, Any]:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=KINDS[kind])
    rules = {"batch": rows, "heads": heads}
    in_context = use_rules(rules) if kind == "auto" else nullcontext()

    def put(x: np.ndarray) -> jax.Array:
        has_heads = x.ndim == 4 or name.partition(",")[0] not in WITHOUT_HEADS
        spec = rows or None, None, (heads or None) if has_heads and x.ndim > 2 else None
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec[: x.ndim])))

    weights, arrays, constants = inputs
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = put(weights), [*map(put, arrays)], jax.device_put(constants, whole)
    apply: Callable = op
    if kind == "manual":
        specs = (PartitionSpec("data"), PartitionSpec()), PartitionSpec("data")
        apply = jax.shard_map(
            lambda *x: op(*x), mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names={"data"}
        )
    compute = partial(value_and_gradients, apply)
    results = []
    if kind != "auto":  # whose axes `jax.set_mesh` has to name
        results.append(jax.jit(compute)(*arguments))
    with jax.set_mesh(mesh), in_context:
        results.append(jax.jit(compute)(*arguments))
        forward = collectives(apply, *arguments[1:])
    result = {"error": max(difference(x, expected) for x in results), "collectives": forward}
    if kind == "explicit":
        results.append((y := op(*arguments[1:]), None))
        result["error"] = max(result["error"], difference(y, expected[0]))
    return result | {"shardings": [str(y.sharding.spec) for y, _ in results]}


def main() -> None:
    kind, *names = sys.argv[1:]
    print(json.dumps({name: check(kind, name) for name in names}))


if __name__ == "__main__":
    main()
