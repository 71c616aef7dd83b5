"""Transient-global attention (LongT5), as a layer."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax

from heinsen_jax.attention.base import Capabilities
from heinsen_jax.attention.cache import TokenCache
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig, uniform
from heinsen_jax.ops.tglobal import block_sums, tglobal_attention
from heinsen_jax.typing import Array

RMS_EPSILON = 1e-6


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class TransientGlobalConfig(HeadsConfig):
    """Of transient-global attention."""

    radius: pydantic.NonNegativeInt = 127
    """Tokens seen on each side, or before a token, if causal."""
    block_size: pydantic.PositiveInt = 16
    """Tokens that a summary is made of."""
    num_buckets: pydantic.PositiveInt = 32
    """Of relative positions, with a learned bias each."""
    max_distance: pydantic.PositiveInt = 128
    """From where on relative positions share a bucket."""


class TransientGlobalAttention(HeadedAttention):
    """LongT5's attention: the nearest tokens, and summaries of all blocks, in one softmax.

    Summaries are normalised sums of a block's inputs, with the projections of the tokens. Queries
    are divided by sqrt(key_depth) in place of T5's smaller initial weights. The state holds all
    inputs, and each call with one computes anew over all of them.

    References:
      Guo et al., 2021, LongT5, arXiv:2112.07916.
    """

    Config = TransientGlobalConfig
    capabilities = Capabilities(causal=True, bidirectional=True, streaming=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: TransientGlobalConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        self.global_norm = nnx.RMSNorm(
            model_dim, epsilon=RMS_EPSILON, param_dtype=self.param_dtype, rngs=rngs
        )
        init, shape = uniform(0.02), (self.config.num_buckets, num_heads)
        self.local_bias = nnx.Param(init(rngs.params(), shape, self.param_dtype))
        self.global_bias = nnx.Param(init(rngs.params(), shape, self.param_dtype))

    def mix(
        self,
        x: Array,
        *,
        source: Array | None,
        is_causal: bool,
        segment_ids: Array | None,
        state: Any,
    ) -> tuple[Array, Any]:
        del source, segment_ids  # not declared
        if state is None:
            return self._over_all(x, is_causal), None
        state, start = state.append(x[..., None, :])
        y = self._over_all(state.arrays[0][..., 0, :].astype(x.dtype), is_causal)
        y = lax.dynamic_slice_in_dim(y, start, x.shape[-2], y.ndim - 2)
        return state.or_nan(y), state

    def _over_all(self, x: Array, is_causal: bool) -> Array:
        query, key, value = self.heads(x)
        sums, _ = block_sums(x, self.config.block_size, is_causal=is_causal)
        _, global_key, global_value = self.heads(self.global_norm(sums).astype(x.dtype))
        y = tglobal_attention(
            query,
            key,
            value,
            global_key,
            global_value,
            radius=self.config.radius,
            block_size=self.config.block_size,
            local_bias=self.local_bias[...],
            global_bias=self.global_bias[...],
            max_distance=self.config.max_distance,
            is_causal=is_causal,
            scale=self.key_depth**-0.5,
        )
        return self.back(y)

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> TokenCache:
        dtype = jnp.dtype(self.dtype or self.param_dtype)
        return TokenCache.empty(batch_shape, [(1, self.model_dim)], dtype, capacity)

    def state_size(self, context_length: int) -> int:
        itemsize = jnp.dtype(self.dtype or self.param_dtype).itemsize
        return context_length * self.model_dim * itemsize
