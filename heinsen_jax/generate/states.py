"""States of the model as values: repeated for many samples, for rows of different lengths, and in
files."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jax import lax

from heinsen_jax.attention.base import AttentionConfig
from heinsen_jax.attention.cache import Cache
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel, LanguageModelConfig, LanguageModelState
from heinsen_jax.models.blocks import BlockState
from heinsen_jax.models.language_model import split_and_join, unstacked
from heinsen_jax.models.position import PositionState
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.weights import load_hashed, save_hashed
from heinsen_jax.typing import Array, Bool, Features, Float, Integer, PyTree

POSITION_AXIS, BLOCKS_AXIS = 0, 1
"""First batch axis of the parts of a state: states of blocks have a leading axis of layers."""

Tree = TypeVar("Tree")
Rows: TypeAlias = Integer[Array, "B"]
Shapes: TypeAlias = dict[str, tuple[list[pydantic.NonNegativeInt], str]]
Read: TypeAlias = Callable[[Array, LanguageModelState], tuple[Array, LanguageModelState]]


def repeat_state(
    model: LanguageModel, state: LanguageModelState, number: int
) -> LanguageModelState:
    """Repeat the state of sequences `[*B]` for `number` continuations each: `[*B, number]`.

    So a prompt is processed once for any number of continuations.
    """
    batch = _batch_axes(model, state)

    def one(axis: int, x: Array, has_rows: bool) -> Array:
        return _with_axis(x, axis + batch, number) if has_rows else x

    return _by_part(one, state, _have_rows(model, state))


def to_rows(model: LanguageModel, state: LanguageModelState, rows: int) -> LanguageModelState:
    """The state of sequences `[rows]`, with a row for each, also of numbers that all share."""

    def one(axis: int, x: Array, has_rows: bool) -> Array:
        return x if has_rows else _with_axis(x, axis, rows)

    return _by_part(one, state, _have_rows(model, state))


def has_independent_rows(model: LanguageModel, state: LanguageModelState) -> bool:
    """Whether every array of a state has a row for each sequence; none is shared by all."""
    return all(jax.tree.leaves(_have_rows(model, state)))


def init_rows(
    model: LanguageModel, number: int, capacity: int, state: LanguageModelState | None = None
) -> tuple[LanguageModelState, bool]:
    """The state of one sequence, or the empty one, for `number` sequences with at most `capacity`
    further tokens; and whether rows are independent, for `make_advance`."""
    if state is None:
        state = model.init_state(())
    check_one(model, state)
    state = repeat_state(model, model.ensure_capacity(state, capacity), number)
    independent_rows = has_independent_rows(model, state)
    return (state if independent_rows else to_rows(model, state, number)), independent_rows


def check_one(model: LanguageModel, state: LanguageModelState) -> None:
    """Raise UserError if a state is of a batch of sequences."""
    if _batch_axes(model, state):
        raise UserError(
            "state: has a batch axis; pass the state of one sequence, as returned by "
            "model(tokens[T], return_state=True)"
        )


def where_rows(
    chosen: Bool[Array, "B"], state: LanguageModelState, other: LanguageModelState
) -> LanguageModelState:
    """Select rows `[B]` of `state` where chosen, else of the other state."""

    def one(axis: int, x: Array, y: Array) -> Array:
        shape = [1] * x.ndim
        shape[axis] = len(chosen)
        return jnp.where(chosen.reshape(shape), x, y)

    return _by_part(one, state, other)


def select_rows(state: LanguageModelState, rows: Rows) -> LanguageModelState:
    """Select rows of the state of sequences `[B]`, possibly repeated."""
    return _by_part(lambda axis, x: jnp.take(x, rows, axis), state)


def make_advance(
    graph: nnx.GraphDef[LanguageModel], parameters: nnx.State, independent_rows: bool
) -> Read:
    """Return a function that advances a state by tokens `[*B, T]`; unless rows are independent, a
    state of `to_rows`.

    Call it outside a loop over tokens, since it unstacks the weights of the layers.
    """
    weights = unstacked(parameters)

    def read(
        tokens: Integer[Array, "*B T"], state: LanguageModelState
    ) -> tuple[Features, LanguageModelState]:
        model = nnx.merge(graph, weights(tokens.shape[-1]))
        features, after = model.features(tokens, state=state, return_state=True)
        assert after is not None
        return features, after

    def read_row(
        tokens: Integer[Array, "T"], position: PositionState, blocks: tuple[BlockState, ...]
    ) -> tuple[Float[Array, "T D"], PositionState, tuple[BlockState, ...]]:
        features, after = read(tokens, LanguageModelState(position, blocks))
        return features, after.position, after.blocks

    def read_rows(
        tokens: Integer[Array, "B T"], state: LanguageModelState
    ) -> tuple[Float[Array, "B T D"], LanguageModelState]:
        axes = 0, POSITION_AXIS, BLOCKS_AXIS
        by_row = jax.vmap(read_row, in_axes=axes, out_axes=axes)
        features, position, blocks = by_row(tokens, state.position, state.blocks)
        return features, LanguageModelState(position, blocks)

    return read if independent_rows else read_rows


def loop_with_state(
    count: int | Integer[Array, ""],
    step: Callable[[Integer[Array, ""], LanguageModelState, Tree], tuple[LanguageModelState, Tree]],
    state: LanguageModelState,
    rest: Tree,
    *,
    length: int = 1,
) -> tuple[LanguageModelState, Tree]:
    """`lax.fori_loop` of step(index, state, rest), of `length` tokens per step. In steps of one
    token, the states of the layers are carried one by one: a stack would be copied in each."""
    split, join = split_and_join(len(jax.tree.leaves(state.blocks)[0]), length)

    def body(index: Integer[Array, ""], carry: PyTree) -> PyTree:
        position, layers, rest = carry
        state, rest = step(index, LanguageModelState(position, join(layers)), rest)
        return state.position, split(state.blocks), rest

    carry = state.position, split(state.blocks), rest
    position, layers, rest = lax.fori_loop(0, count, body, carry)
    return LanguageModelState(position, join(layers)), rest


def _with_axis(x: Array, axis: int, size: int) -> Array:
    """Repeat x `size` times along a new axis."""
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))


def _by_part(
    function: Callable[..., Array], state: LanguageModelState, *others: LanguageModelState
) -> LanguageModelState:
    """Map function(batch axis, leaf, ...) over all leaves."""
    states = state, *others
    return LanguageModelState(
        jax.tree.map(partial(function, POSITION_AXIS), *(x.position for x in states)),
        jax.tree.map(partial(function, BLOCKS_AXIS), *(x.blocks for x in states)),
    )


def _shapes(
    model: LanguageModel, batch_shape: Sequence[int], state: LanguageModelState
) -> LanguageModelState:
    """Shapes of a state like this one with another batch shape."""
    has_capacity = any(x.length is not None for x in _caches(state))
    capacity = 1 if has_capacity else None
    return jax.eval_shape(lambda: model.init_state(batch_shape, capacity=capacity))


def _caches(state: LanguageModelState) -> list[Cache]:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Cache))
    return [x for x in nodes if isinstance(x, Cache)]


def smallest_capacity(state: LanguageModelState) -> int | None:
    """Smallest capacity, in tokens, of the caches of a state with a fixed shape; None without."""
    sizes = [cache.capacity for cache in _caches(state) if cache.length is not None]
    return min(sizes, default=None)


def _have_rows(model: LanguageModel, state: LanguageModelState) -> LanguageModelState:
    alone, one = (_shapes(model, batch, state) for batch in ((), (1,)))
    return jax.tree.map(lambda x, y: x.ndim < y.ndim, alone, one)


def _batch_axes(model: LanguageModel, state: LanguageModelState) -> int:
    """Number of batch axes of a state."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(_shapes(model, (), state)), strict=True)
    return max(x.ndim - alone.ndim for x, alone in pairs)


