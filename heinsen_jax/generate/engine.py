"""A model that is ready to generate: weights by layer, and states as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from heinsen_jax.attention.cache import bucket, is_cache
from heinsen_jax.data import Tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import states
from heinsen_jax.generate.prompts import checked_lengths
from heinsen_jax.models import LanguageModel, LanguageModelConfig, LanguageModelState
from heinsen_jax.models.blocks import BlockState
from heinsen_jax.models.language_model import check_tokens
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.typing import Array, ArrayLike, Bool, Features, Float, Integer, PyTree

CHUNKS = tuple(2**power for power in range(9, -1, -1))
"""Numbers of tokens of a prompt that are processed together: 512 as often as they fit, then each
other size at most once, so that few programs serve prompts of all lengths."""
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
        return nnx.merge(self.graph, self.state(leaves))

    def state(self, leaves: Leaves) -> nnx.State:
        """The weights by name."""
        return jax.tree.unflatten(self.tree, leaves)


@cache
def _part(graph: nnx.GraphDef, tree: Any) -> Part:
    return Part(graph, tree)


class Program(NamedTuple):
    """The structure of a model: its parts before and after the layers, and each layer."""

    outer: Part
    layers: tuple[Part, ...]


class Engine:
    """A model and its tokenizer, to generate with: the state of a sequence is an argument and a
    result, so that it may be kept, continued several times, and saved.

    The weights of the layers, which are stacked in a `LanguageModel`, are here one by one, since
    loops over tokens would copy parts of a stack in each step. They are copies, so drop the model
    where memory is scarce. Under `jit`, create the engine inside the function.

    Args:
      model: a causal language model.
      tokenizer: its tokenizer, for commands and chat.

    Raises:
      UserError: the model is not causal.

    Examples:
      >>> from heinsen_jax.models import LanguageModel, LanguageModelConfig
      >>> sizes = {"vocab_size": 10, "model_dim": 8, "num_layers": 2, "num_heads": 2}
      >>> engine = Engine(LanguageModel(LanguageModelConfig(**sizes), rngs=nnx.Rngs(0)))
      >>> logits, state = engine.feed([3, 1, 4])
      >>> states = engine.branch(state, 4)  # four continuations of the same three tokens
      >>> logits, states = engine.step(jnp.array([1, 5, 9, 2]), states)
      >>> logits.shape
      (4, 10)
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer | None = None):
        if not model.config.is_causal:
            raise UserError(
                "model.is_causal=False: the model predicts masked tokens and cannot generate; "
                "choose a causal model"
            )
        self.config: LanguageModelConfig = model.config
        self._tokenizer = tokenizer
        outer = nnx.merge(*nnx.split(model))
        outer.blocks = nnx.List([])
        part, leaves = _split(outer)
        pattern = [_split(block) for block in model.blocks]
        repeats = model.config.num_layers // len(pattern)
        stacks = [leaves for _, leaves in pattern]
        by_repeat = zip(*(_unstacked(stack, repeats) for stack in stacks), strict=True)
        self.weights = Weights(_on_device(leaves), tuple(chain.from_iterable(by_repeat)))
        self.program = Program(part, tuple(part for part, _ in pattern) * repeats)

    @classmethod
    def of(cls, model: LanguageModel | Engine) -> Engine:
        """The model's engine."""
        return model if isinstance(model, Engine) else cls(model)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, if given."""
        if self._tokenizer is None:
            raise ValueError("the engine has no tokenizer; create Engine(model, tokenizer)")
        return self._tokenizer

    def init_state(
        self, batch_shape: Sequence[int] = (), *, capacity: int | None = None
    ) -> LanguageModelState:
        """The state at the start of a sequence, as of `LanguageModel.init_state`."""
        pairs = zip(self.program.layers, self.weights.layers, strict=True)
        blocks = [part.with_leaves(leaves) for part, leaves in pairs]
        return LanguageModelState(
            self._outer.position.init_state(batch_shape),
            tuple(block.init_state(batch_shape, capacity=capacity) for block in blocks),
        )

    def remaining(self, state: LanguageModelState) -> float:
        """Maximum number of further tokens of a sequence; may be infinite."""
        return self._outer.position.remaining(state.position)

    def reserve(self, state: LanguageModelState, num_tokens: int) -> LanguageModelState:
        """The state, with space for at least `num_tokens` further tokens in mechanisms that store
        every token. Capacities have few values, since functions are compiled for each. Under `jit`
        the capacity of a given state is fixed, so call this before, for all tokens of a loop.

        Raises:
          UserError: the model has fewer positions; or, under `jit`, the state a smaller capacity.
        """
        if num_tokens > (left := self.remaining(state)):
            raise UserError(
                f"{num_tokens} more tokens, but the model has {left} positions left "
                f"(model.max_length={self.config.max_length}); request fewer, or give a shorter "
                "prompt"
            )

        caches = states.caches(state)
        if not caches:
            return state
        if isinstance(length := caches[0].length, Tracer):
            if num_tokens > (capacity := min(cache.capacity for cache in caches)):
                raise UserError(
                    f"state: its capacity of {capacity} tokens is less than {num_tokens}, and "
                    "cannot grow under jit; call Engine.reserve before"
                )
            return state
        needed = (caches[0].capacity if length is None else int(jnp.max(length))) + num_tokens

        def grown(node: PyTree) -> PyTree:
            if not is_cache(node) or (node.length is not None and needed <= node.capacity):
                return node
            return node.with_capacity(bucket(needed))

        blocks = jax.tree.map(grown, state.blocks, is_leaf=is_cache)
        return replace(state, blocks=blocks)

    def feed(
        self,
        tokens: ArrayLike | Sequence[int],
        state: LanguageModelState | None = None,
        *,
        lengths: ArrayLike | Sequence[int] | None = None,
    ) -> tuple[Logits, LanguageModelState]:
        """Process prompts.

        Args:
          tokens: ids `[*B, T]`.
          state: the state before them; None at the start of a sequence.
          lengths: number of tokens of each row of `[B, T]`, in 0 .. T, if some have fewer than T;
            padding on the right may be any ids.

        Returns:
          logits: of the next token, `[*B, V]`; arbitrary for rows without tokens.
          state: the state after the tokens.

        Raises:
          UserError: the model has too few positions; lengths are invalid; or the state has other
            batch axes than the tokens.
          ValueError: tokens are not integers, or an id is not in the vocabulary.
        """
        arrays = jax.tree.leaves((tokens, state, self.weights.outer))
        is_traced = any(isinstance(x, Tracer) for x in arrays)
        tokens = jnp.asarray(tokens) if is_traced else np.asarray(tokens)
        if not tokens.ndim:
            raise UserError("tokens: a single number; give ids [*B, T]")
        tokens = tokens if tokens.size else tokens.astype(np.int32)
        check_tokens(tokens, self.config.vocab_size)
        batch, length = tokens.shape[:-1], tokens.shape[-1]
        if lengths is not None:
            lengths = checked_lengths(tokens, lengths, least=0)
        ends = np.asarray(length if lengths is None else lengths)
        before = self.init_state(batch) if state is None else state
        if state is not None and (axes := states.batch_shape_of(self, state)) != batch:
            raise UserError(
                f"state: its batch axes {[*axes]} differ from {[*batch]} of the tokens; make them "
                "equal, such as by Engine.branch"
            )
        before = self.reserve(before, int(np.max(ends, initial=0)))
        if lengths is not None:
            before = states.with_independent_rows(self, before, batch[0])
        last = jnp.zeros((*batch, 1, self.config.model_dim), self.config.dtype)
        done = np.zeros_like(ends)
        sizes = (length,) if is_traced and lengths is None else CHUNKS
        for size in sizes:
            while np.any(is_fed := ends - done >= max(size, 1)):
                chunk = _chunk(tokens, done, size)
                last, before = self._advance(chunk, before, last, is_fed)
                done = np.asarray(done + size * is_fed)
        return read_out(self.program.outer, self.weights.outer, last)[..., 0, :], before

    def _advance(
        self,
        chunk: Tokens,
        state: LanguageModelState,
        last: Float[Array, "*B 1 D"],
        is_fed: np.ndarray | np.bool,
    ) -> tuple[Float[Array, "*B 1 D"], LanguageModelState]:
        """The last features after a chunk, and the state after it, of the rows that are fed."""
        x, after = advance(self.program, self.weights, chunk, state)
        new = x[..., -1:, :], after
        if np.all(is_fed):
            return new
        return states.where_rows(jnp.asarray(is_fed), new, (last, state))

    def step(
        self, tokens: ArrayLike | Sequence[int], state: LanguageModelState
    ) -> tuple[Logits, LanguageModelState]:
        """Process one token of each sequence, `[*B]`: as `feed`, but one compiled function. In a
        loop under `jit`, call `reserve` before the loop."""
        tokens = jnp.asarray(tokens)
        check_tokens(tokens, self.config.vocab_size)
        return step(self.program, self.weights, tokens, self.reserve(state, 1))

    def score(
        self,
        tokens: Tokens,
        targets: Tokens,
        state: LanguageModelState,
        *,
        num_tokens: int | None = None,
    ) -> tuple[Float[Array, "*B T"], Bool[Array, "*B T"], LanguageModelState]:
        """Score the token that follows each token.

        Args:
          tokens: ids `[*B, T]`.
          targets: the ids that follow, `[*B, T]`.
          state: the state before the tokens.
          num_tokens: only ids below this may be the likeliest; all when None.

        Returns:
          log_p: the log probability of each target among all ids, `[*B, T]`.
          is_likeliest: whether it has the largest logit.
          state: the state after the tokens.
        """
        for ids in (tokens, targets):
            check_tokens(ids, self.config.vocab_size)
        state = self.reserve(state, tokens.shape[-1])
        x, state = advance(self.program, self.weights, tokens, state)
        options = self.program.outer, num_tokens, self.weights.outer
        return *_score(*options, x, targets), state

    def branch(self, state: LanguageModelState, number: int) -> LanguageModelState:
        """The state of sequences `[*B]`, for `number` continuations of each, `[*B, number]`."""
        return states.repeat_state(self, state, number)

    def save(self, path: str | Path, state: LanguageModelState) -> None:
        """Write a state to a file, for `load`, as `save_state`."""
        states.save_state(path, self, state)

    def load(self, path: str | Path) -> LanguageModelState:
        """Read a state that `save` or `save_state` wrote, as `load_state`."""
        return states.load_state(path, self)

    def parameters(self) -> Iterator[tuple[str, list[Array]]]:
        """The names of the model's parameters, and each one's layers."""
        program, weights = self.program, self.weights
        size = len(self.config.layer_pattern)
        yield from ((name, [x]) for name, x in _named(program.outer, weights.outer).items())
        layers = [*map(_named, program.layers, weights.layers)]
        for index in range(size):
            for name in layers[index]:
                yield f"blocks.{index}.{name}", [layer[name] for layer in layers[index::size]]

    @cached_property
    def _outer(self) -> LanguageModel:
        return self.program.outer.with_leaves(self.weights.outer)


def _split(module: nnx.Module) -> tuple[Part, Leaves]:
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return _part(graph, tree), tuple(leaves)


def _named(part: Part, leaves: Leaves) -> dict[str, Array]:
    return flatten_with_names(nnx.filter_state(part.state(leaves), nnx.Param))


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


def _chunk(tokens: Tokens, done: np.ndarray, size: int) -> Integer[Array | np.ndarray, "*B size"]:
    """`size` tokens of each row after those that are done, for all rows or for each `[B]`."""
    if not done.ndim:
        return tokens[..., int(done) : int(done) + size]
    places = np.minimum(done[:, None] + np.arange(size), tokens.shape[-1] - 1)
    return tokens[np.arange(len(done))[:, None], places]


def advance(
    program: Program, weights: Weights, tokens: Tokens, state: LanguageModelState
) -> tuple[Features, LanguageModelState]:
    """The output of the last block for tokens `[*B, T]`, and the state after them.

    Each layer is one call of a compiled function, which layers of equal structure share.
    """
    x, position = _embedded(program.outer, state.by_row, weights.outer, tokens, state.position)
    blocks = []
    for part, leaves, before in zip(program.layers, weights.layers, state.blocks, strict=True):
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

    return _by_row(one, by_row)(x, state)


def _by_row(function: Callable, by_row: int) -> Callable:
    """Map a function over that many batch axes."""
    return function if by_row == 0 else jax.vmap(_by_row(function, by_row - 1))


@partial(jax.jit, static_argnums=0)
def read_out(part: Part, leaves: Leaves, x: Features) -> Float[Array, "*B T V"]:
    """Logits of the output of the last block."""
    outer = part.with_leaves(leaves)
    return outer.readout(outer.normed(x))


@partial(jax.jit, static_argnums=0)
def step(
    program: Program,
    weights: Weights,
    tokens: Integer[Array, "*B"],
    state: LanguageModelState,
) -> tuple[Logits, LanguageModelState]:
    """The logits after one token of each sequence, and the state after it."""
    x, state = advance(program, weights, tokens[..., None], state)
    return read_out(program.outer, weights.outer, x)[..., 0, :], state


@partial(jax.jit, static_argnums=(0, 1))
def _score(
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
