"""Attention that is heavy for some tokens and light for all, as a layer."""

from typing import Any

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, Capabilities
from heinsen_jax.attention.heads import uniform
from heinsen_jax.attention.sliding_window import SlidingWindowAttention, SlidingWindowConfig
from heinsen_jax.attention.softmax import SoftmaxAttention
from heinsen_jax.ops.colt5 import Routing, conditional_attention, route, soft_top_k
from heinsen_jax.typing import Array

SPREAD = 9 / 8  # of the soft selection over the hard one


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class ConditionalConfig(AttentionConfig):
    """Of conditional attention."""

    window_size: pydantic.PositiveInt = 128
    """Tokens on each side that the light branch sees, itself included."""
    num_queries: pydantic.PositiveInt = 64
    """Tokens whose queries the heavy branch serves."""
    num_sources: pydantic.PositiveInt = 128
    """Tokens that the heavy branch sees."""


class ConditionalAttention(Attention):
    """CoLT5's conditional attention: a window for all tokens, and full attention among a few, which
    routers of their own choose as queries and as keys and values.

        y_i = light(x)_i + lambda^q_i heavy(x_i, {lambda^kv_j x_j})

    References:
      Ainslie et al., 2023, CoLT5: Faster Long-Range Transformers with Conditional Computation,
      arXiv:2303.09752.
    """

    Config = ConditionalConfig
    capabilities = Capabilities(bidirectional=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: ConditionalConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        window = SlidingWindowConfig(window_size=self.config.window_size)
        self.light = SlidingWindowAttention(model_dim, num_heads, window, **options)
        self.heavy = SoftmaxAttention(model_dim, num_heads, **options)
        init = uniform(model_dim**-0.5)
        self.query_router = nnx.Param(init(rngs.params(), (model_dim,), self.param_dtype))
        self.source_router = nnx.Param(init(rngs.params(), (model_dim,), self.param_dtype))

    def _route(self, x: Array, router: nnx.Param, most: int) -> Routing:
        count = min(most, x.shape[-2])
        scores = jnp.einsum("...td,d->...t", x, router[...].astype(x.dtype))
        scores = scores.astype(jnp.promote_types(x.dtype, jnp.float32))
        return route(soft_top_k(scores, min(SPREAD * count, x.shape[-2])), count)

    def mix(
        self,
        x: Array,
        *,
        source: Array | None,
        is_causal: bool,
        segment_ids: Array | None,
        state: Any,
    ) -> tuple[Array, Any]:
        del source, is_causal, segment_ids, state  # not declared
        y = conditional_attention(
            x,
            lambda x: self.light(x, is_causal=False).astype(x.dtype),
            lambda queries, sources, _: self.heavy(queries, source=sources).astype(x.dtype),
            self._route(x, self.query_router, self.config.num_queries),
            self._route(x, self.source_router, self.config.num_sources),
            residual=jnp.zeros_like(x),
        )
        return y, None
