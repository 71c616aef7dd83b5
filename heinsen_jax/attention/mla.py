"""Multi-head latent attention, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import jax.numpy as jnp
import pydantic

from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.cache import TokenCache
from heinsen_jax.attention.heads import head_depth
from heinsen_jax.attention.parameters import (
    LayerOptions,
    LogicalAxes,
    RMSNorm,
    linear,
    parameter,
    uniform,
)
from heinsen_jax.ops.mla import mla_attention
from heinsen_jax.ops.rotary import rotary
from heinsen_jax.typing import Array, Features, config_dataclass


@config_dataclass
class LatentConfig(AttentionConfig):
    """Configuration of multi-head latent attention."""

    key_depth: pydantic.PositiveInt | None = None
    """Non-rotary head dimension of queries and keys; model_dim / num_heads by default."""
    value_depth: pydantic.PositiveInt | None = None
    """Head dimension of values; model_dim / num_heads by default."""
    rotary_depth: pydantic.PositiveInt | None = None
    """Number of rotary features of a query head and of the shared key, even; about half of
    key_depth by default."""
    rank: pydantic.PositiveInt | None = None
    """Rank of the latent vector per token; model_dim / 4 by default."""
    query_rank: pydantic.PositiveInt | None = None
    """Rank of the bottleneck of queries; no bottleneck by default."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True, segments=True)

    def token_depths(self, model_dim: int, num_heads: int) -> tuple[int, int]:
        """`rank` and `rotary_depth`, with the defaults resolved."""
        key_depth = self.key_depth or head_depth(model_dim, num_heads)
        return self.rank or max(model_dim // 4, 1), self.rotary_depth or max(key_depth // 4 * 2, 2)

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        rank, rotary_depth = self.token_depths(model_dim, num_heads)
        visible = (length + 1) / 2 if is_causal else length
        return 2.0 * num_heads * (2 * rank + rotary_depth) * visible


class LatentAttention(Attention[LatentConfig, TokenCache]):
    """MLA: keys and values of all heads are projections of one latent vector per token, which is
    the state together with a rotary key that all heads share.

        q | q_pe = x Wq,    c | k_pe = x Wc,    c <- RMSNorm(c)
        y = softmax(scale (q . (c W^K) + rot(q_pe) . rot(k_pe))) (c W^V) Wo

    References:
      DeepSeek-AI, 2024, DeepSeek-V2, arXiv:2405.04434.
    """

    Config = LatentConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        chosen, model_dim, num_heads = self.config, self.model_dim, self.num_heads
        self.key_depth = chosen.key_depth or head_depth(model_dim, num_heads)
        self.value_depth = chosen.value_depth or head_depth(model_dim, num_heads)
        self.rank, self.rotary_depth = chosen.token_depths(model_dim, num_heads)
        inner = num_heads * (self.key_depth + self.rotary_depth)
        dense = partial(linear, use_bias=False, **options)
        if chosen.query_rank is not None:
            self.query_down = dense(model_dim, chosen.query_rank, ("embed", "mlp"))
            self.query_norm = RMSNorm(chosen.query_rank, **options)
        self.query = dense(chosen.query_rank or model_dim, inner, ("embed", "heads"))
        self.down = dense(model_dim, self.rank + self.rotary_depth, ("embed", "mlp"))
        self.norm = RMSNorm(self.rank, **options)
        axes: LogicalAxes = "heads", "rank", None
        create = partial(parameter, uniform(self.rank**-0.5), kind="matrix", logical_axes=axes)
        self.key_up, self.value_up = (
            create(num_heads, self.rank, depth, **options)
            for depth in (self.key_depth, self.value_depth)
        )
        self.output = dense(num_heads * self.value_depth, model_dim, ("heads", "embed"))

    def apply(
        self, x: Features, call: CallArguments[TokenCache]
    ) -> tuple[Features, TokenCache | None]:
        state = call.state
        query = x if self.config.query_rank is None else self.query_norm(self.query_down(x))
        depth = self.key_depth + self.rotary_depth
        query = self.query(query).reshape(*x.shape[:-1], self.num_heads, depth)
        query, query_pe = query[..., : self.key_depth], query[..., self.key_depth :]
        latent, key_pe = jnp.split(self.down(x), [self.rank], -1)
        latent = self.norm(latent)
        start: int | Array = 0 if state is None else state.num_tokens
        positions = start + jnp.arange(x.shape[-2], dtype=jnp.int32)
        query_pe = rotary(query_pe, positions)
        key_pe = rotary(key_pe[..., None, :], positions)
        if state is not None:
            self.check_segments(call)
            state, start = state.append(latent[..., None, :], key_pe)
            latent, key_pe = (x[..., 0, :, :] for x in state.arrays)
        else:
            key_pe = key_pe[..., 0, :]
        few = x.shape[-2] < self.rank
        y = mla_attention(
            query,
            query_pe,
            latent,
            key_pe,
            self.key_up[...].astype(x.dtype),
            self.value_up[...].astype(x.dtype),
            form="absorbed" if state is not None and few else "expanded",
            query_offset=start,
            **call.keywords,
        )
        y = y if state is None else state.or_nan(y)
        y = y.reshape(*x.shape[:-1], self.num_heads * self.value_depth)
        return self.output(y), state

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> TokenCache:
        shapes = (1, self.rank), (1, self.rotary_depth)
        return TokenCache.empty(batch_shape, shapes, self.cache_dtype, capacity)
