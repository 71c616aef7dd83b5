"""A model by layer: its weights, and the functions that are compiled for them.

Layers of equal structure share one compiled function, so that a prompt compiles a layer once, and a
step of one token has the function once in its program.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.models.blocks import BlockState
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.typing import Array, Bool, Features, Float, Integer, PyTree

SCORE_BLOCK = 16
"""Number of positions whose logits are in memory together."""

Leaves: TypeAlias = tuple[Array, ...]
Tokens: TypeAlias = Integer[Array | np.ndarray, "*B T"]
Logits: TypeAlias = Float[Array, "*B V"]


class Weights(NamedTuple):
    """Weights of a model.

    Attributes:
      outer: all but the layers'.
      layers: each layer's.
    """

    outer: Leaves
    layers: tuple[Leaves, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """The structure of a module: one object per structure, so that functions compiled for it are
    found without comparing graphs."""

    graph: nnx.GraphDef
    tree: Any

    def with_leaves(self, leaves: Leaves) -> Any:
        """The module with these weights."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))

    def named(self, leaves: Leaves) -> dict[str, Array]:
        """The parameters by name."""
        state = jax.tree.unflatten(self.tree, leaves)
        return flatten_with_names(nnx.filter_state(state, nnx.Param))


@cache
def _part(graph: nnx.GraphDef, tree: Any) -> Part:
    return Part(graph, tree)


class Structure(NamedTuple):
    """The structure of a model: its parts before and after the layers, and each layer."""

    outer: Part
    layers: tuple[Part, ...]


def by_layer(model: LanguageModel) -> tuple[Structure, Weights]:
    """The structure of a model, and its weights, a stack of layers as separate layers."""
    outer = nnx.merge(*nnx.split(model))
    outer.blocks = nnx.List([])
    part, leaves = _split(outer)
    pattern = [_split(block) for block in model.blocks]
    repeats = model.config.num_layers // len(pattern)
    by_repeat = zip(*(_unstacked(stack, repeats) for _, stack in pattern), strict=True)
    weights = Weights(_on_device(leaves), tuple(chain.from_iterable(by_repeat)))
    return Structure(part, tuple(part for part, _ in pattern) * repeats), weights


def _split(module: nnx.Module) -> tuple[Part, Leaves]:
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return _part(graph, tree), tuple(leaves)


def _on_device(leaves: Leaves) -> Leaves:
    """Leaves that are on the host, on the default device."""
    return tuple(jax.device_put(x) if isinstance(x, np.ndarray) else x for x in leaves)


def _unstacked(stack: Leaves, repeats: int) -> list[Leaves]:
    """The weights of each layer."""
    if any(isinstance(x, np.ndarray) for x in stack):  # one by one, so that stacks stay on the host
        return [_on_device(tuple(x[repeat] for x in stack)) for repeat in range(repeats)]
    return [*_unstacked_on_device(stack, repeats)]


@partial(jax.jit, static_argnums=1)
def _unstacked_on_device(stack: Leaves, repeats: int) -> tuple[Leaves, ...]:
    return tuple(tuple(map(itemgetter(repeat), stack)) for repeat in range(repeats))


def advance(
    structure: Structure, weights: Weights, tokens: Tokens, state: LanguageModelState
) -> tuple[Features, LanguageModelState]:
    """The output of the last block for tokens `[*B, T]`, and the state after them.

    Each layer is one call of a compiled function, which layers of equal structure share.
    """
    x, position = _embedded(structure.outer, state.by_row, weights.outer, tokens, state.position)
    blocks = []
    for part, leaves, before in zip(structure.layers, weights.layers, state.blocks, strict=True):
        x, after = compiled_block(part, state.by_row, leaves, x, before)
        blocks.append(after)
    return x, replace(state, position=position, blocks=tuple(blocks))


@partial(jax.jit, static_argnums=(0, 1))
def _embedded(
    part: Part, by_row: int, leaves: Leaves, tokens: Tokens, state: PyTree
) -> tuple[Features, PyTree]:
    def one(tokens: Tokens, state: PyTree) -> tuple[Features, PyTree]:
        return part.with_leaves(leaves).embedded(tokens, state=state)

    return _by_row(one, by_row)(tokens, state)


@partial(jax.jit, static_argnums=(0, 1))
def compiled_block(
    part: Part, by_row: int, leaves: Leaves, x: Features, state: BlockState
) -> tuple[Features, BlockState]:
    def one(x: Features, state: BlockState) -> tuple[Features, BlockState]:
        return part.with_leaves(leaves)(x, state=state, return_state=True)

    return _layer_by_layer(_by_row(one, by_row), leaves, x, state)


def _layer_by_layer(function: Callable, leaves: Leaves, x: Features, *others: PyTree) -> Any:
    """Call a function of x and others whose weights are `leaves`; for one token on a CPU, convert
    weights in bfloat16 to float32 one layer at a time.

    CPUs have products of float32 only, and XLA would convert the weights of all layers before the
    first product. It compiles the branches of a condition separately; the other one is for weights
    of NaN.
    """
    small = next((w for w in leaves if w.dtype == jnp.bfloat16 and w.size), None)
    if small is None or x.ndim < 2 or x.shape[-2] != 1 or jax.default_backend() != "cpu":
        return function(x, *others)

    def unknown(*arguments: PyTree) -> Any:
        def fill(y: jax.ShapeDtypeStruct) -> Array:
            value = jnp.nan if jnp.issubdtype(y.dtype, jnp.inexact) else 0
            return jnp.full(y.shape, value, y.dtype)

        return jax.tree.map(fill, jax.eval_shape(function, *arguments))

    first = small.ravel()[0]
    return lax.cond(first == first, function, unknown, x, *others)


def _by_row(function: Callable, by_row: int) -> Callable:
    """Map a function over that many batch axes."""
    return function if by_row == 0 else jax.vmap(_by_row(function, by_row - 1))


@partial(jax.jit, static_argnums=0)
def read_out(part: Part, leaves: Leaves, x: Features) -> Float[Array, "*B T V"]:
    """Logits of the output of the last block."""
    outer = part.with_leaves(leaves)
    return _layer_by_layer(lambda x: outer.readout(outer.normed(x)), leaves, x)


@partial(jax.jit, static_argnums=0)
def step(
    structure: Structure,
    weights: Weights,
    tokens: Integer[Array, "*B"],
    state: LanguageModelState,
) -> tuple[Logits, LanguageModelState]:
    """The logits after one token of each sequence, and the state after it."""
    x, state = advance(structure, weights, tokens[..., None], state)
    return read_out(structure.outer, weights.outer, x)[..., 0, :], state


@partial(jax.jit, static_argnums=(0, 1))
def score(
    part: Part, num_tokens: int | None, leaves: Leaves, x: Features, targets: Tokens
) -> tuple[Float[Array, "*B T"], Bool[Array, "*B T"]]:
    def one(position: tuple[Array, Array]) -> tuple[Array, Array]:
        x, targets = position
        logits = read_out(part, leaves, x)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return log_p, jnp.argmax(logits[..., :num_tokens], -1) == targets

    by_position = jnp.moveaxis(x, -2, 0), jnp.moveaxis(targets, -1, 0)
    log_p, is_likeliest = jax.lax.map(one, by_position, batch_size=SCORE_BLOCK)
    return jnp.moveaxis(log_p, 0, -1), jnp.moveaxis(is_likeliest, 0, -1)