def save_state(path: str | Path, model: LanguageModel, state: LanguageModelState) -> None:
    """Write a state as .safetensors, with a fingerprint of its model.

    Raises:
      UserError: the file cannot be written.
    """
    arrays = {name: np.asarray(x) for name, x in flatten_with_names(state).items()}
    arrays = {name: x for name, x in arrays.items() if x.size}  # empty arrays cannot be saved
    real = {name: _real(np.ascontiguousarray(x)) for name, x in arrays.items()}
    metadata = {"model": fingerprint(model), "shapes": json.dumps(_described(state))}
    metadata["format"] = FORMAT
    try:
        save_hashed(path, real, metadata)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error}); give a file in a folder that exists"
        ) from None


def load_state(path: str | Path, model: LanguageModel) -> LanguageModelState:
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
    if (found := metadata.get("format", "1")) != FORMAT:
        raise UserError(
            f"{path}: has format {found} of states, not {FORMAT}: another version of heinsen_jax "
            "wrote it, so process the text again"
        )
    try:
        shapes = pydantic.TypeAdapter(Shapes).validate_json(metadata["shapes"])
        has_capacity = any(name.endswith(".length") for name in shapes)
        like, one, many = (
            jax.eval_shape(partial(model.init_state, (), capacity=capacity))
            for capacity in (1 if has_capacity else None, 1, 1 << 20)
        )
        if shapes.keys() != flatten_with_names(like).keys():
            raise ValueError("other arrays than the states of this model")
        axes = [POSITION_AXIS for _ in jax.tree.leaves(like.position)]
        axes += [BLOCKS_AXIS for _ in jax.tree.leaves(like.blocks)]
        of_one, of_many = flatten_with_names(one), flatten_with_names(many)
        batches, leaves = set(), []
        for (name, x), axis in zip(flatten_with_names(like).items(), axes, strict=True):
            shape, dtype = shapes[name]
            grows = [a != b for a, b in zip(of_one[name].shape, of_many[name].shape, strict=True)]
            batches.add(_batch(shape, x.shape, grows, axis))
            leaves.append(_leaf(arrays.get(name), shape, dtype, x.dtype))
        if len(batches - {()}) > 1:
            raise ValueError(f"batch sizes {sorted(batches)} in one state")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is not a valid state ({error!r}): process the text again"
        ) from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _batch(
    shape: Sequence[int], like: Sequence[int], grows: Sequence[bool], axis: int
) -> tuple[int, ...]:
    """The batch axes, from `axis` on, of an array whose other axes have the sizes of `like`, or any
    size if they grow with the capacity; ValueError otherwise."""
    end = len(shape) - len(like) + axis
    rest = [*shape[:axis], *shape[end:]]
    if end < axis or any(n != m and not may for n, m, may in zip(rest, like, grows, strict=True)):
        raise ValueError(f"{[*shape]} in place of {[*like]}")
    return tuple(shape[axis:end])


