"""Shape letters, types of arrays and pytrees, and decorators for checked functions, configurations
and states.

Public arrays are laid out as in `jax.nn.dot_product_attention`, with any leading axes:

    *B    batch axes, any number of them (also none)
    T     query tokens; S: key and value tokens (equal to T where attention is causal)
    N     query heads (`num_heads`)
    G     key/value heads (`num_kv_heads`), a divisor of N
    K     head dimension of queries and keys (`key_depth`)
    V     head dimension of values (`value_depth`)
    D     model width (`model_dim`)

Inside the ops, batch axes and key/value heads are folded into one leading axis and tokens are moved
next to their features, so that every contraction is one batched matrix product:

    B     prod(*B), until key/value heads are folded in too
    X     prod(*B) * G
    R     N // G, the query heads that share one key/value head
    C     tokens in a chunk; J: chunks

A chunk is a number of consecutive tokens whose weights are computed together. A block is a number
of consecutive chunks that are processed in parallel; blocks are processed one after the other.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from beartype import beartype
from jax.export import register_namedtuple_serialization, register_pytree_node_serialization
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import (
    Bool,
    Complex,
    Float,
    Inexact,
    Int,
    Integer,
    Key,
    PyTree,
    Shaped,
    jaxtyped,
)

__all__ = [
    "JSON",
    "Array",
    "ArrayLike",
    "Bool",
    "Complex",
    "DTypeLike",
    "Decay",
    "Features",
    "Float",
    "Inexact",
    "Int",
    "Integer",
    "Key",
    "Keys",
    "Lengths",
    "Mixed",
    "PyTree",
    "Query",
    "Segments",
    "Shaped",
    "Values",
    "common_dtype",
    "config_dataclass",
    "exported_tuple",
    "pytree_dataclass",
    "typed",
    "wide",
]

if TYPE_CHECKING:
    JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
    from jax import Array
else:
    Array = jax.Array | np.ndarray  # NumPy arrays are accepted like JAX arrays
    # beartype does not resolve recursive aliases
    JSON = Mapping | Sequence | str | int | float | bool | None
"""A value of a JSON file."""

Features: TypeAlias = Float[Array, "*B T D"]
Query: TypeAlias = Float[Array, "*B T N K"]
Keys: TypeAlias = Float[Array, "*B S G K"]
Values: TypeAlias = Float[Array, "*B S G V"]
Mixed: TypeAlias = Float[Array, "*B T N V"]
"""Averages of values, one per query."""
Segments: TypeAlias = Integer[Array, "*B S"]
Lengths: TypeAlias = Integer[Array, "*B"] | Integer[Array, "*B 2"]
"""Number of valid tokens of each sequence; or the first one and the one past the last."""
Decay: TypeAlias = Float[Array, "*B S G"] | Float[Array, "*B S G K"]

F = TypeVar("F", bound=Callable)
T = TypeVar("T")


def common_dtype(*given: ArrayLike | DTypeLike) -> np.dtype:
    """The dtype of sums of arrays, or of dtypes, by JAX's standard promotion, also where
    `jax_numpy_dtype_promotion` is "strict"."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)


def wide(*given: ArrayLike | DTypeLike) -> np.dtype:
    """The common dtype, or float32 if that is wider."""
    return common_dtype(common_dtype(*given), jnp.float32)


def typed(function: F) -> F:
    """Check a function's array shapes and dtypes at each call (under `jit`, when traced)."""
    return jaxtyped(typechecker=beartype)(function)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config_dataclass(cls: type[T]) -> type[T]:
    """Make a configuration class: keyword-only fields, checked types and ranges, no unknown
    fields."""
    config = pydantic.ConfigDict(extra="forbid")
    made = pydantic.dataclasses.dataclass(cls, config=config, frozen=True, kw_only=True)
    return cast("type[T]", made)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that is a pytree; fields with `metadata={"static": True}` are not
    leaves.

    Unlike with `jax.tree_util.register_dataclass`, JAX rebuilds instances without calling
    `__init__`: leaves may then be shardings, shapes or axes instead of arrays, and are not checked.

    Functions of `jax.export` with such arguments or results can be serialized if the static fields
    are JSON; import the module of the class before reading them.
    """
    made = dataclass(frozen=True)(cls)
    assert is_dataclass(made)
    static = [x.name for x in fields(made) if x.metadata.get("static", False)]
    dynamic = [x.name for x in fields(made) if x.name not in static]
    keys = [jax.tree_util.GetAttrKey(name) for name in dynamic]

    def flatten(instance: T) -> tuple[list[PyTree], tuple[Hashable, ...]]:
        leaves = [getattr(instance, name) for name in dynamic]
        return leaves, tuple(getattr(instance, name) for name in static)

    def flatten_with_keys(
        instance: T,
    ) -> tuple[list[tuple[Hashable, PyTree]], tuple[Hashable, ...]]:
        leaves, constants = flatten(instance)
        return list(zip(keys, leaves, strict=True)), constants

    def unflatten(constants: tuple[Hashable, ...], leaves: Iterable[PyTree]) -> T:
        instance = object.__new__(cls)
        for name, value in zip((*dynamic, *static), (*leaves, *constants), strict=True):
            object.__setattr__(instance, name, value)
        return instance

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    with suppress(ValueError):  # after a reload of its module, the first class is kept
        register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=lambda constants: json.dumps(constants).encode(),
            deserialize_auxdata=lambda constants: tuple(json.loads(constants)),
        )
    return cls


def exported_tuple(cls: type[T]) -> type[T]:
    """Let `jax.export` serialize functions with this named tuple among arguments or results."""
    with suppress(ValueError):
        name = f"{cls.__module__}.{cls.__qualname__}"
        register_namedtuple_serialization(cls, serialized_name=name)
    return cls
