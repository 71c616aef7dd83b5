"""Program with 4 virtual devices: layers, the language model or the trainer on explicit axes.

Arguments: "layer" or "model", layouts (joined by commas) and names of mechanisms; or "trainer" and
a folder. Prints, relative to one device's results, the largest differences of values, gradients and
states; the shardings of outputs and states; and the collective operations of a forward pass.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

from heinsen_jax.attention import mechanism  # noqa: E402
from heinsen_jax.config.load import load_config  # noqa: E402
from heinsen_jax.models import LanguageModel, LanguageModelConfig  # noqa: E402
from heinsen_jax.training import prepare_run, train  # noqa: E402
from tests.attention.small import MODEL_DIM, random_layer  # noqa: E402
from tests.multi_device.explicit_run import collectives, difference  # noqa: E402

ROWS, LENGTH, VOCABULARY = 4, 32, 12
LAYOUTS = {
    "rows": ((4,), ("data",), ("data",), {}),
    "heads": ((2, 2), ("data", "model"), (), {"heads": "model", "mlp": "model", "vocab": "model"}),
    "both": (
        (2, 2),
        ("data", "model"),
        ("data",),
        {"heads": "model", "mlp": "model", "vocab": "model"},
    ),
    "fsdp": ((4,), ("data",), ("data",), {"embed": "data"}),
    "tokens": ((2, 2), ("data", "sequence"), ("data", "sequence"), {}),
}
"""Sizes and names of the mesh's axes, axes that split rows and tokens, and axes of parameters."""


def put(mesh: Mesh, rules: dict[str, str], parameters: nnx.State) -> nnx.State:
    """Parameters, split along their logical axes."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        axes = [rules.get(axis) for axis in variable.get_metadata().get("logical_axes", ())]
        value = variable[...]
        spec = PartitionSpec(*[None] * (value.ndim - len(axes)), *axes)
        return variable.replace(jax.device_put(value, NamedSharding(mesh, spec)))

    return jax.tree.map(one, parameters, is_leaf=lambda x: isinstance(x, nnx.Variable))


def check(
    module: nnx.Module, tokens: np.ndarray, layouts: list[str], *, streams: bool
) -> dict[str, Any]:
    graph, parameters = nnx.split(module)

    def apply(parameters: nnx.State, tokens: Any) -> jax.Array:
        return nnx.merge(graph, parameters)(tokens)

    def value_and_gradients(parameters: nnx.State, tokens: Any) -> Any:
        def loss(parameters: nnx.State) -> Any:
            y = apply(parameters, tokens)
            return jnp.mean(jnp.sin(y)), y

        (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return y, gradients

    def stream(parameters: nnx.State, tokens: Any) -> Any:
        module = nnx.merge(graph, parameters)
        first, state = module(tokens[:, : LENGTH // 2], return_state=True)
        second, state = module(tokens[:, LENGTH // 2 :], state=state, return_state=True)
        return first, second, jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), state)

    def run(function: Callable, *arguments: Any) -> Any:
        return jax.tree.map(np.asarray, jax.jit(function)(*arguments))

    expected = run(value_and_gradients, parameters, tokens)
    streamed = run(stream, parameters, tokens) if streams else None
    results = {}
    for name in layouts:
        sizes, names, rows, rules = LAYOUTS[name]
        mesh = jax.make_mesh(sizes, names)
        split = put(mesh, rules, parameters)
        batch = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(*rows)))
        y, gradients = jax.jit(value_and_gradients)(split, batch)
        with jax.set_mesh(mesh):
            within = jax.jit(value_and_gradients)(split, batch)
        results[name] = {
            "error": max(difference((y, gradients), expected), difference(within, expected)),
            "eager": difference(apply(split, batch), expected[0]),
            "sharding": str(y.sharding.spec),
            "collectives": collectives(apply, split, batch),
            "as_parameters": [x.sharding for x in jax.tree.leaves(gradients)]
            == [x.sharding for x in jax.tree.leaves(split)],
        }
        if streamed is not None:
            *outputs, state = jax.jit(stream)(split, batch)
            results[name] |= {
                "streamed": difference(tuple(outputs), streamed[:2]),
                "state": max(map(apart, jax.tree.leaves(state), jax.tree.leaves(streamed[2]))),
                "states": sorted({str(x.sharding.spec) for x in jax.tree.leaves(state)}),
            }
    return results


def apart(actual: Any, expected: Any) -> float:
    """Largest difference, relative to the largest value if that exceeds 1."""
    largest = np.max(np.abs(expected), initial=1)
    return float(np.max(np.abs(np.asarray(actual) - expected), initial=0) / largest)


WIDE: dict[str, Any] = {"rwkv7": {"value_depth": 16}}
"""Options of mechanisms whose layer norm of few features amplifies rounding errors."""


def layer(layouts: list[str], name: str) -> dict[str, Any]:
    options = mechanism(name).short_options(LENGTH) | WIDE.get(name, {})
    module = random_layer(name, num_heads=4, **options)
    x = np.random.default_rng(0).standard_normal((ROWS, LENGTH, MODEL_DIM)).astype(np.float32)
    return check(module, x, layouts, streams=module.capabilities.streaming)


def model(layouts: list[str], name: str) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "model_dim": 16, "num_layers": 2, "num_heads": 4}
    config = LanguageModelConfig(**sizes, attention=name, block="standard")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH))
    return check(LanguageModel(config, rngs=nnx.Rngs(0)), tokens, layouts, streams=True)


def trainer(folder: str) -> dict[str, Any]:
    """Losses after two updates on the trainer's mesh, and on meshes of the user."""
    config = load_config(Path(folder) / "tiny.py")
    config = replace(config, training=replace(config.training, steps=2, sample_tokens=0))
    explicit = jax.make_mesh((2, 2), ("tensor", "data"))
    auto = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    losses = {}
    for name, mesh in {"none": None, "explicit": explicit, "auto": auto}.items():
        train(prepare_run(config, Path(folder) / name, mesh=mesh))
        rows = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["train/loss"] for row in map(json.loads, rows) if "train/loss" in row]
    with (
        jax.set_mesh(explicit),
        prepare_run(config, Path(folder) / "set", dry_run=True) as prepared,
    ):
        losses["set"] = dict(prepared.settings.mesh.shape)
    return losses


def main() -> None:
    kind, first, *names = sys.argv[1:]
    if kind == "trainer":
        print(json.dumps(trainer(first)))
    else:
        one = {"layer": layer, "model": model}[kind]
        print(json.dumps({name: one(first.split(","), name) for name in names}))


if __name__ == "__main__":
    main()
