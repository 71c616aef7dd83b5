"""Multi-head latent attention, as a layer."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, Capabilities
from heinsen_jax.attention.cache import TokenCache
from heinsen_jax.attention.heads import head_depth, linear, uniform
from heinsen_jax.ops.mla import mla_attention, rotary
from heinsen_jax.typing import Array

RMS_EPSILON = 1e-6


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class LatentConfig(AttentionConfig):
    """Of multi-head latent attention."""

    key_depth: pydantic.PositiveInt | None = None
    """Features of a query or key head that are not rotated; model_dim / num_heads by default."""
    value_depth: pydantic.PositiveInt | None = None
    """Features of a value head; model_dim / num_heads by default."""
    rotary_depth: pydantic.PositiveInt | None = None
    """Features of a query head and of the shared key that are rotated, an even number; about half
    of key_depth by default."""
    rank: pydantic.PositiveInt | None = None
    """Numbers kept of a token, next to the shared key; model_dim / 4 by default."""
    query_rank: pydantic.PositiveInt | None = None
    """Of the queries' own bottleneck; none by default."""


class LatentAttention(Attention):
    """MLA: keys and values of all heads are made of one short vector a token, which is what the
    state holds, with a rotated key that all heads share.

        q | q_pe = x Wq,    c | k_pe = x Wc,    c <- RMSNorm(c)
        y = softmax(scale (q . (c W^K) + rot(q_pe) . rot(k_pe))) (c W^V) Wo

    References:
      DeepSeek-AI, 2024, DeepSeek-V2, arXiv:2405.04434.
    """

    Config = LatentConfig
    capabilities = Capabilities(causal=True, bidirectional=True, streaming=True, segments=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: LatentConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        chosen = self.config
        self.key_depth = chosen.key_depth or head_depth(model_dim, num_heads)
        self.value_depth = chosen.value_depth or head_depth(model_dim, num_heads)
        self.rotary_depth = chosen.rotary_depth or max(self.key_depth // 4 * 2, 2)
        self.rank = chosen.rank or max(model_dim // 4, 1)
        bias = {"use_bias": False}
        inner = num_heads * (self.key_depth + self.rotary_depth)
        if chosen.query_rank is not None:
            self.query_down = linear(
                model_dim, chosen.query_rank, ("embed", "mlp"), **bias, **options
            )
            self.query_norm = self._norm(chosen.query_rank, rngs)
        self.query = linear(
            chosen.query_rank or model_dim, inner, ("embed", "heads"), **bias, **options
        )
        self.down = linear(
            model_dim, self.rank + self.rotary_depth, ("embed", "mlp"), **bias, **options
        )
        self.norm = self._norm(self.rank, rngs)
        init = uniform(self.rank**-0.5)
        shape = num_heads, self.rank, self.key_depth
        self.key_up = nnx.Param(init(rngs.params(), shape, self.param_dtype))
        shape = num_heads, self.rank, self.value_depth
        self.value_up = nnx.Param(init(rngs.params(), shape, self.param_dtype))
        self.output = linear(
            num_heads * self.value_depth, model_dim, ("heads", "embed"), **bias, **options
        )

    def _norm(self, size: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        return nnx.RMSNorm(size, epsilon=RMS_EPSILON, param_dtype=self.param_dtype, rngs=rngs)

    def mix(
        self,
        x: Array,
        *,
        source: Array | None,
        is_causal: bool,
        segment_ids: Array | None,
        state: TokenCache | None,
    ) -> tuple[Array, Any]:
        del source  # not declared
        query = x if self.config.query_rank is None else self.query_norm(self.query_down(x))
        depth = self.key_depth + self.rotary_depth
        query = self.query(query).reshape(*x.shape[:-1], self.num_heads, depth)
        query, query_pe = query[..., : self.key_depth], query[..., self.key_depth :]
        latent, key_pe = jnp.split(self.down(x), [self.rank], -1)
        latent = self.norm(latent)
        start: int | Array = 0
        if state is not None:
            start = state.capacity if state.length is None else state.length
        positions = start + jnp.arange(x.shape[-2])
        query_pe = rotary(query_pe, positions)
        key_pe = rotary(key_pe[..., None, :], positions)
        if state is not None:
            if segment_ids is not None:
                raise NotImplementedError("LatentAttention: segment_ids together with a state")
            state, start = state.append(latent[..., None, :], key_pe)
            latent, key_pe = (x[..., 0, :] for x in state.arrays)
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
            is_causal=is_causal,
            segment_ids=segment_ids,
            query_offset=start,
        )
        y = y if state is None else state.or_nan(y)
        y = y.reshape(*x.shape[:-1], self.num_heads * self.value_depth)
        return self.output(y), state

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> TokenCache:
        dtype = jnp.dtype(self.dtype or self.param_dtype)
        shapes = (1, self.rank), (1, self.rotary_depth)
        return TokenCache.empty(batch_shape, shapes, dtype, capacity)

    def state_size(self, context_length: int) -> int:
        itemsize = jnp.dtype(self.dtype or self.param_dtype).itemsize
        return context_length * (self.rank + self.rotary_depth) * itemsize
