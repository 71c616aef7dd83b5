"""The device mesh, and rules that map logical axes of arrays to its axes.

The axes of the mesh:

    data      replicas of the parameters, each with a part of every batch
    fsdp      parameters, optimizer state and the batch are split
    tensor    attention heads, MLPs and the vocabulary are split
    context   sequences are split: devices hold consecutive tokens and exchange attention states
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
import pydantic
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array, PyTree, config_dataclass

Tree = TypeVar("Tree")

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis -> the mesh axes that split it."""

RULES: Rules = {
    # axes of parameters
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "rank": ("fsdp",),  # of products of low rank
    # axes of activations; their features are split only along "heads", "mlp" and "vocab"
    "batch": ("data", "fsdp"),
    "tokens": ("context",),
}
"""The rules of `make_mesh`'s meshes."""
OPTIONAL = {"rank"}
"""Logical axes of parameters that are not split where devices do not divide them; others are
refused."""

_rules: ContextVar[Rules | None] = ContextVar("rules", default=None)

AxisSize = Annotated[int, pydantic.Field(ge=-1)]


@config_dataclass
class MeshConfig:
    """Number of devices per mesh axis; one axis may be -1, for all remaining devices."""

    data: AxisSize = -1
    """Data parallelism: replicas of the parameters, each with its part of the batch."""
    fsdp: AxisSize = 1
    """Fully sharded data parallelism: parameters, optimizer state and batch are split."""
    tensor: AxisSize = 1
    """Tensor parallelism: attention heads, MLPs and the vocabulary are split."""
    context: AxisSize = 1
    """Context parallelism: the tokens of each sequence are split."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of these devices; of all devices of all processes when None.

    Raises:
      UserError: the sizes do not make up the number of devices.
    """
    axes, count = dataclasses.asdict(config), len(devices or jax.devices())
    sizes = list(axes.values())
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = count // max(1, -math.prod(sizes))
    if min(sizes) < 1 or math.prod(sizes) != count:
        given = ", ".join(f"mesh.{name}={size}" for name, size in axes.items())
        raise UserError(
            f"{given} do not multiply to {count}, the number of devices; set one of them to -1, "
            "or change them"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=kinds, devices=devices)


def training_mesh(mesh: Mesh) -> Mesh:
    """A user's mesh with all axes of `MeshConfig`, in their order, as Auto axes; the same devices.

    Raises:
      UserError: an axis has another name.
    """
    names = tuple(field.name for field in dataclasses.fields(MeshConfig))
    if unknown := [name for name in mesh.axis_names if name not in names]:
        raise UserError(
            f"the mesh has the axis {unknown[0]!r}; name axes {', '.join(names)}, or leave "
            "jax.set_mesh and set config.mesh"
        )
    given = [mesh.axis_names.index(name) for name in names if name in mesh.axis_names]
    sizes = [mesh.shape.get(name, 1) for name in names]
    devices = mesh.devices.transpose(given).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def current_mesh() -> AbstractMesh | None:
    """Return the mesh in use if some of its axes are Auto: None without a mesh, with one device,
    and inside `jax.shard_map` over all axes. Types say how Explicit axes split arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.auto_axes and mesh.size > 1 else None


@contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Lay out activations by these rules, and run each op on each device's sequences and heads.

    Rules are read when a function is traced: one that `jax.jit` has compiled without them, or with
    others, is not compiled again.
    """
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def rules_in_use() -> Rules | None:
    """The rules of the layer that calls, if it is on a mesh."""
    return _rules.get()


def rules_or_default() -> Rules:
    """The rules in use, or `RULES`."""
    rules = _rules.get()
    return RULES if rules is None else rules


