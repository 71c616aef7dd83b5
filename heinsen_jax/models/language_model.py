"""The language model of Heinsen (2024): log-attention in place of softmax attention, tied ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.core import Tracer

from heinsen_jax import attention
from heinsen_jax.attention.cache import TokenCache
from heinsen_jax.attention.heads import head_depth, linear, uniform
from heinsen_jax.models.position import PositionRecurrence
from heinsen_jax.typing import Array

LAYER_NORM_EPSILON = 1e-5


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class LanguageModelConfig:
    """The architecture. The defaults are the paper's 125M model: 124,879,872 parameters."""

    vocab_size: pydantic.PositiveInt = 50304
    """Rows of the embedding; at least the tokenizer's vocabulary (gpt2: 50257)."""
    model_dim: pydantic.PositiveInt = 768
    """Width of the residual stream."""
    num_layers: pydantic.PositiveInt = 24
    """Residual blocks."""
    attention: str | tuple[str, ...] = "log"
    """The mechanism, by name; several take turns, layer by layer."""
    attention_options: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Fields of mechanisms' configurations, as pairs of a name and a value: `log.window_size` is of
    all layers of that mechanism, `0.window_size` of the first in each turn."""
    block: Literal["paper", "standard"] = "paper"
    """The paper's: one residual branch, gated. Or attention, then a perceptron, both pre-norm."""
    mlp_ratio: pydantic.PositiveInt = 4
    """Width of a standard block's perceptron, in widths of the model."""
    num_heads: pydantic.PositiveInt = 24
    """Attention heads."""
    key_depth: pydantic.PositiveInt | None = None
    """Features of a query or key head; model_dim / num_heads by default."""
    value_depth: pydantic.PositiveInt | None = None
    """Features of a value head; model_dim / num_heads by default."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of activations in matrix products. Attention states are float32 at least."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters."""
    remat: bool = False
    """Recompute each block in the backward pass: memory of one block instead of all. On CPUs it is
    often faster, too, since large memory taken anew at every step is slow."""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("attention must name at least one mechanism")
        if self.num_layers % len(self.turns):
            raise ValueError(
                f"num_layers={self.num_layers} is not a multiple of the {len(self.turns)} "
                "mechanisms that take turns"
            )
        self.mechanisms()  # refuses what does not fit
        if self.key_depth is None or self.value_depth is None:
            head_depth(self.model_dim, self.num_heads)

    @property
    def turns(self) -> tuple[str, ...]:
        """The mechanisms of consecutive layers, which repeat."""
        return (self.attention,) if isinstance(self.attention, str) else self.attention

    def mechanisms(self) -> list[attention.AttentionConfig]:
        """The configurations of `turns`."""
        known = {*self.turns, *map(str, range(len(self.turns)))}
        found = []
        for turn, name in enumerate(self.turns):
            fields: dict[str, Any] = {}
            mechanism = attention.mechanism(name)
            if not mechanism.capabilities.causal:
                raise ValueError(
                    f"attention={name!r} is not causal: it would see the tokens it is to predict"
                )
            if issubclass(mechanism.Config, attention.HeadsConfig):
                fields["gated"] = self.block == "paper"
                sizes = {"key_depth": self.key_depth, "value_depth": self.value_depth}
                fields |= {field: size for field, size in sizes.items() if size is not None}
            for option, value in self.attention_options:
                of, _, field = option.rpartition(".")
                if of not in known:
                    raise ValueError(
                        f"attention_options: {option!r} must begin with a mechanism's name and a "
                        f"dot, or a number of a turn: {', '.join(sorted(known))}"
                    )
                if of in (name, str(turn)):
                    fields[field] = value
            found.append(attention.configure(name, **fields))
        return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LanguageModelState:
    """What the model keeps of the tokens before: of a size that does not depend on their number.

    Attributes:
      position: the last h of the position recurrence `[*B, D]`.
      blocks: the attention states of each mechanism that takes its turn, those of all its layers
        stacked on a first axis.
    """

    position: Array
    blocks: Any


