"""Ops on meshes with explicit axes: each device computes its own sequences and heads.

JAX's meshes have explicit axes by default: the sharding of an array is part of its type, and
operations that merge or cut split axes are refused. Sequences and heads are independent of each
other, so a decorated op runs inside `jax.shard_map`, each device on its part. The axes of arguments
and results are read from their annotations.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial, wraps
from types import UnionType
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from heinsen_jax.ops.layout import equally_varying, varying_like
from heinsen_jax.sharding import Rules, batch_names, current_mesh, rules_in_use
from heinsen_jax.typing import Array, PyTree

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True, order=True)
class Axis:
    """An axis of an array: its letter, and its index among batch axes."""

    letter: str
    index: int = 0


HEADS, GROUPS = Axis("N"), Axis("G")
INDEPENDENT = "B", "N", "G"
"""Letters of axes along which the results of an op are independent."""
Axes: TypeAlias = tuple[Axis | None, ...]
"""The axes of an array; None for axes without a name, which may not be split."""
Split: TypeAlias = Mapping[Axis, tuple[str, ...]]
"""Axes of arrays, and the mesh axes that split them."""
Annotation: TypeAlias = "tuple[str | tuple[Annotation | str, ...], ...]"
"""The alternatives of an annotation: axes of an array, or annotations of a tuple's members, of
which the first may be followed by an ellipsis."""


def explicit_mesh(tree: PyTree) -> AbstractMesh | None:
    """The mesh of this pytree's arrays, if it has explicit axes."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and (mesh := jax.typeof(x).sharding.mesh).explicit_axes:
            return mesh
    return None


def split_like(x: Array, example: Array, batch: int) -> Array:
    """x `[*B, ...]`, its batch axes split as an example's are, on a mesh with explicit axes."""
    mesh = explicit_mesh(example)
    if mesh is None:
        return x
    spec = PartitionSpec(*jax.typeof(example).sharding.spec[:batch])
    return jax.reshard(x, _sharding(mesh, spec))


