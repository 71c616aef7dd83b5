"""Transient-global attention (LongT5), as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Unpack

import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.cache import WindowCache, check_capacity, in_chunks
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions, RMSNorm, parameter, uniform
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.ops.tglobal import block_sums, relative_position_bucket, tglobal_attention
from heinsen_jax.typing import Array, Features, Float, config_dataclass, pytree_dataclass, wide


@config_dataclass
class TransientGlobalConfig(HeadsConfig):
    """Configuration of transient-global attention."""

    radius: pydantic.NonNegativeInt = 127
    """Window radius: number of tokens on each side, or before the token if causal."""
    block_size: pydantic.PositiveInt = 16
    """Tokens that a summary is made of."""
    num_buckets: pydantic.PositiveInt = 32
    """Number of buckets of relative positions, each with a trained bias."""
    max_distance: pydantic.PositiveInt = 128
    """Distance from which relative positions share a bucket."""
    capacity: pydantic.PositiveInt = 4096
    """Default capacity of the state, in tokens."""

    def __post_init__(self) -> None:
        if self.num_buckets < 4 or self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"num_buckets={self.num_buckets} must be at least 4, and less than twice "
                f"max_distance={self.max_distance}"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True)


@pytree_dataclass
class TransientGlobalState:
    """State: the last tokens, and summaries of all blocks so far.

    Beyond the capacity results are NaN (outside `jit`, an error).

    Attributes:
      window: keys and values of the last `radius` tokens.
      key, value: keys and values of summaries, `[*B, blocks, num_kv_heads, depth]`.
      begun: `[*B, D]`, sum of the inputs of the incomplete block.
      block_size: number of tokens per summary.
    """

    window: WindowCache
    key: Float[Array, "*B blocks G K"]
    value: Float[Array, "*B blocks G V"]
    begun: Float[Array, "*B D"]
    block_size: int = field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        return self.key.shape[-3] * self.block_size

    @property
    def length(self) -> Array:
        return self.window.num_tokens

    def with_capacity(self, capacity: int) -> TransientGlobalState:
        """A copy with at least this capacity."""
        padding = [(0, 0)] * self.key.ndim
        padding[-3] = (0, max(-(-capacity // self.block_size) - self.key.shape[-3], 0))
        key, value = (jnp.pad(x, padding) for x in (self.key, self.value))
        return replace(self, key=key, value=value)


class TransientGlobalAttention(HeadedAttention[TransientGlobalConfig, TransientGlobalState]):
    """LongT5's attention: one softmax over the nearest tokens and summaries of all blocks.

    Summaries are normalized sums of the inputs of a block, with the projections of tokens. Queries
    are divided by sqrt(key_depth) instead of T5's smaller initial weights. The state has the
    nearest tokens and the summaries.

    References:
      Guo et al., 2021, LongT5, arXiv:2112.07916.
    """

    Config = TransientGlobalConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"radius": length // 4 - 1, "block_size": 4}

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        self.global_norm = RMSNorm(self.model_dim, **options)
        init, shape = uniform(0.02), (self.config.num_buckets, self.num_heads)
        self.local_bias = parameter(init, *shape, kind="vector", **options)
        self.global_bias = parameter(init, *shape, kind="vector", **options)

    def apply(
        self, x: Features, call: CallArguments[TransientGlobalState]
    ) -> tuple[Features, TransientGlobalState | None]:
        if call.state is None:
            return self._over_all(x, call.is_causal), None
        check_capacity(call.state.capacity, call.state.length, x.shape[-2])
        y, state = self._stream(x, call.state)
        return jnp.where(state.length > state.capacity, jnp.nan, y), state

    def _stream(self, x: Array, state: TransientGlobalState) -> tuple[Array, TransientGlobalState]:
        """Attention in chunks as long as the window, with memory linear in their number."""
        size = self.config.radius + self.config.block_size
        return in_chunks(type(self)._chunk, self, x, state, size=size, axis=-2)

    def _chunk(self, x: Array, state: TransientGlobalState) -> tuple[Array, TransientGlobalState]:
        query, key, value = self.heads(x)
        at = state.length + jnp.arange(x.shape[-2], dtype=jnp.int32)
        near, window = state.window.append(key, value)
        slot = jnp.arange(near[0].shape[-3], dtype=jnp.int32) + state.length - state.window.size
        far, begun = self._summaries(x, state)
        block = jnp.arange(far[0].shape[-3], dtype=jnp.int32)

        near_offset = slot[None] - at[:, None]
        near_visible = (near_offset <= 0) & (near_offset >= -self.config.radius) & (slot >= 0)[None]
        far_offset = block[None] - (at // self.config.block_size)[:, None]
        bias = self._bias(self.local_bias, near_offset), self._bias(self.global_bias, far_offset)
        y = dot_product_attention(
            query,
            *(jnp.concatenate(pair, -3) for pair in zip(near, far, strict=True)),
            bias=jnp.concatenate(bias, -1),
            mask=jnp.concatenate([near_visible, far_offset < 0], -1),
            scale=self.key_depth**-0.5,
        )
        return self.out_proj(y), replace(
            state, window=window, key=far[0], value=far[1], begun=begun
        )

    def _summaries(self, x: Array, state: TransientGlobalState) -> tuple[list[Array], Array]:
        """Summaries of all blocks after x, with the incomplete one, and the sum of its inputs."""
        size, length = state.block_size, x.shape[-2]
        count = -(-length // size) + 1  # blocks that hold some of x, at most
        first, place = state.length // size, state.length % size
        sums = jnp.zeros((*x.shape[:-2], count * size, x.shape[-1]), state.begun.dtype)
        sums = lax.dynamic_update_slice_in_dim(sums, x.astype(sums.dtype), place, x.ndim - 2)
        sums = sums.reshape(*x.shape[:-2], count, size, x.shape[-1]).sum(-2)
        sums = sums.at[..., 0, :].add(state.begun)
        begun = jnp.take(sums, (place + length) // size, -2)
        _, *new = self.heads(self.global_norm(sums).astype(x.dtype))
        index = first + jnp.arange(count, dtype=jnp.int32)
        far = [
            jnp.asarray(old).at[..., index, :, :].set(x.astype(old.dtype), mode="drop")
            for old, x in zip((state.key, state.value), new, strict=True)
        ]
        return far, begun

    def _bias(self, table: nnx.Param[Array], offset: Array) -> Array:
        """Biases `[num_heads, T, S]` for relative positions `[T, S]`, by bucket."""
        options = {"num_buckets": self.config.num_buckets, "max_distance": self.config.max_distance}
        bucket = relative_position_bucket(offset, is_bidirectional=False, **options)
        return jnp.moveaxis(table[...][bucket], -1, 0)

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
        return self.out_proj(y)

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> TransientGlobalState:
        shapes, dtype, size = self.token_shapes, self.cache_dtype, self.config.block_size
        size_limit: int = self.config.capacity if capacity is None else capacity
        key, value = (
            jnp.zeros((*batch_shape, -(-size_limit // size), *shape), dtype) for shape in shapes
        )
        begun = jnp.zeros((*batch_shape, self.model_dim), wide(dtype))
        window = WindowCache.empty(batch_shape, shapes, dtype, self.config.radius)
        return TransientGlobalState(window, key, value, begun, block_size=size)