def spec(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> PartitionSpec:
    """Return the sharding of an activation with these logical axes, by the rules in use. Axes whose
    size the devices do not divide are not split, and mesh axes that are missing, or not Auto, are
    ignored."""
    rules = rules_or_default()
    free = {name: mesh.shape[name] for name in mesh.auto_axes}

    def names(size: int, axis: str | None) -> tuple[str, ...] | None:
        split = tuple(x for x in rules.get(axis or "", ()) if free.get(x, 1) > 1)
        return split if split and size % math.prod(free[x] for x in split) == 0 else None

    return PartitionSpec(*map(names, shape, axes))


def splits_tokens(length: int) -> bool:
    """Return whether the current mesh splits sequences of this length."""
    mesh = current_mesh()
    return mesh is not None and spec(mesh, (length,), ("tokens",))[0] is not None


def constrain(x: Array, *axes: str | None) -> Array:
    """x, laid out by the rules in use; unchanged without a mesh, or where types have the sharding.

    `axes` name the trailing axes; axes that precede them are "batch", "batch 1", ...
    """
    mesh, leading = current_mesh(), x.ndim - len(axes)
    if mesh is None:
        return x
    return lax.with_sharding_constraint(x, spec(mesh, x.shape, (*batch_names(leading), *axes)))


def batch_names(count: int) -> tuple[str, ...]:
    """Logical names of batch axes; only the first is split by `RULES`."""
    return tuple(f"batch {index}" if index else "batch" for index in range(count))


def shardings(tree: PyTree, mesh: Mesh) -> PyTree[NamedSharding]:
    """A `NamedSharding` for each array of a pytree: by the logical axes that its variable carries
    (a further, first axis stacks layers and is not split); replicated where it carries none."""

    def shard(node: PyTree) -> PyTree[NamedSharding]:
        axes = node.get_metadata().get("logical_axes", ()) if isinstance(node, nnx.Variable) else ()

        def one(leaf: Array | jax.ShapeDtypeStruct) -> NamedSharding:
            named = [None] * (leaf.ndim - len(axes)) + [*axes]
            split = [RULES[axis] if axis else () for axis in named]
            for place, (size, axis) in enumerate(zip(leaf.shape, named, strict=True)):
                for name in split[place]:
                    if not size % mesh.shape[name]:
                        continue
                    if axis not in OPTIONAL:
                        raise UserError(
                            f"mesh.{name}={mesh.shape[name]} does not divide a parameter axis of "
                            f"{size}; choose another mesh, or other sizes of the model"
                        )
                    split[place] = ()
            return NamedSharding(mesh, PartitionSpec(*(x or None for x in split)))

        return jax.tree.map(one, node)

    return jax.tree.map(shard, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def put(tree: Tree, mesh: Mesh) -> Tree:
    """The arrays of a pytree on the devices of a mesh, laid out by `shardings`."""
    return jax.device_put(tree, shardings(tree, mesh))


def share_of_process(mesh: Mesh) -> tuple[int, int]:
    """Return the index of this process's part of every batch, and the number of equal parts.

    Processes that share sequences, split over a tensor or context axis, have the same part.

    Raises:
      UserError: the rows on this process's devices are not adjacent.
    """
    count = math.prod(mesh.shape[name] for name in RULES["batch"])
    indices = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    rows = sorted({index[0].indices(count)[0] for index in indices if index is not None})
    if rows[-1] - rows[0] != len(rows) - 1 or rows[0] % len(rows):
        raise UserError(
            "mesh: the parts of a batch on a process's devices are not adjacent; make "
            "mesh.tensor times mesh.context a divisor or a multiple of the number of devices of "
            f"a process, {jax.local_device_count()}"
        )
    return rows[0] // len(rows), count // len(rows)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch by rows; tokens are split only after the embedding."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Make arrays over the devices of all processes from this process's share of a batch."""
    index, count = share_of_process(mesh)

    def whole(rows: np.ndarray) -> Array:
        shape = len(rows) * count, *rows.shape[1:]

        def part(place: tuple[slice, ...] | None) -> np.ndarray:
            assert place is not None
            start, stop, _ = place[0].indices(shape[0])
            return rows[start - index * len(rows) : stop - index * len(rows)]

        return jax.make_array_from_callback(shape, batch_sharding(mesh), part)

    return jax.tree.map(whole, batch)
