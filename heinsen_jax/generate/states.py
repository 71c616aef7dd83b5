"""States of the model as values: repeated for many samples, for rows of different lengths, and in
files."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax.core import Tracer

from heinsen_jax.attention.base import AttentionConfig
from heinsen_jax.attention.cache import Cache, is_cache
from heinsen_jax.attention.registry import ParallelConfig
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig, LanguageModelState
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.weights import load_hashed, save_hashed
from heinsen_jax.typing import Array, Bool, Integer, PyTree

Tree = TypeVar("Tree")


@runtime_checkable
class Model(Protocol):
    """A `LanguageModel` or an `Engine`."""

    config: LanguageModelConfig

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LanguageModelState: ...

    def parameters(self) -> Iterator[tuple[str, list[Array]]]: ...


def repeat_state(model: Model, state: LanguageModelState, number: int) -> LanguageModelState:
    """Repeat the state of sequences `[*B]` for `number` continuations each: `[*B, number]`.

    So a prompt is processed once for any number of continuations.
    """
    batch = len(batch_shape_of(model, state))

    def one(x: Array, is_shared: bool) -> Array:
        shape = *x.shape[:batch], number, *x.shape[batch:]
        return x if is_shared else jnp.broadcast_to(jnp.expand_dims(x, batch), shape)

    repeated = jax.tree.map(one, state, _shared(model, state))
    return dataclasses.replace(repeated, by_row=state.by_row + (state.by_row > 0))


def with_independent_rows(
    model: Model, state: LanguageModelState, batch_shape: Sequence[int]
) -> LanguageModelState:
    """The state of sequences `batch_shape`, with an entry for each also of numbers that all
    share."""
    shared = _shared(model, state)
    if not any(jax.tree.leaves(shared)):
        return state

    def one(x: Array, is_shared: bool) -> Array:
        return jnp.broadcast_to(x, (*batch_shape, *x.shape)) if is_shared else x

    return dataclasses.replace(jax.tree.map(one, state, shared), by_row=len(batch_shape))


def check_one(model: Model, state: LanguageModelState) -> None:
    """Raise UserError if a state belongs to a batch of sequences."""
    if batch_shape_of(model, state):
        raise UserError(
            "state: has a batch axis; pass the state of one sequence, as returned by "
            "model(tokens[T], return_state=True)"
        )


@jax.jit
def where_rows(chosen: Bool[Array, "B"], tree: Tree, other: Tree) -> Tree:
    """Select rows `[B]` of a tree where chosen, else of the other."""

    def one(x: Array, y: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(one, tree, other)


@jax.jit
def select_rows(tree: Tree, rows: Integer[Array, "B"]) -> Tree:
    """Select rows of a tree, such as the state of sequences `[B]`, possibly repeated."""
    return jax.tree.map(lambda x: jnp.take(x, rows, 0), tree)


def _shapes(
    model: Model, state: LanguageModelState, batch_shape: Sequence[int]
) -> LanguageModelState:
    """Shapes of a state like this one with another batch shape and capacity."""
    capacity = 1 if any(x.length is not None for x in caches(state)) else None

    def like() -> LanguageModelState:
        empty = model.init_state(batch_shape, capacity=capacity)
        return dataclasses.replace(empty, by_row=state.by_row)

    return jax.eval_shape(like)


def caches(state: LanguageModelState) -> list[Cache]:
    """The states of mechanisms that store every token, each with the same number of them."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_cache) if is_cache(x)]


def num_tokens(state: LanguageModelState) -> int:
    """Number of tokens so far in a state that stores every token; 0 for others and under `jit`."""
    counts = [x.capacity if x.length is None else x.length for x in caches(state)]
    return max((int(np.max(x)) for x in counts if not isinstance(x, Tracer)), default=0)


def _shared(model: Model, state: LanguageModelState) -> LanguageModelState:
    """Whether each array of a state is shared by all sequences."""
    alone, one = (_shapes(model, state, batch) for batch in ((), (1,)))
    return jax.tree.map(lambda x, y: not state.by_row and x.ndim == y.ndim, alone, one)


def batch_shape_of(model: Model, state: LanguageModelState) -> tuple[int, ...]:
    """The batch axes of a state."""
    alone = _shapes(model, state, ())
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True)
    return max((x.shape[: x.ndim - y.ndim] for x, y in pairs), key=len)


class _Contents(pydantic.BaseModel, extra="forbid"):
    """The record of a state in its file, from which the shapes of all arrays follow.

    Attributes:
      batch_shape: the batch axes.
      capacities: capacity of each cache, in tokens.
      is_growing: whether caches grow with each call.
      by_row: see `LanguageModelState`.
    """

    batch_shape: tuple[pydantic.NonNegativeInt, ...]
    capacities: tuple[pydantic.NonNegativeInt, ...]
    is_growing: bool
    by_row: pydantic.NonNegativeInt

    @classmethod
    def of(cls, model: Model, state: LanguageModelState) -> "_Contents":
        stored = caches(state)
        return cls(
            batch_shape=batch_shape_of(model, state),
            capacities=tuple(cache.capacity for cache in stored),
            is_growing=any(cache.length is None for cache in stored),
            by_row=state.by_row,
        )

    def init_state(self, model: Model) -> LanguageModelState:
        """An empty state with these shapes."""
        capacity = None if self.is_growing else min(self.capacities, default=None)
        state = model.init_state(self.batch_shape, capacity=capacity)
        capacities = iter(self.capacities)

        def grown(node: PyTree) -> PyTree:
            if not is_cache(node):
                return node
            cache: Any = node.with_capacity(next(capacities))
            return cache if node.length is not None else dataclasses.replace(cache, length=None)

        state = jax.tree.map(grown, state, is_leaf=is_cache)
        if len(axes := self.batch_shape[: self.by_row]) < self.by_row:
            raise ValueError(f"by_row={self.by_row} with {len(axes)} batch axes")
        return with_independent_rows(model, state, axes) if axes else state


