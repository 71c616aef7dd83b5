"""The patterns of sparse transformers, as a layer."""

from typing import Literal, Unpack

import pydantic

from heinsen_jax.attention.base import Capabilities, OpKeywords
from heinsen_jax.attention.rotary import RotaryAttention, RotaryConfig
from heinsen_jax.ops.local import block_rule, block_sparse_attention
from heinsen_jax.ops.masks import Mask
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class BlockSparseConfig(RotaryConfig):
    """Configuration of block-sparse attention."""

    pattern: Literal["local", "strided", "fixed"] = "fixed"
    """local: the last tokens; strided: every block_size-th token; fixed: the token's own block and
    the last tokens of all others."""
    block_size: pydantic.PositiveInt = 64
    """Block size in tokens; about the square root of the length."""
    num_summaries: pydantic.NonNegativeInt = 8
    """Number of tokens at the end of each block that all later tokens attend to, in the fixed
    pattern."""

    def __post_init__(self) -> None:
        self.rule()  # raises for invalid sizes

    @property
    def capabilities(self) -> Capabilities:
        if self.pattern != "fixed":  # else its blocks start at the sequence, not at a document
            return Capabilities(causal=True, streaming=True, segments=True)
        return Capabilities(causal=True, streaming=True)

    def rule(self, is_causal: bool = True) -> Mask:
        del is_causal
        return block_rule(self.pattern, self.block_size, self.num_summaries)

    def reach(self) -> int | None:
        return self.block_size - 1 if self.pattern == "local" else None


class BlockSparseAttention(RotaryAttention[BlockSparseConfig]):
    """Block-sparse attention: the state holds all keys and values, or a window if local.

    To alternate with dense layers, mix mechanisms: `attention=("block_sparse", "softmax")`.

    References:
      Child et al., 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509.
    """

    Config = BlockSparseConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"block_size": length // 8, "num_summaries": 2}

    def over_all(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[OpKeywords]
    ) -> Mixed:
        return block_sparse_attention(
            query,
            key,
            value,
            pattern=self.config.pattern,
            block_size=self.config.block_size,
            num_summaries=self.config.num_summaries,
            scale=self.config.scale,
            segment_ids=keywords.get("segment_ids"),
        )
