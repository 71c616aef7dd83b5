"""Base class of softmax attention with optional rotary queries and keys, as layers."""

from typing import Literal, TypeVar, Unpack

import jax.numpy as jnp

from heinsen_jax.attention.heads import HeadsConfig
from heinsen_jax.attention.layers import LayerOptions
from heinsen_jax.attention.masked import MaskedAttention
from heinsen_jax.ops.rotary import rotary
from heinsen_jax.typing import Array, Integer, Keys, Query, config_dataclass


@config_dataclass
class PositionsConfig(HeadsConfig):
    """Configuration of softmax attention with scaled dot products."""

    positions: Literal["none", "rotary", "alibi"] = "none"
    """Position encoding: none; rotary, which rotates queries and keys by angles proportional to
    their positions (RoPE), so that scores depend on distances; or alibi, which adds to the scores a
    bias proportional to the distance, by head, and is causal only."""


@config_dataclass
class RotaryConfig(PositionsConfig):
    """Configuration of softmax attention without ALiBi."""

    positions: Literal["none", "rotary"] = "none"
    """Position encoding: none; or rotary, which rotates queries and keys by angles proportional to
    their positions (RoPE), so that scores depend on distances."""


RotaryT = TypeVar("RotaryT", bound=PositionsConfig)


class RotaryAttention(MaskedAttention[RotaryT]):
    """Softmax attention with scaled dot products of optionally rotary queries and keys.

    Raises:
      ValueError: rotary, and key_depth is odd.
    """

    Config = PositionsConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        if self.config.positions == "rotary":
            check_pairs(self.key_depth)

    def with_positions(
        self, query: Query, key: Keys, before: int | Integer[Array, ""]
    ) -> tuple[Query, Keys]:
        if self.config.positions != "rotary":
            return query, key
        query, key = (rotary(x, before + jnp.arange(x.shape[-3])) for x in (query, key))
        return query, key


def check_pairs(key_depth: int) -> None:
    """Raise ValueError unless the head dimension is even."""
    if key_depth % 2:
        raise ValueError(
            f"key_depth={key_depth}: rotary position encodings rotate pairs of features; make it "
            "even"
        )
