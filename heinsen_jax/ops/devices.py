"""Ops on meshes with explicit axes: each device computes its own sequences and heads.

JAX's meshes have explicit axes by default: the sharding of an array is part of its type, and
operations that merge or cut split axes are refused. Sequences and heads are independent of each
other, so a decorated op runs inside `jax.shard_map`, each device on its part. The axes of arguments
and results are read from their annotations.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial, wraps
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from heinsen_jax.ops.layout import varying_like
from heinsen_jax.sharding import Rules, batch_names, current_mesh, rules_in_use
from heinsen_jax.typing import Array, PyTree

F = TypeVar("F", bound=Callable)


class Axis(NamedTuple):
    """An axis of an array: its letter, and its place among batch axes."""

    letter: str
    place: int = 0


HEADS, GROUPS = Axis("N"), Axis("G")
INDEPENDENT = "B", "N", "G"
"""Letters of axes along which the results of an op are independent."""
Labels: TypeAlias = tuple[Axis | None, ...]
"""The axes of an array; None for axes of any meaning, which may not be split."""
Split: TypeAlias = Mapping[Axis, tuple[str, ...]]
"""Axes of arrays, and the mesh axes that split them."""
Forms: TypeAlias = "tuple[str | tuple[Forms | str, ...], ...]"
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
    rows = PartitionSpec(*jax.typeof(example).sharding.spec[:batch])
    return jax.reshard(x, _sharding(mesh, rows))


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

    Devices communicate only in the backward pass, to sum gradients of arguments that they share.

    Raises:
      ValueError: an axis other than batch axes and heads is split, arguments are split differently,
        or the devices do not divide the key/value heads.
    """

    @wraps(op)
    def call(*args: Any, **keywords: Any) -> Any:
        mesh, rules = explicit_mesh((args, keywords)), rules_in_use()
        free = current_mesh()
        if mesh is None and (rules is None or free is None or free.manual_axes):
            return op(*args, **keywords)
        arguments = inspect.signature(op).bind(*args, **keywords).arguments
        forms = forms_of(op)
        first = next(iter(arguments))
        letters = next(x for x in forms[first] if isinstance(x, str)).split()
        batch = arguments[first].ndim - len(letters) + letters.count("*B")
        labels = {name: labels_of(x, forms[name], batch) for name, x in arguments.items()}
        arrays = {name: x for name, x in arguments.items() if _has_arrays(x)}
        static = tuple((name, Static(x)) for name, x in arguments.items() if name not in arrays)
        if any(forms[name] and (None in axes) for name in arrays for axes in labels[name]):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
            constants = {name: x.value for name, x in static}
            jax.eval_shape(partial(op, **constants), **shapes)  # raises if a shape does not fit
        sizes = _sizes(arrays, labels)
        if mesh is not None:
            split = _split_by_types(mesh, arrays, labels, sizes)
        else:
            assert rules is not None
            assert free is not None
            mesh, split = free, _split_by_rules(free, rules, sizes)
        specs = tuple(_spec(axes, split) for name in sorted(arrays) for axes in labels[name])
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
        self.is_constant = isinstance(value, Hashable) and (
            is_dataclass(value) or not callable(value)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        return (type(self.value), self.value) == (type(other.value), other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


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
    axes = frozenset(mesh.explicit_axes or mesh.auto_axes)

    def on_device(*leaves: Array) -> PyTree:
        constants = {name: x.value for name, x in call.static}
        own = [any(spec) for spec in call.specs]  # differs between devices
        leaves = tuple(
            varying_like(x, leaves) if y else x for x, y in zip(leaves, own, strict=True)
        )
        result = call.op(**jax.tree.unflatten(structure, leaves), **constants)
        if out_specs is None:
            return result
        return jax.tree.map(partial(_equal_on_devices, axes), result, out_specs)

    if mesh.manual_axes:  # JAX does not lower residuals of a `shard_map` inside another one
        on_device = jax.checkpoint(on_device)

    def over(out_specs: PyTree, check_vma: bool = True) -> Callable[..., PyTree]:
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=call.specs,
            out_specs=out_specs,
            axis_names=axes,
            check_vma=check_vma,
        )

    forms, split = forms_of(call.op)["return"], dict(call.split)
    states = inspect.signature(call.op).parameters.get("return_state")
    if states is not None and not dict(call.static).get("return_state", Static(False)).value:
        forms = forms[:1]
    if len(forms) == 1 and isinstance(form := forms[0], str):
        axes_of_result = _named(form, len(form.split()) - 1 + call.batch, call.batch)
        assert axes_of_result is not None
        out_specs = _spec(tuple(axis for axis, _ in axes_of_result), split)
    else:
        result = jax.eval_shape(over(PartitionSpec(), check_vma=False), *leaves)
        specs = [_spec(axes, split) for axes in labels_of(result, forms, call.batch)]
        out_specs = jax.tree.unflatten(jax.tree.structure(result), specs)
    return over(out_specs)(*leaves)


_run = jax.jit(_apply, static_argnums=0)


def _equal_on_devices(axes: frozenset[str], x: Array, spec: PartitionSpec) -> Array:
    """x, equal on devices of these mesh axes that do not split it: a state of a key/value head that
    they share."""
    split = {name for names in spec if names for name in names}
    free = jax.typeof(x).manual_axis_type.varying & axes - split
    if not free or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return lax.pmean(x, tuple(sorted(free)))


def _has_arrays(x: Any) -> bool:
    return any(isinstance(leaf, Array) for leaf in jax.tree.leaves(x))


def _sizes(arrays: Mapping[str, PyTree], labels: Mapping[str, list[Labels]]) -> dict[Axis, int]:
    return {
        axis: size
        for name, tree in arrays.items()
        for x, axes in zip(jax.tree.leaves(tree), labels[name], strict=True)
        for axis, size in zip(axes, np.shape(x), strict=True)
        if axis is not None
    }


def _split_by_types(
    mesh: AbstractMesh,
    arrays: Mapping[str, PyTree],
    labels: Mapping[str, list[Labels]],
    sizes: Mapping[Axis, int],
) -> Split:
    """The mesh axes that split each axis of the arguments, by the types of these."""
    split: dict[Axis, tuple[str, ...]] = {}
    for name, tree in arrays.items():
        for x, axes in zip(jax.tree.leaves(tree), labels[name], strict=True):
            for index, (axis, names) in enumerate(zip(axes, split_axes(x), strict=True)):
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
    for axis in (HEADS, GROUPS):
        if sizes.get(axis, 1) > 1 and sizes[axis] % devices:
            raise ValueError(
                f"the {devices} devices of {', '.join(heads)} do not divide {sizes[axis]} "
                "key/value heads; repeat the heads, or split query heads over fewer devices"
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


def split_axes(x: Array) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of an array, by its type."""
    spec = jax.typeof(x).sharding.spec
    return [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in spec]


def _spec(labels: Labels, split: Split) -> PartitionSpec:
    return PartitionSpec(*(axis and split.get(axis) for axis in labels))


def labels_of(tree: PyTree, forms: Forms, batch: int) -> list[Labels]:
    """The axes of each leaf of an argument or result."""
    if tree is None:
        return []
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        pairs = zip(tree, _members(forms, len(tree)), strict=True)
        return [x for y, form in pairs for x in labels_of(y, form, batch)]
    if is_dataclass(tree) or isinstance(tree, tuple):
        hints = forms_of(type(tree))
        return [
            x
            for name in _dynamic_fields(tree)
            for x in labels_of(getattr(tree, name), hints[name], batch)
        ]
    return [_labels_of_array(x, forms, batch) for x in jax.tree.leaves(tree)]


def _members(forms: Forms, count: int) -> Sequence[Forms]:
    """The annotation of each member of a tuple."""
    for form in forms:
        if isinstance(form, tuple) and form[1:] == ("...",):
            return [cast(Forms, form[0])] * count
        if isinstance(form, tuple) and len(form) == count:
            return cast("tuple[Forms, ...]", form)
    return [()] * count


def _dynamic_fields(tree: Any) -> Sequence[str]:
    """The names of the fields of a state, or of a named tuple, that hold arrays."""
    if is_dataclass(tree):
        return [x.name for x in fields(tree) if not x.metadata.get("static", False)]
    return tree._fields


def _labels_of_array(x: Any, forms: Forms, batch: int) -> Labels:
    """The axes of one array: of the first form that has as many."""
    shape = np.shape(x)
    for form in forms:
        if isinstance(form, str) and (axes := _named(form, len(shape), batch)) is not None:
            return tuple(
                None if broadcasts and size == 1 else axis
                for (axis, broadcasts), size in zip(axes, shape, strict=True)
            )
    return (None,) * len(shape)


def _named(form: str, ndim: int, batch: int) -> list[tuple[Axis, bool]] | None:
    """The axes in an annotation, and whether they broadcast; None if their number is not ndim."""
    axes: list[tuple[Axis, bool]] = []
    letters = form.split()
    for letter in letters:
        broadcasts = "#" in letter
        if letter.strip("#*") == "B":
            count = ndim - len(letters) + 1 if broadcasts else batch
            axes += [(Axis("B", batch - count + i), broadcasts) for i in range(count)]
        else:
            axes.append((Axis(letter.strip("#")), broadcasts))
    return axes if len(axes) == ndim else None


@cache
def forms_of(annotated: Callable | type) -> dict[str, Forms]:
    return {name: forms_in(hint) for name, hint in type_hints(annotated).items()}


def forms_in(hint: Any) -> Forms:
    if get_origin(hint) in (Union, UnionType):
        return tuple(dict.fromkeys(x for part in get_args(hint) for x in forms_in(part)))
    if get_origin(hint) is tuple:
        return (tuple("..." if part is ... else forms_in(part) for part in get_args(hint)),)
    return (hint.dim_str,) if hasattr(hint, "dim_str") else ()