def save_state(path: str | Path, model: Model, state: LanguageModelState) -> None:
    """Write a state as .safetensors, with a fingerprint of its model.

    Raises:
      UserError: the file cannot be written.
    """
    named = flatten_with_names(state).items()
    arrays = {name: np.asarray(x, order="C") for name, x in named}
    arrays = {name: x for name, x in arrays.items() if x.size}  # empty arrays cannot be saved
    real = {name: _real(x) for name, x in arrays.items()}
    contents = _Contents.of(model, state).model_dump_json()
    metadata = {"model": fingerprint(model), "contents": contents, "format": FORMAT}
    try:
        save_hashed(path, real, metadata)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error}); give a file in a folder that exists"
        ) from None


def load_state(path: str | Path, model: Model) -> LanguageModelState:
    """Read a state that `save_state` wrote.

    Raises:
      UserError: the file is damaged, or is a state of another model.
    """
    arrays, metadata = load_hashed(path, "give the file of a state, or read the text again")
    if metadata.get("model") != fingerprint(model):
        raise UserError(
            f"{path}: saved by another model or with other weights; only the same model can use a "
            "state, so process the text again"
        )
    if (version := metadata.get("format", "1")) != FORMAT:
        raise UserError(
            f"{path}: has format {version} of states, not {FORMAT}: another version of heinsen_jax "
            "wrote it, so process the text again"
        )
    try:
        contents = _Contents.model_validate_json(metadata["contents"])
        like = jax.eval_shape(lambda: contents.init_state(model))
        shapes = flatten_with_names(like)
        if unknown := arrays.keys() - shapes.keys():
            raise ValueError(f"{min(unknown)} is no array of this model's states")
        leaves = [_leaf(arrays.get(name), shape) for name, shape in shapes.items()]
    except (ValueError, TypeError, LookupError, StopIteration, RuntimeError) as error:
        raise UserError(
            f"{path} is not a valid state ({error!r}): process the text again"
        ) from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaf(x: np.ndarray | None, like: jax.ShapeDtypeStruct) -> Array:
    """An array of a file, which leaves out empty ones.

    Raises:
      ValueError: it has another shape or dtype.
    """
    x = np.zeros(0, like.dtype).reshape(like.shape) if x is None else x
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        x = np.ascontiguousarray(x).view(like.dtype).reshape(like.shape)
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{x.dtype}{[*x.shape]} in place of {like.dtype}{[*like.shape]}")
    return jnp.asarray(x)


def _real(x: np.ndarray) -> np.ndarray:
    """Complex numbers as pairs of real ones, since the format has no complex dtypes."""
    return x.view(np.finfo(x.dtype).dtype).reshape(*x.shape, 2) if np.iscomplexobj(x) else x


FORMAT = "3"
"""Version of the layout of states in files."""
ADDED_FIELDS = {"norm_epsilon", "parallel_branches", "output_bias", "lora_rank"}
ADDED_FIELDS |= {"num_key_heads", "num_value_heads", "scale", "output_gate"}
ADDED_FIELDS |= {"zero_centered_norm", "logit_divisor", "convolution_bias"}
ADDED_FIELDS |= {"gate_activation", "decay_lower_bound"}
ADDED_FIELDS |= {"embedding_multiplier", "residual_multiplier", "output_multiplier"}
ADDED_FIELDS |= {"mlp_multiplier", "mlp_gate_multiplier", "output_norm"}
ADDED_FIELDS |= {f"{name}_multiplier" for name in ("query", "key", "value", "gate", "step")}
ADDED_FIELDS |= {"rotary_base", "rotary_fraction", "rotary_factor"}
ADDED_FIELDS |= {"rotary_original_length", "rotary_low_turns", "rotary_high_turns"}
ADDED_FIELDS |= {"rotary_interpolation", "num_sinks"}
"""Fields that are newer than the format of states: at their defaults they leave fingerprints
unchanged."""


def fingerprint(model: Model) -> str:
    """SHA-256 of the architecture and the weights of a model, which determine its states."""
    config = _fields(model.config)
    for name in ("remat", "remat_policy", "trained_length"):
        del config[name]
    layers = zip(model.config.layers, model.config.mechanisms(), strict=True)
    config["attention"] = [
        (
            x.mechanism,
            _fields(options)
            | ({"norm_after": x.norm_after} if x.norm_after else {})
            | ({} if x.has_mlp else {"has_mlp": False}),
        )
        for x, options in layers
    ]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, parts in sorted(model.parameters()):
        digest.update(name.encode())
        for x in parts:
            digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


def _fields(config: LanguageModelConfig | AttentionConfig) -> dict[str, Any]:
    """The fields of a configuration that determine states as plain values, without `ADDED_FIELDS`
    at their defaults."""
    if isinstance(config, ParallelConfig):
        return {name: _fields(part) for name, part in config.parts.items()}
    fields = dataclasses.asdict(config)
    fields.pop("implementation", None)
    defaults = {x.name: x.default for x in dataclasses.fields(config) if x.name in ADDED_FIELDS}
    return {k: v for k, v in fields.items() if k not in defaults or v != defaults[k]}
