"""The language model of Heinsen (2024), with any attention mechanism, and of other blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Literal, TypeAlias, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from heinsen_jax.attention.base import num_bytes
from heinsen_jax.attention.cache import check_capacity, is_cache
from heinsen_jax.attention.explicit_mesh import with_auto_axes
from heinsen_jax.attention.parameters import NORMS, LayerOptions, parameter, uniform
from heinsen_jax.models.blocks import Block, BlockState
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.position import (
    LearnedPositions,
    NoPositions,
    PositionRecurrence,
    PositionState,
)
from heinsen_jax.models.readout import Readout
from heinsen_jax.ops.arguments import check_array
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.sharding import constrain, rules_in_use
from heinsen_jax.typing import (
    Array,
    Features,
    Float,
    Integer,
    PyTree,
    Shaped,
    pytree_dataclass,
    wide,
)

States: TypeAlias = tuple[BlockState | None, ...]


@pytree_dataclass
class LanguageModelState:
    """State of the model, of constant size if the states of its mechanisms are.

    Attributes:
      position: state of the position encoding: the last output h `[*B, D]` of the recurrence, the
        number of tokens so far for learned positions, or empty without a position encoding.
      blocks: one `BlockState` per layer.
      by_row: number of batch axes of numbers that the sequences of a batch usually share, such as
        the length of a cache: 1 after prompts of different lengths. `generate` continues such a
        state.
    """

    position: PositionState
    blocks: tuple[BlockState, ...]
    by_row: int = field(default=0, metadata={"static": True})


MAX_UNROLLED = 32
"""Repeats of the layer pattern that are unrolled for a single token, which takes longer to
compile."""


@partial(jax.jit, static_argnums=(0, 1))
def _initialized(
    kind: type[LanguageModel], config: LanguageModelConfig
) -> tuple[nnx.GraphDef[LanguageModel], nnx.State]:
    """The graph and the weights of a new model. `abstract` needs their shapes alone."""
    return nnx.split(kind(config, rngs=nnx.Rngs(0)))


def _check_vocabulary(model: LanguageModel, tokens: Shaped[Array | np.ndarray, "*_"]) -> None:
    check_tokens(tokens, model.config.vocab_size)


class LanguageModel(nnx.Module):
    """Language model with any attention mechanism, or a pattern of several.

        logits = norm(blocks(position(E[tokens]))) E^T                embedding_style="paper"
        logits = (blocks(position(E[tokens])) E^T + b) / sqrt(D)      embedding_style="fastformer"

    E `[vocab_size, D]` is the embedding, b a bias, and D is model_dim. Without tied embeddings, the
    second E has weights of its own.

    The layer pattern is scanned, so compile time does not depend on the number of its repeats. For
    a single token, up to `MAX_UNROLLED` repeats are unrolled, since a loop would copy their weights
    and states at every step. The state is an argument and a result: a sequence may be fed in
    chunks of any lengths; the logits are the same as in a single call.

    Args:
      config: the architecture.
      rngs: the source of the initial weights.

    Examples:
      >>> config = LanguageModelConfig(vocab_size=8, model_dim=8, num_layers=1, num_heads=2)
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> logits, state = model(jnp.array([1, 2, 3]), return_state=True)
      >>> model(jnp.array([4]), state=state).shape  # continues the sequence
      (1, 8)

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = _embedding(config, rngs)
        options: LayerOptions = {
            "dtype": config.dtype,
            "param_dtype": config.param_dtype,
            "rngs": rngs,
        }
        self.position = _positions(config, **options)
        if config.embedding_style == "paper":
            norm = NORMS[config.norm_kind]
            self.norm = norm(config.model_dim, epsilon=config.norm_epsilon, **options)
        else:
            self.bias = parameter(
                nnx.initializers.zeros, config.vocab_size, kind="vector", **options
            )

        def stack(index: int) -> Block:
            def one(rngs: nnx.Rngs) -> Block:
                return Block(config, index, **{**options, "rngs": rngs})

            split = nnx.split_rngs(splits=config.num_layers // len(config.layer_pattern))
            return split(nnx.vmap(one))(rngs)

        self.blocks = nnx.List([stack(index) for index in range(len(config.layer_pattern))])
        if not config.tie_embeddings:
            self.unembed = _embedding(config, rngs)

    @classmethod
    def abstract(cls, config: LanguageModelConfig) -> LanguageModel:
        """The model with shapes and dtypes in place of weights, traced once for equal arguments."""
        return nnx.merge(*_initialized.eval_shape(cls, config))

    @overload
    def __call__(
        self,
        tokens: Integer[Array | np.ndarray, "*B T"],
        *,
        segment_ids: Integer[Array | np.ndarray, "*B T"] | None = None,
        state: LanguageModelState | None = None,
        return_state: Literal[False] = False,
    ) -> Float[Array, "*B T vocab_size"]: ...

    @overload
    def __call__(
        self,
        tokens: Integer[Array | np.ndarray, "*B T"],
        *,
        segment_ids: Integer[Array | np.ndarray, "*B T"] | None = None,
        state: LanguageModelState | None = None,
        return_state: Literal[True],
    ) -> tuple[Float[Array, "*B T vocab_size"], LanguageModelState]: ...

    @with_auto_axes(num_features=0, check=_check_vocabulary)
    def __call__(
        self,
        tokens: Integer[Array | np.ndarray, "*B T"],
        *,
        segment_ids: Integer[Array | np.ndarray, "*B T"] | None = None,
        state: LanguageModelState | None = None,
        return_state: bool = False,
    ) -> (
        Float[Array, "*B T vocab_size"]
        | tuple[Float[Array, "*B T vocab_size"], LanguageModelState | None]
    ):
        """Logits of every next token; of every token itself if the model is bidirectional.

        Args:
          tokens: ids `[*B, T]` of integers below vocab_size.
          segment_ids: `[*B, T]`, the segment of each token. A segment, a run of equal ids that do
            not recur, has the same logits as alone. With a state, which few mechanisms support, the
            first segment continues from it, and the returned state belongs to the last one.
          state: state after the previous tokens; None at the start of a sequence.
          return_state: whether to return the state after the T tokens, too.

        Returns:
          logits `[*B, T, vocab_size]`, at least float32, or the pair (logits, state).

        Raises:
          ValueError: outside `jit`, if a token id is not in the vocabulary.
          NotImplementedError: segments are given, and a mechanism does not support them, or not
            with a state.
        """
        features, after = self.features(
            tokens, segment_ids=segment_ids, state=state, return_state=return_state
        )
        with jax.named_scope("logits"):
            logits = self.readout(features)
        return (logits, after) if return_state else logits

    @with_auto_axes(num_features=0, check=_check_vocabulary)
    def features(
        self,
        tokens: Integer[Array | np.ndarray, "*B T"],
        *,
        segment_ids: Integer[Array | np.ndarray, "*B T"] | None = None,
        state: LanguageModelState | None = None,
        return_state: bool = False,
    ) -> tuple[Features, LanguageModelState | None]:
        """The input of `readout`, `[*B, T, model_dim]`, and the state after the tokens, None unless
        requested; arguments as for `__call__`."""
        check_tokens(tokens, self.config.vocab_size)
        if state is not None and state.by_row:
            raise NotImplementedError(
                "state: its rows have different numbers of tokens; continue it by "
                "heinsen_jax.generate, or each row by itself"
            )
        if segment_ids is not None:
            segment_ids = jnp.asarray(segment_ids)
            check_array("segment_ids", segment_ids, (tokens.shape,), jnp.integer)
            if return_state and self.config.position_kind == "learned":
                raise NotImplementedError(
                    "LearnedPositions: segment_ids is unsupported with a state, which has one "
                    "length for all sequences; pass whole segments without a state"
                )
        for cache in jax.tree.leaves(state, is_leaf=is_cache):
            if is_cache(cache) and cache.length is not None:
                check_capacity(cache.capacity, jnp.max(cache.length), tokens.shape[-1])
        if state is None and return_state:
            state = self.init_state(tokens.shape[:-1])
        x, position = self.embedded(tokens, segment_ids, None if state is None else state.position)
        graphs, parameters = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        layers = (None,) * self.config.num_layers if state is None else state.blocks
        size = len(graphs)
        states = tuple(layers[start : start + size] for start in range(0, len(layers), size))
        remat = self.config.remat_policy if self.config.remat else None
        rules = tuple((rules_in_use() or {}).items())
        options = graphs, return_state, remat, rules
        x, after = _through(*options, x, parameters, states, segment_ids)
        blocks = tuple(chain.from_iterable(after))
        return self.normed(x), LanguageModelState(position, blocks) if return_state else None

    def embedded(
        self,
        tokens: Integer[Array | np.ndarray, "*B T"],
        segment_ids: Integer[Array, "*B T"] | None = None,
        state: PyTree = None,
    ) -> tuple[Features, PyTree]:
        """The input of the first block, `[*B, T, model_dim]`, and the state of the position
        encoding after the tokens."""
        before: PyTree = self.position.init_state(tokens.shape[:-1]) if state is None else state
        with jax.named_scope("position"):
            x = constrain(self.embed(jnp.asarray(tokens)), "tokens", None)
            x = x.astype(wide(x, self.config.dtype))
            if self.config.embedding_multiplier != 1:
                x = self.config.embedding_multiplier * x
            return self.position(x, state=before, segment_ids=segment_ids)

    def normed(self, x: Features) -> Features:
        """The input of `readout`, for the output of the last block."""
        return self.norm(x) if self.config.embedding_style == "paper" else x

    @property
    def readout(self) -> Readout:
        """The map from features to logits."""
        embed = self.embed if self.config.tie_embeddings else self.unembed
        embedding, cap, dtype = embed.embedding[...], self.config.logit_soft_cap, self.config.dtype
        scale = 1 / self.config.logit_divisor
        if self.config.embedding_style == "paper":
            return Readout(embedding, None, scale, dtype, cap)
        return Readout(embedding, self.bias[...], scale * self.config.model_dim**-0.5, dtype, cap)

    def parameters(self) -> Iterator[tuple[str, list[Array]]]:
        """The names of the parameters, each with one array: layers are a stack here, and separate
        arrays in `generate.Engine`."""
        for name, x in flatten_with_names(nnx.state(self, nnx.Param)).items():
            yield name, [x]

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LanguageModelState:
        """The state at the start of a sequence.

        Args:
          batch_shape: the leading axes.
          capacity: maximum number of tokens in states of mechanisms that store every token. Such a
            state then has a fixed shape. It grows with each call when None.
        """

        def layers(blocks: Block) -> list[BlockState]:
            graph, parameters = nnx.split(blocks)

            def one(parameters: nnx.State) -> BlockState:
                return nnx.merge(graph, parameters).init_state(batch_shape, capacity=capacity)

            stack = jax.vmap(one)(parameters)
            repeats = self.config.num_layers // len(self.blocks)
            return [jax.tree.map(itemgetter(repeat), stack) for repeat in range(repeats)]

        repeats = zip(*(layers(block) for block in self.blocks), strict=True)
        blocks = tuple(chain.from_iterable(repeats))
        return LanguageModelState(self.position.init_state(batch_shape), blocks)

    def state_size(self, context_length: int) -> int:
        """Bytes of state of one sequence after context_length tokens."""
        return num_bytes(jax.eval_shape(lambda: self.init_state((), capacity=context_length)))


def _embedding(config: LanguageModelConfig, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        config.vocab_size,
        config.model_dim,
        param_dtype=jnp.dtype(config.param_dtype),
        embedding_init=uniform(config.model_dim**-0.5),
        embedding_metadata={"logical_axes": ("vocab", "embed"), "kind": "embedding"},
        rngs=rngs,
    )


def _positions(
    config: LanguageModelConfig, **options: Unpack[LayerOptions]
) -> PositionRecurrence | LearnedPositions | NoPositions:
    if config.position_kind == "none":
        return NoPositions()
    if config.position_kind == "recurrence":
        return PositionRecurrence(config.model_dim, **options)
    assert config.max_length is not None
    has_norm = config.embedding_style == "fastformer"
    return LearnedPositions(config.max_length, config.model_dim, has_norm=has_norm, **options)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # outside another `jit`, compiled once
def _through(
    graphs: tuple[nnx.GraphDef[Block], ...],
    return_state: bool,
    remat: str | None,
    rules: tuple[tuple[str, tuple[str, ...]], ...],
    x: Features,
    parameters: tuple[nnx.State, ...],
    states: tuple[States, ...],
    segment_ids: Integer[Array, "*B T"] | None,
) -> tuple[Features, tuple[States, ...]]:
    """x after all blocks, and their states after it, by repeat of the pattern. The rules in use are
    an argument only as a part of the key of compiled functions."""
    del rules

    def apply_pattern(
        x: Features, layers: tuple[tuple[nnx.State, ...], States]
    ) -> tuple[Features, States]:
        after = []
        for graph, parameters, state in zip(graphs, *layers, strict=True):
            block = nnx.merge(graph, parameters)
            options = {"return_state": return_state, "segment_ids": segment_ids}
            x, state = block(x, state=state, **options)
            after.append(state)
        return x, tuple(after)

    if remat is not None:
        policy = getattr(jax.checkpoint_policies, remat)
        apply_pattern = jax.checkpoint(apply_pattern, prevent_cse=False, policy=policy)
    if x.shape[-2] == 1 and len(states) <= MAX_UNROLLED:
        after, apply = [], jax.jit(apply_pattern)  # one function in the program for all repeats
        for repeat, before in enumerate(states):
            x, one = apply(x, (jax.tree.map(itemgetter(repeat), parameters), before))
            after.append(one)
        return x, tuple(after)
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *states)
    x, stacked = lax.scan(apply_pattern, x, (parameters, stacked))
    return x, tuple(jax.tree.map(itemgetter(repeat), stacked) for repeat in range(len(states)))


def check_tokens(tokens: Shaped[Array | np.ndarray, "*_"], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary: an embedding lookup returns NaN for large ids, and another
    row for negative ones."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    if isinstance(tokens, Tracer) or tokens.size == 0:
        return
    with jax.ensure_compile_time_eval():  # the tokens may be a constant of a compiled function
        low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}"
        )
