"""One mesh, and where each parameter lies on it: logical axis -> mesh axis, as data."""

import math
from typing import Annotated, Any

import jax
import numpy as np
import pydantic
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array

RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "heads": None,
    "mlp": None,
    "vocab": None,
}
"""Logical axis of a parameter -> mesh axis that splits it, or None."""

BATCH_AXES = ("data", "fsdp")
"""The mesh axes that split a batch."""

AxisSize = Annotated[int, pydantic.Field(ge=-1)]


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class MeshConfig:
    """How many devices each axis has; at most one -1 takes the rest."""

    data: AxisSize = -1
    """Devices with copies of the parameters and batches of their own."""
    fsdp: AxisSize = 1
    """Devices that share parameters and optimizer state, with batches of their own."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of all devices.

    Raises:
      UserError: the sizes do not make up the number of devices.
    """
    sizes, devices = [config.data, config.fsdp], jax.device_count()
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = devices // max(1, max(sizes))
    if min(sizes) < 1 or math.prod(sizes) != devices:
        raise UserError(
            f"mesh.data={config.data}, mesh.fsdp={config.fsdp} do not make up the {devices} "
            "device(s) there are: let one of them be -1, or make their product the device count"
        )
    return jax.make_mesh(sizes, BATCH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for each array of a pytree: by the logical axes that its variable carries
    (a further, first axis stacks layers and is not split); replicated where it carries none."""

    def shard(node: Any) -> Any:
        axes = node.get_metadata().get("logical_axes", ()) if isinstance(node, nnx.Variable) else ()
        names = [RULES[axis] for axis in axes]

        def one(leaf: Any) -> NamedSharding:
            spec = [None] * (leaf.ndim - len(names)) + names
            for size, name in zip(leaf.shape, spec, strict=True):
                if name is not None and size % mesh.shape[name]:
                    raise UserError(
                        f"mesh.{name}={mesh.shape[name]} does not divide a parameter axis of {size}"
                    )
            return NamedSharding(mesh, PartitionSpec(*spec))

        return jax.tree.map(one, node)

    return jax.tree.map(shard, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def shard_batch(batch: np.ndarray, mesh: Mesh) -> Array:
    """This process's rows of a global batch, as one array over the devices of all processes."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return jax.make_array_from_process_local_data(sharding, batch)