def _sharding(mesh: AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(cast(Mesh, mesh), spec)  # its annotation leaves out abstract meshes


def in_mesh_of_arguments(op: F) -> F:
    """Decorate an op that calls functions of the user: outside `jit`, loops need `jax.set_mesh`."""

    @wraps(op)
    def call(*args: Any, **keywords: Any) -> Any:
        arrays = [x for x in jax.tree.leaves((args, keywords)) if isinstance(x, jax.Array)]
        is_set = not jax.sharding.get_abstract_mesh().empty
        if is_set or any(isinstance(x, Tracer) for x in arrays):
            return op(*args, **keywords)
        for x in arrays:
            if explicit_mesh(x) is not None:
                with jax.set_mesh(cast(Mesh, cast(NamedSharding, x.sharding).mesh)):
                    return op(*args, **keywords)
        return op(*args, **keywords)

    return cast(F, call)


def over_devices(op: F) -> F:
    """Decorate an op: on a mesh with explicit axes, each device computes its sequences and heads.

    Devices communicate only to sum gradients of arguments that they share, and to return the state
    of a key/value head that they share.

    Raises:
      ValueError: an axis other than batch axes and heads is split, arguments are split differently,
        a mesh axis splits both sequences and heads, or the devices do not divide the heads.
    """

    @wraps(op)
    def call(*args: Any, **keywords: Any) -> Any:
        mesh, rules = explicit_mesh((args, keywords)), rules_in_use()
        free = current_mesh()
        if mesh is None and (rules is None or free is None or free.manual_axes):
            if jax.sharding.get_abstract_mesh().manual_axes:
                args, keywords = equally_varying((args, keywords))
            return op(*args, **keywords)
        arguments = inspect.signature(op).bind(*args, **keywords).arguments
        annotations = annotations_of(op)
        first = next(iter(arguments))
        letters = next(x for x in annotations[first] if isinstance(x, str)).split()
        batch = arguments[first].ndim - len(letters) + letters.count("*B")
        arrays, static = arrays_and_constants(arguments)
        axes = {name: leaf_axes(x, annotations[name], batch) for name, x in arrays.items()}
        if any(annotations[name] and None in leaf for name in arrays for leaf in axes[name]):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
            constants = {name: x.value for name, x in static}
            jax.eval_shape(partial(op, **constants), **shapes)  # raises if a shape does not fit
        sizes = _sizes(arrays, axes)
        if mesh is not None:
            split = _split_by_types(mesh, arrays, axes, sizes)
        else:
            assert rules is not None
            assert free is not None
            mesh, split = free, _split_by_rules(free, rules, sizes)
        specs = tuple(_spec(leaf, split) for name in sorted(arrays) for leaf in axes[name])
        constants = _Call(op, static, mesh, batch, tuple(split.items()), specs)
        if all(x.is_constant for _, x in static):
            return _run(constants, arrays)
        return jax.jit(partial(_apply, constants))(arrays)

    return cast(F, call)


class Static:
    """An argument that is not traced. It is constant unless it may change and remain equal, as a
    list or a function may; calls with such arguments are compiled each time."""

    def __init__(self, value: Any):
        self.value = value
        self.is_constant = is_dataclass(value) or not callable(value)
        try:
            hash(value)
        except TypeError:
            self.is_constant = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        return (type(self.value), self.value) == (type(other.value), other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def arrays_and_constants(
    arguments: Mapping[str, Any],
) -> tuple[dict[str, PyTree], tuple[tuple[str, Static], ...]]:
    """Arguments that have arrays, and the others."""
    arrays = {
        name: x
        for name, x in arguments.items()
        if any(isinstance(leaf, Array) for leaf in jax.tree.leaves(x))
    }
    rest = ((name, Static(x)) for name, x in arguments.items() if name not in arrays)
    return arrays, tuple(rest)


@dataclass(frozen=True)
class _Call:
    """A call, without the arrays."""

    op: Callable
    static: tuple[tuple[str, Static], ...]
    mesh: AbstractMesh
    batch: int
    split: tuple[tuple[Axis, tuple[str, ...]], ...]
    specs: tuple[PartitionSpec, ...]


def _apply(call: _Call, arrays: dict[str, PyTree]) -> PyTree:
    leaves, structure = jax.tree.flatten(arrays)
    mesh = call.mesh
    if mesh.explicit_axes:
        specs = zip(leaves, call.specs, strict=True)
        leaves = [jax.reshard(x, _sharding(mesh, spec)) for x, spec in specs]

    out_specs: PyTree = None
    mesh_axes = frozenset(mesh.explicit_axes or mesh.auto_axes)

    def on_device(*leaves: Array) -> PyTree:
        constants = {name: x.value for name, x in call.static}
        pairs = zip(leaves, call.specs, strict=True)
        leaves = tuple(varying_like(x, leaves) if any(spec) else x for x, spec in pairs)
        result = call.op(**jax.tree.unflatten(structure, leaves), **constants)
        if out_specs is None:
            return result
        return jax.tree.map(partial(_equal_on_devices, mesh_axes), result, out_specs)

    if mesh.manual_axes:  # JAX does not lower residuals of a `shard_map` inside another one
        on_device = jax.checkpoint(on_device)

    def over(out_specs: PyTree, check_vma: bool = True) -> Callable[..., PyTree]:
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=call.specs,
            out_specs=out_specs,
            axis_names=mesh_axes,
            check_vma=check_vma,
        )

    annotation, split = annotations_of(call.op)["return"], dict(call.split)
    states = inspect.signature(call.op).parameters.get("return_state")
    if states is not None and not dict(call.static).get("return_state", Static(False)).value:
        annotation = annotation[:1]
    if len(annotation) == 1 and isinstance(letters := annotation[0], str):
        axes = _parse_axes(letters, len(letters.split()) - 1 + call.batch, call.batch)
        assert axes is not None
        out_specs = _spec(tuple(axis for axis, _ in axes), split)
    else:
        result = jax.eval_shape(over(PartitionSpec(), check_vma=False), *leaves)
        specs = [_spec(axes, split) for axes in leaf_axes(result, annotation, call.batch)]
        out_specs = jax.tree.unflatten(jax.tree.structure(result), specs)
    return over(out_specs)(*leaves)


_run = jax.jit(_apply, static_argnums=0)


def _equal_on_devices(mesh_axes: frozenset[str], x: Array, spec: PartitionSpec) -> Array:
    """x, equal on devices of these mesh axes that do not split it: a state of a key/value head that
    they share."""
    split = {name for names in names_by_axis(spec) for name in names}
    shared = jax.typeof(x).manual_axis_type.varying & mesh_axes - split
    if not shared or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    mean = partial(lax.pmean, axis_name=tuple(sorted(shared)))
    if jnp.isrealobj(x):
        return mean(x)
    return lax.complex(mean(x.real), mean(x.imag))  # log 0 + 0j divided by a number is NaN


def _sizes(arrays: Mapping[str, PyTree], axes: Mapping[str, list[Axes]]) -> dict[Axis, int]:
    return {
        axis: size
        for name, tree in arrays.items()
        for x, named in zip(jax.tree.leaves(tree), axes[name], strict=True)
        for axis, size in zip(named, np.shape(x), strict=True)
        if axis is not None
    }


def _split_by_types(
    mesh: AbstractMesh,
    arrays: Mapping[str, PyTree],
    axes: Mapping[str, list[Axes]],
    sizes: Mapping[Axis, int],
) -> Split:
    """The mesh axes that split each axis of the arguments, by the arguments' types."""
    split: dict[Axis, tuple[str, ...]] = {}
    for name, tree in arrays.items():
        for x, named in zip(jax.tree.leaves(tree), axes[name], strict=True):
            for index, (axis, names) in enumerate(zip(named, split_axes(x), strict=True)):
                if not names:
                    continue
                where = f"{name} {[*x.shape]} is split over {', '.join(names)} along axis {index}"
                if axis is None or axis.letter not in INDEPENDENT:
                    raise ValueError(
                        f"{where}; only batch axes and heads may be split: change its sharding "
                        "with jax.reshard"
                    )
                if split.setdefault(axis, names) != names:
                    raise ValueError(
                        f"{where}, another argument over {', '.join(split[axis])}; split them "
                        "alike with jax.reshard"
                    )
    heads = split.get(HEADS) or split.get(GROUPS) or ()
    devices = math.prod(mesh.shape[name] for name in heads)
    if split.get(GROUPS, heads) != heads:
        raise ValueError(
            f"query heads are split over {', '.join(heads)}, key/value heads over "
            f"{', '.join(split[GROUPS])}; split them alike with jax.reshard"
        )
    split |= {axis: heads for axis in (HEADS, GROUPS) if heads and sizes.get(axis, 1) > 1}
    for axis, kind in ((HEADS, "query"), (GROUPS, "key/value")):
        if sizes.get(axis, 1) > 1 and sizes[axis] % devices:
            raise ValueError(
                f"the {devices} devices of {', '.join(heads)} do not divide {sizes[axis]} {kind} "
                "heads; repeat the heads, or split them over fewer devices"
            )
    used = [name for names in {**split, GROUPS: ()}.values() for name in names]
    if repeated := sorted({name for name in used if used.count(name) > 1}):
        raise ValueError(
            f"{repeated[0]} splits two axes, such as sequences and heads; split them over "
            "different axes of the mesh with jax.reshard"
        )
    return split


def _split_by_rules(mesh: AbstractMesh, rules: Rules, sizes: Mapping[Axis, int]) -> Split:
    """The mesh axes that split each axis of the arguments, by the rules of a layer."""
    split: dict[Axis, tuple[str, ...]] = {}
    batch = [axis for axis in sizes if axis.letter == "B"]
    for axis, name in zip(sorted(batch), batch_names(len(batch)), strict=True):
        split[axis] = _free(mesh, rules.get(name, ()), sizes[axis])
    heads = [axis for axis in (HEADS, GROUPS) if sizes.get(axis, 1) > 1]
    names = [_free(mesh, rules.get("heads", ()), sizes[axis]) for axis in heads]
    if all(names):
        split |= dict(zip(heads, names, strict=True))
    return {axis: names for axis, names in split.items() if names}


def _free(mesh: AbstractMesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The Auto axes among these, if their devices divide the size."""
    names = tuple(name for name in names if name in mesh.auto_axes)
    return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()


def names_by_axis(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis; a `PartitionSpec` has a single one without its tuple."""
    return [(names,) if isinstance(names, str) else tuple(names or ()) for names in spec]


def split_axes(x: Array) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of an array, by its type."""
    return names_by_axis(jax.typeof(x).sharding.spec)


def _spec(axes: Axes, split: Split) -> PartitionSpec:
    return PartitionSpec(*(axis and split.get(axis) for axis in axes))


def leaf_axes(tree: PyTree, annotation: Annotation, batch: int) -> list[Axes]:
    """The axes of each leaf of an argument or result."""
    if tree is None:
        return []
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        pairs = zip(tree, _members(annotation, len(tree)), strict=True)
        return [axes for x, member in pairs for axes in leaf_axes(x, member, batch)]
    if is_dataclass(tree) or isinstance(tree, tuple):
        hints = annotations_of(type(tree))
        return [
            x
            for name in _dynamic_fields(tree)
            for x in leaf_axes(getattr(tree, name), hints[name], batch)
        ]
    return [_array_axes(x, annotation, batch) for x in jax.tree.leaves(tree)]


def _members(annotation: Annotation, count: int) -> Sequence[Annotation]:
    """The annotation of each member of a tuple."""
    for members in annotation:
        if isinstance(members, tuple) and members[1:] == ("...",):
            return [cast(Annotation, members[0])] * count
        if isinstance(members, tuple) and len(members) == count:
            return cast("tuple[Annotation, ...]", members)
    return [()] * count


def _dynamic_fields(tree: Any) -> Sequence[str]:
    """The names of the fields of a state, or of a named tuple, that hold arrays."""
    if is_dataclass(tree):
        return [x.name for x in fields(tree) if not x.metadata.get("static", False)]
    return tree._fields


def _array_axes(x: Any, annotation: Annotation, batch: int) -> Axes:
    """The axes of one array, by the first alternative that has as many."""
    shape = np.shape(x)
    for letters in annotation:
        if not isinstance(letters, str):
            continue
        if (axes := _parse_axes(letters, len(shape), batch)) is not None:
            return tuple(
                None if broadcasts and size == 1 else axis
                for (axis, broadcasts), size in zip(axes, shape, strict=True)
            )
    return (None,) * len(shape)


def _parse_axes(annotation: str, ndim: int, batch: int) -> list[tuple[Axis, bool]] | None:
    """The axes in an annotation, and whether they broadcast; None if their number is not ndim."""
    axes: list[tuple[Axis, bool]] = []
    letters = annotation.split()
    for letter in letters:
        broadcasts = "#" in letter
        if letter.strip("#*") == "B":
            count = ndim - len(letters) + 1 if broadcasts else batch
            axes += [(Axis("B", batch - count + i), broadcasts) for i in range(count)]
        else:
            axes.append((Axis(letter.strip("#")), broadcasts))
    return axes if len(axes) == ndim else None


@cache
def annotations_of(annotated: Callable | type) -> dict[str, Annotation]:
    """The annotations of a function's arguments and of its result, or of a class's fields."""
    return {name: parse_annotation(hint) for name, hint in type_hints(annotated).items()}


def parse_annotation(hint: Any) -> Annotation:
    """The axes that an annotation names; arrays without named axes, and other types, have none."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(dict.fromkeys(x for part in get_args(hint) for x in parse_annotation(part)))
    if get_origin(hint) is tuple:
        return (tuple("..." if part is ... else parse_annotation(part) for part in get_args(hint)),)
    return (hint.dim_str,) if hasattr(hint, "dim_str") else ()
