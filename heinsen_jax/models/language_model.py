"""The language model of Heinsen (2024): log-attention in place of softmax attention, tied ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.core import Tracer

from heinsen_jax import attention
from heinsen_jax.attention.log import head_depth, uniform
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
    attention: str = "log"
    """The mechanism, by name."""
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
        if self.attention not in attention.names():
            raise ValueError(
                f"attention={self.attention!r} is no mechanism; "
                f"there are: {', '.join(attention.names())}"
            )
        if self.key_depth is None or self.value_depth is None:
            head_depth(self.model_dim, self.num_heads)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LanguageModelState:
    """What the model keeps of the tokens before: of a size that does not depend on their number.

    Attributes:
      position: the last h of the position recurrence `[*B, D]`.
      blocks: the attention states of all blocks, stacked on a first axis.
    """

    position: Array
    blocks: Any


class Block(nnx.Module):
    """A residual block: x + attention(layer_norm(x))."""

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        self.norm = layer_norm(config, rngs=rngs)
        self.attention = attention.build(
            config.attention,
            model_dim=config.model_dim,
            num_heads=config.num_heads,
            key_depth=config.key_depth,
            value_depth=config.value_depth,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array, *, state: Any) -> tuple[Array, Any]:
        with jax.named_scope("norm"):
            normed = self.norm(x)
        with jax.named_scope("attention"):
            y, state = self.attention(normed, state=state, return_state=True)
        return x + y.astype(x.dtype), state


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

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stack(rngs)
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
        if state is None:
            state = self.init_state(tokens.shape[:-1])
        with jax.named_scope("position"):
            x, position = self.position(self.embed(tokens), state=state.position)

        graph, parameters = nnx.split(self.blocks)

        def apply_block(x: Array, layer: tuple[Any, Any]) -> tuple[Array, Any]:
            parameters, block_state = layer
            x, block_state = nnx.merge(graph, parameters)(x, state=block_state)
            return x, block_state if return_state else None

        if self.config.remat:
            apply_block = jax.checkpoint(apply_block, prevent_cse=False)
        x, blocks = lax.scan(apply_block, x, (parameters, state.blocks))

        with jax.named_scope("logits"):
            x = self.norm(x).astype(self.config.dtype)
            logits = jnp.einsum(
                "...d,vd->...v",
                x,
                self.embed.embedding[...].astype(x.dtype),
                preferred_element_type=state.position.dtype,
            )
        return (logits, LanguageModelState(position, blocks)) if return_state else logits

    def init_state(self, batch_shape: Sequence[int]) -> LanguageModelState:
        """The state at the start of a text."""
        config = self.config
        block = self.blocks.attention.init_state(batch_shape)
        blocks = jax.tree.map(
            lambda x: jnp.broadcast_to(x[None], (config.num_layers, *x.shape)), block
        )
        position = jnp.zeros((*batch_shape, config.model_dim), config.param_dtype)
        return LanguageModelState(position, blocks)


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
