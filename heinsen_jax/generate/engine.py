"""A model that is ready to generate, with states as values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from heinsen_jax.attention.cache import bucket, is_cache
from heinsen_jax.data import Tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import states
from heinsen_jax.generate.compiled import Logits, Tokens, advance, by_layer, read_out, score, step
from heinsen_jax.generate.prompts import checked_lengths
from heinsen_jax.models import LanguageModel, LanguageModelConfig, LanguageModelState
from heinsen_jax.models.blocks import Block
from heinsen_jax.models.language_model import check_tokens
from heinsen_jax.typing import Array, ArrayLike, Bool, Float, Integer, PyTree

CHUNKS = tuple(2**power for power in range(9, -1, -1))
"""Numbers of tokens of a prompt that are processed together: 512 as often as they fit, then each
other size at most once, so that few programs serve prompts of all lengths."""


class Engine:
    """A model and its tokenizer, to generate with: the state of a sequence is an argument and a
    result, so that it may be kept, continued several times, and saved.

    Weights of layers are unstacked copies, since loops over tokens would copy slices of a stack in
    each step; delete the model if memory is scarce. Under `jit`, create the engine inside the
    function.

    Args:
      model: a causal language model.
      tokenizer: its tokenizer, for commands and chat.

    Raises:
      UserError: the model is not causal.

    Examples:
      >>> from flax import nnx
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
        self.structure, self.weights = by_layer(model)

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
        """The state at the start of a sequence, as in `LanguageModel.init_state`."""
        blocks = (block.init_state(batch_shape, capacity=capacity) for block in self._blocks)
        return LanguageModelState(self._outer.position.init_state(batch_shape), tuple(blocks))

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
            padding on the right may be any ids of the vocabulary.

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
        if state is not None:
            self._check_batch(state, batch)
        before = self.reserve(before, int(np.max(ends, initial=0)))
        if lengths is not None:
            before = states.with_independent_rows(self, before, batch)
        last = jnp.zeros((*batch, 1, self.config.model_dim), self.config.dtype)
        done = np.zeros_like(ends)
        sizes = (length,) if is_traced and lengths is None else CHUNKS
        for size in sizes:
            while np.any(is_fed := ends - done >= max(size, 1)):
                chunk = _chunk(tokens, done, size)
                last, before = self._advance(chunk, before, last, is_fed)
                done = np.asarray(done + size * is_fed)
        return read_out(self.structure.outer, self.weights.outer, last)[..., 0, :], before

    def _check_batch(self, state: LanguageModelState, batch: Sequence[int]) -> None:
        """Raise UserError unless a state has the batch axes of the tokens."""
        if (axes := states.batch_shape_of(self, state)) != tuple(batch):
            raise UserError(
                f"state: its batch axes {[*axes]} differ from {[*batch]} of the tokens; make them "
                "equal, such as by Engine.branch"
            )

    @contextlib.contextmanager
    def _explaining(self, state: LanguageModelState, batch: Sequence[int]) -> Iterator[None]:
        """Context manager that names other batch axes of the state as the reason of an error; a
        check before each token would cost time."""
        try:
            yield
        except (ValueError, TypeError):
            self._check_batch(state, batch)
            raise

    def _advance(
        self,
        chunk: Tokens,
        state: LanguageModelState,
        last: Float[Array, "*B 1 D"],
        is_fed: np.ndarray | np.bool,
    ) -> tuple[Float[Array, "*B 1 D"], LanguageModelState]:
        """The last features after a chunk, and the state after it, of the rows that are fed."""
        x, after = advance(self.structure, self.weights, chunk, state)
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
        with self._explaining(state, tokens.shape):
            return step(self.structure, self.weights, tokens, self.reserve(state, 1))

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
        with self._explaining(state, tokens.shape[:-1]):
            state = self.reserve(state, tokens.shape[-1])
            x, state = advance(self.structure, self.weights, tokens, state)
        options = self.structure.outer, num_tokens, self.weights.outer
        return *score(*options, x, targets), state

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
        """Yield each parameter's name and its arrays, one per layer."""
        structure, weights = self.structure, self.weights
        outer = structure.outer.named(weights.outer)
        yield from ((name, [x]) for name, x in outer.items())
        layers = [x.named(y) for x, y in zip(structure.layers, weights.layers, strict=True)]
        size = len(self.config.layer_pattern)
        for index in range(size):
            for name in layers[index]:
                yield f"blocks.{index}.{name}", [layer[name] for layer in layers[index::size]]

    @cached_property
    def _outer(self) -> LanguageModel:
        return self.structure.outer.with_leaves(self.weights.outer)

    @cached_property
    def _blocks(self) -> list[Block]:
        pairs = zip(self.structure.layers, self.weights.layers, strict=True)
        return [part.with_leaves(leaves) for part, leaves in pairs]


def _chunk(tokens: Tokens, done: np.ndarray, size: int) -> Integer[Array | np.ndarray, "*B size"]:
    """`size` tokens of each row after those that are done, for all rows or for each `[B]`."""
    if not done.ndim:
        return tokens[..., int(done) : int(done) + size]
    places = np.minimum(done[:, None] + np.arange(size), tokens.shape[-1] - 1)
    return tokens[np.arange(len(done))[:, None], places]