class Block(nnx.Module):
    """A residual block: x + attention(norm(x)), and if standard, then x + mlp(norm(x))."""

    def __init__(self, config: LanguageModelConfig, turn: int, *, rngs: nnx.Rngs):
        self.norm = layer_norm(config, rngs=rngs)
        self.attention = attention.mechanism(config.turns[turn])(
            config.model_dim,
            config.num_heads,
            config.mechanisms()[turn],
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.has_mlp = config.block == "standard"
        if self.has_mlp:
            self.mlp_norm = layer_norm(config, rngs=rngs)
            self.mlp = Perceptron(config, rngs=rngs)

    def __call__(self, x: Array, *, state: Any, return_state: bool) -> tuple[Array, Any]:
        with jax.named_scope("norm"):
            normed = self.norm(x)
        with jax.named_scope("attention"):
            y = self.attention(normed, state=state, return_state=return_state)
            y, state = y if return_state else (y, None)
        x = x + y.astype(x.dtype)
        if self.has_mlp:
            with jax.named_scope("mlp"):
                x = x + self.mlp(self.mlp_norm(x)).astype(x.dtype)
        return x, state


class Perceptron(nnx.Module):
    """GELU(x W1 + b1) W2 + b2."""

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        wide = config.mlp_ratio * config.model_dim
        options = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.up = linear(config.model_dim, wide, ("embed", "mlp"), **options)
        self.down = linear(wide, config.model_dim, ("mlp", "embed"), **options)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class LanguageModel(nnx.Module):
    """logits = layer_norm(blocks(position(E[tokens]))) E^T, with one E for both ends.

    Blocks are stacked and scanned, so compile time does not depend on their number. The state goes
    in and comes out: a text may be fed in chunks of any lengths, with the logits of one pass.

    Args:
      config: the architecture.
      rngs: the source of the initial weights.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.model_dim,
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=uniform(config.model_dim**-0.5),
            embedding_metadata={"logical_axes": ("vocab", "embed")},
            rngs=rngs,
        )
        self.position = PositionRecurrence(
            config.model_dim, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )

        def stack(turn: int) -> Block:
            split = nnx.split_rngs(splits=config.num_layers // len(config.turns))
            return split(nnx.vmap(lambda rngs: Block(config, turn, rngs=rngs)))(rngs)

        self.blocks = nnx.List([stack(turn) for turn in range(len(config.turns))])
        self.norm = layer_norm(config, rngs=rngs)

    def __call__(
        self,
        tokens: Array,
        *,
        state: LanguageModelState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Logits of every next token.

        Args:
          tokens: ids `[*B, T]` of integers below vocab_size.
          state: what was returned for the tokens before; None at the start of a text.
          return_state: whether to return also the state after the T tokens.

        Returns:
          logits `[*B, T, vocab_size]` in float32 at least, or a pair of them and the state.

        Raises:
          ValueError: outside `jit`, where a token id is not in the vocabulary.
        """
        check_tokens(tokens, self.config.vocab_size)
        batch_shape = tokens.shape[:-1]
        if state is None and return_state:
            state = self.init_state(batch_shape)
        before = self._first_position(batch_shape) if state is None else state.position
        with jax.named_scope("position"):
            x, position = self.position(self.embed(tokens), state=before)

        graphs, parameters = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        states = (None,) * len(graphs) if state is None else state.blocks

        def apply_turn(x: Array, turn: tuple[Any, Any]) -> tuple[Array, Any]:
            after = []
            for graph, parameters, state in zip(graphs, *turn, strict=True):
                block = nnx.merge(graph, parameters)
                x, state = block(x, state=state, return_state=return_state)
                after.append(state)
            return x, tuple(after)

        if self.config.remat:
            apply_turn = jax.checkpoint(apply_turn, prevent_cse=False)
        x, blocks = lax.scan(apply_turn, x, (parameters, states))

        with jax.named_scope("logits"):
            x = self.norm(x).astype(self.config.dtype)
            logits = jnp.einsum(
                "...d,vd->...v",
                x,
                self.embed.embedding[...].astype(x.dtype),
                preferred_element_type=position.dtype,
            )
        return (logits, LanguageModelState(position, blocks)) if return_state else logits

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LanguageModelState:
        """The state at the start of a text.

        Args:
          batch_shape: the leading axes.
          capacity: how many tokens there will be at most, for mechanisms whose state holds them
            all: these states then have their final shape. They grow when None.
        """

        def stacked(blocks: Block) -> Any:
            graph, parameters = nnx.split(blocks)

            def one(parameters: Any) -> Any:
                layer = nnx.merge(graph, parameters).attention
                return layer.init_state(batch_shape, capacity=capacity)

            return jax.vmap(one)(parameters)

        blocks = tuple(stacked(block) for block in self.blocks)
        return LanguageModelState(self._first_position(batch_shape), blocks)

    def _first_position(self, batch_shape: Sequence[int]) -> Array:
        return jnp.zeros((*batch_shape, self.config.model_dim), self.config.param_dtype)

    def with_room(self, state: LanguageModelState, num_tokens: int) -> LanguageModelState:
        """The state, with room for further tokens where mechanisms hold them all."""

        def widen(node: Any) -> Any:
            if not isinstance(node, TokenCache) or isinstance(node.length, Tracer):
                return node
            taken = node.capacity if node.length is None else int(jnp.max(node.length))
            if node.length is not None and taken + num_tokens <= node.capacity:
                return node
            return jax.vmap(lambda cache: cache.widened(taken + num_tokens))(node)

        is_cache = lambda node: isinstance(node, TokenCache)  # noqa: E731
        return replace(state, blocks=jax.tree.map(widen, state.blocks, is_leaf=is_cache))


def layer_norm(config: LanguageModelConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.model_dim,
        epsilon=LAYER_NORM_EPSILON,
        param_dtype=jnp.dtype(config.param_dtype),
        scale_metadata={"logical_axes": ("embed",)},
        bias_metadata={"logical_axes": ("embed",)},
        rngs=rngs,
    )


def check_tokens(tokens: Array, vocab_size: int) -> None:
    """Refuses ids outside the vocabulary, which an embedding look-up would turn into NaN."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers, are {tokens.dtype}")
    if isinstance(tokens, Tracer) or tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}"
        )


def flops_per_token(config: LanguageModelConfig, parameters: int) -> float:
    """Floating-point operations a token needs in forward and backward: 6 a parameter in a matrix
    product, the tied embedding once, and 12 for each entry of the attention states, which are
    written and read once."""
    key_depth = config.key_depth or config.model_dim // config.num_heads
    value_depth = config.value_depth or config.model_dim // config.num_heads
    states = config.num_layers * config.num_heads * key_depth * value_depth
    return 6.0 * parameters + 12.0 * states
