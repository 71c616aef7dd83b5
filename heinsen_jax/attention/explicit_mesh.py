"""Layers on meshes with explicit axes.

The sharding of an array on such a mesh is part of its type. Types of parameters and tokens say how
the user splits a model; inside a layer the axes are Auto, and activations are laid out likewise.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from heinsen_jax.ops.devices import (
    Axes,
    Axis,
    Static,
    annotations_of,
    arrays_and_constants,
    explicit_mesh,
    leaf_axes,
    split_axes,
)
from heinsen_jax.sharding import batch_names, use_rules
from heinsen_jax.typing import Array, PyTree

F = TypeVar("F", bound=Callable)


def with_auto_axes(
    num_features: int, check: Callable[[Any, Array], None] | None = None
) -> Callable[[F], F]:
    """Decorate a layer's method of tokens `[*B, T, ...]`: explicit axes of a mesh are Auto in it.

    The shardings of the tokens and of the parameters say which mesh axes split sequences, tokens,
    heads, ...; activations are laid out accordingly, and so are the results.

    Args:
      num_features: number of axes of the tokens after T.
      check: called with the layer and the tokens before the call is traced.
    """

    def decorate(method: F) -> F:
        signature = inspect.signature(method)
        names = [*signature.parameters][:2]  # the layer and its tokens

        @wraps(method)
        def call(*args: Any, **keywords: Any) -> Any:
            mesh = explicit_mesh((args, keywords))
            if mesh is None:
                return method(*args, **keywords)
            arguments = signature.bind(*args, **keywords).arguments
            layer, tokens = (arguments.pop(name) for name in names)
            if check is not None:
                check(layer, tokens)
            graph, parameters = nnx.split(layer)
            arrays, static = arrays_and_constants(arguments)
            batch = tokens.ndim - 1 - num_features
            constants = _Call(method, graph, static, mesh, batch, _rules(parameters, tokens, batch))
            return _run(constants, parameters, tokens, arrays)

        return cast(F, call)

    return decorate


@dataclass(frozen=True)
class _Call:
    """A call, without the arrays."""

    method: Callable
    graph: nnx.GraphDef
    static: tuple[tuple[str, Static], ...]
    mesh: AbstractMesh
    batch: int
    rules: tuple[tuple[str, tuple[str, ...]], ...]


@partial(jax.jit, static_argnums=0)
def _run(call: _Call, parameters: nnx.State, tokens: Array, arrays: dict[str, PyTree]) -> PyTree:
    options, rules = {name: x.value for name, x in call.static}, dict(call.rules)

    @jax.jit  # the second trace is then the first one
    def apply(parameters: nnx.State, tokens: Array, arrays: dict[str, PyTree]) -> PyTree:
        with use_rules(rules):
            return call.method(nnx.merge(call.graph, parameters), tokens, **arrays, **options)

    def sharding_of(x: jax.ShapeDtypeStruct, axes: Axes) -> NamedSharding:
        rows = tokens.shape[: call.batch]
        if not any(axes) and x.shape[: call.batch] == rows:  # a state without annotations
            axes = (*(Axis("B", index) for index in range(call.batch)), *axes[call.batch :])
        split = tuple(rules.get(_logical(axis), ()) if axis else () for axis in axes)
        devices = (math.prod(call.mesh.shape[name] for name in names) for names in split)
        fitting = zip(x.shape, split, devices, strict=True)
        names = (names if size % count == 0 else () for size, names, count in fitting)
        return NamedSharding(call.mesh, PartitionSpec(*(x or None for x in names)))

    def over(out_sharding: PyTree) -> Callable[..., PyTree]:
        axes = call.mesh.explicit_axes
        return jax.sharding.auto_axes(apply, axes=axes, out_sharding=out_sharding)

    replicated = NamedSharding(call.mesh, PartitionSpec())
    inputs = parameters, tokens, arrays
    result = jax.eval_shape(over(replicated), *inputs)
    axes = leaf_axes(result, annotations_of(call.method)["return"], call.batch)
    leaves, structure = jax.tree.flatten(result)
    out = map(sharding_of, leaves, axes)
    return over(jax.tree.unflatten(structure, out))(*inputs)


def _logical(axis: Axis) -> str:
    """The name in rules of an axis of a result."""
    if axis.letter == "B":
        return batch_names(axis.index + 1)[-1]
    names = {"T": "tokens", "N": "heads", "G": "heads", "vocab_size": "vocab", "D": "features"}
    return names.get(axis.letter, "")


def _rules(
    parameters: nnx.State, tokens: Array, batch: int
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The mesh axes that split each logical axis, by the types of parameters and tokens."""
    rules: dict[str, tuple[str, ...]] = {}
    for variable in jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        axes = variable.get_metadata().get("logical_axes", ())
        split = split_axes(variable.get_value())
        rules |= dict(zip(axes, split[len(split) - len(axes) :], strict=True))  # not a stack's axis
    names = *batch_names(batch), "tokens", "features"
    rules |= dict(zip(names, split_axes(tokens), strict=False))
    used = {axis for name in names for axis in rules.get(name, ())}  # activations have each once
    for name in ("heads", "mlp", "vocab"):
        rules[name] = tuple(axis for axis in rules.get(name, ()) if axis not in used)
    return tuple((name, axes) for name, axes in rules.items() if axes)
