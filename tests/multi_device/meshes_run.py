"""Program with 8 virtual devices: a model on several meshes.

Prints the differences of loss and gradients from those of one device, the collective operations of
the compiled gradient and, optionally, of the compiled loss, and the initial memory of a device.
"""

import collections
import json
import math
import re
import sys
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from heinsen_jax.data import Batch  # noqa: E402
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers  # noqa: E402
from heinsen_jax.objectives.cross_entropy import cross_entropy  # noqa: E402
from heinsen_jax.objectives.evaluation import make_evaluation_step  # noqa: E402
from heinsen_jax.objectives.objective import next_token  # noqa: E402
from heinsen_jax.sharding import MeshConfig, make_mesh, shard_batch, shardings  # noqa: E402
from heinsen_jax.training.config import OptimizerConfig  # noqa: E402
from heinsen_jax.training.optimizer import make_optimizer  # noqa: E402
from heinsen_jax.training.state import abstract_state, graph_of, initializer  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 64, (8, 65)).astype(np.int32)
SEGMENT_IDS = np.cumsum(np.random.default_rng(1).uniform(size=TOKENS.shape) < 0.08, 1)
FEW = 64 * 8 * 65 // 5
COLLECTIVES = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def mesh_of(sizes: dict[str, int]) -> Mesh:
    devices = jax.devices()[: math.prod(sizes.values())]
    return make_mesh(MeshConfig(**{"data": 1, **sizes}), devices)


def part_of_moment(config: LanguageModelConfig, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a device's part of the optimizer state of one parameter."""
    init = initializer(config, make_optimizer(OptimizerConfig()), 0)
    moments = abstract_state(init, mesh).optimizer[1][0].mu
    attention = moments["blocks"][0]["attention"]
    (kernel,) = jax.tree.leaves(attention.get("project", attention.get("value"))["kernel"])
    return kernel.sharding.shard_shape(kernel.shape)


def run(
    config: LanguageModelConfig, mesh: Mesh, wants_loss: bool, is_packed: bool
) -> tuple[list[np.ndarray], dict, int]:
    """Return loss and gradients as global arrays; collective operations by function and name; bytes
    that a device needs to initialize its parameters."""
    graph = graph_of(config)

    def init() -> Any:
        return nnx.state(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(parameters: Any, tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        valid = jnp.ones(tokens[:, 1:].shape, bool)
        model = nnx.merge(graph, parameters)
        said = next_token(model, Batch(tokens, valid, segment_ids), jax.random.key(0))
        if wants_loss:
            return said.sums()[0] / valid.size
        return cross_entropy(*said, max_logits=FEW)[0] / valid.size  # in several chunks

    with jax.set_mesh(mesh):
        places = shardings(jax.eval_shape(init), mesh)
        make = jax.jit(init, out_shardings=places).lower().compile()
        memory, parameters = make.memory_analysis(), make()
        segment_ids = SEGMENT_IDS.astype(np.int32) if is_packed else None
        batch = shard_batch((TOKENS, segment_ids), mesh)
        gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
        compiled = {"gradient": gradient.lower(parameters, *batch).compile()}
        if wants_loss:
            compiled["loss"] = jax.jit(loss).lower(parameters, *batch).compile()
        leaves = jax.tree.leaves(compiled["gradient"](parameters, *batch))
        if is_packed:  # positions in segments
            (tokens, ids), step = batch, make_evaluation_step(graph, by_position=True)
            valid = shard_batch(np.ones(TOKENS[:, 1:].shape, bool), mesh)
            sums = step(parameters, Batch(tokens, valid, ids), 0)
            assert all(x.is_fully_replicated and x.shape == (3,) for x in sums)
            leaves += sums
    collectives = {
        name: collections.Counter(re.findall(COLLECTIVES, function.as_text()))
        for name, function in compiled.items()
    }
    needed = memory.output_size_in_bytes + memory.temp_size_in_bytes
    return [np.asarray(x) for x in leaves], collectives, needed


def main() -> None:
    fields, wants_loss, *meshes = map(json.loads, sys.argv[1:])
    config = LanguageModelConfig(
        vocab_size=64,
        model_dim=16,
        num_layers=2,
        num_heads=8,
        attention=Layers(fields["attention"], options=fields.get("options", {})),
        convolution_size=fields.get("convolution_size"),
    )
    is_packed = fields.get("is_packed", False)
    expected, _, whole = run(config, mesh_of({}), False, is_packed)
    found = []
    for sizes in meshes:
        mesh = mesh_of(sizes)
        actual, collectives, part = run(config, mesh, wants_loss, is_packed)
        pairs = zip(actual, expected, strict=True)
        worst = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)
        moment = part_of_moment(config, mesh)
        found.append(
            {
                "error": worst,
                "collectives": collectives,
                "moment": moment,
                "memory_to_begin": part / whole,
            }
        )
    print(json.dumps({"devices": jax.device_count(), "meshes": found}))


if __name__ == "__main__":
    main()