def _leaf(x: np.ndarray | None, shape: list[int], dtype: str, wanted: np.dtype) -> Array:
    """Restore an array to its shape and dtype; ValueError if it does not match them."""
    x = np.zeros(0, dtype) if x is None else x
    x = x.view(dtype) if dtype.startswith("complex") else x
    if {dtype, str(x.dtype)} != {str(wanted)}:
        raise ValueError(f"{x.dtype} in place of {wanted}")
    return jnp.asarray(x.reshape(shape))


def _real(x: np.ndarray) -> np.ndarray:
    """Complex numbers as pairs of real ones, since the format has no complex dtypes."""
    return x.view(np.finfo(x.dtype).dtype).reshape(*x.shape, 2) if np.iscomplexobj(x) else x


def _described(state: LanguageModelState) -> Shapes:
    return {name: ([*x.shape], str(x.dtype)) for name, x in flatten_with_names(state).items()}


FORMAT = "2"
"""Version of the layout of states in files."""
ADDED_FIELDS = {"norm_epsilon", "parallel_branches", "output_bias", "lora_rank"}
ADDED_FIELDS |= {"rotary_base", "rotary_fraction", "rotary_factor"}
ADDED_FIELDS |= {"rotary_original_length", "rotary_low_turns", "rotary_high_turns"}
"""Fields that are newer than the format of states: at their defaults they leave fingerprints
unchanged."""


def fingerprint(model: LanguageModel) -> str:
    """SHA-256 of the architecture and the weights of a model, which determine its states."""
    config = _fields(model.config)
    for name in ("remat", "remat_policy", "trained_length"):
        del config[name]
    layers = zip(model.config.layer_pattern, model.config.mechanisms(), strict=True)
    config["attention"] = [(name, _fields(options)) for name, options in layers]
    for _, options in config["attention"]:
        options.pop("implementation", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, x in sorted(flatten_with_names(nnx.state(model, nnx.Param)).items()):
        digest.update(name.encode())
        digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


def _fields(config: LanguageModelConfig | AttentionConfig) -> dict[str, Any]:
    """The fields of a configuration as plain values, without `ADDED_FIELDS` at their defaults."""
    fields = dataclasses.asdict(config)
    defaults = {x.name: x.default for x in dataclasses.fields(config) if x.name in ADDED_FIELDS}
    return {k: v for k, v in fields.items() if k not in defaults or v != defaults[k]}
