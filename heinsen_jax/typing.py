"""The legend of shape letters, and decorators: one checks them, one makes configurations.

Public arrays are laid out as in `jax.nn.dot_product_attention`, with any leading axes:

    *B    batch axes, any number of them (also none)
    T     query tokens; S: key and value tokens (equal to T where attention is causal)
    N     query heads (`num_heads`)
    G     key/value heads (`num_kv_heads`), a divisor of N
    K     key depth: features of one query or key head
    V     value depth: features of one value head
    D     model width (`model_dim`)

Inside the ops the batch and key/value heads are folded into one leading axis and the tokens moved
next to their features, so that every contraction is one batched matrix product:

    B     prod(*B), until key/value heads are folded in too
    X     prod(*B) * G
    R     N // G, the query heads that share one key/value head
    C     tokens in a chunk; J: chunks
"""

from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import pydantic
from beartype import beartype
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Complex, Float, Inexact, Int, Integer, Shaped, jaxtyped

__all__ = [
    "Array",
    "Bool",
    "Complex",
    "DTypeLike",
    "Float",
    "Inexact",
    "Int",
    "Integer",
    "Shaped",
    "config_dataclass",
    "typed",
]

F = TypeVar("F", bound=Callable)
T = TypeVar("T")


def typed(function: F) -> F:
    """Checks a function's array shapes and types when it is called (under `jit`: when traced)."""
    return jaxtyped(typechecker=beartype)(function)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config_dataclass(cls: type[T]) -> type[T]:
    """A configuration: fields by keyword, their types and ranges checked, others refused."""
    decorate: Any = pydantic.dataclasses.dataclass(
        config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
    )
    return decorate(cls)
