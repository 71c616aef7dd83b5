"""Conditional attention: light for all tokens, heavy for some, as a layer."""

from typing import Never, Unpack

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.parameters import LayerOptions, parameter, uniform
from heinsen_jax.attention.sliding_window import SlidingWindowAttention, SlidingWindowConfig
from heinsen_jax.attention.softmax import SoftmaxAttention
from heinsen_jax.ops.colt5 import Routing, conditional_attention, route, soft_top_k
from heinsen_jax.typing import Array, Features, config_dataclass, wide

SPREAD = 9 / 8  # tokens of the soft selection per token of the hard one


@config_dataclass
class ConditionalConfig(AttentionConfig):
    """Configuration of conditional attention."""

    window_size: pydantic.PositiveInt = 128
    """Window of the light branch: number of tokens on each side, the token itself included."""
    num_queries: pydantic.PositiveInt = 64
    """Number of queries of the heavy branch."""
    num_sources: pydantic.PositiveInt = 128
    """Number of keys and values of the heavy branch."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(bidirectional=True)


class ConditionalAttention(Attention[ConditionalConfig, Never]):
    """CoLT5's conditional attention: a window for all tokens, and full attention among a few that
    routers select as queries and as keys and values.

        y_i = light(x)_i + lambda^q_i heavy(x_i, {lambda^kv_j x_j})

    References:
      Ainslie et al., 2023, CoLT5: Faster Long-Range Transformers with Conditional Computation,
      arXiv:2303.09752.
    """

    Config = ConditionalConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        window = SlidingWindowConfig(window_size=self.config.window_size)
        sizes = self.model_dim, self.num_heads
        self.light = SlidingWindowAttention(*sizes, window, **options)
        self.heavy = SoftmaxAttention(*sizes, **options)
        init = uniform(self.model_dim**-0.5)
        self.query_router = parameter(init, self.model_dim, kind="vector", **options)
        self.source_router = parameter(init, self.model_dim, kind="vector", **options)

    def _route(self, x: Array, router: nnx.Param[Array], max_tokens: int) -> Routing:
        count = min(max_tokens, x.shape[-2])
        scores = jnp.einsum("...td,d->...t", x, router[...].astype(x.dtype))
        scores = scores.astype(wide(x))
        return route(soft_top_k(scores, min(SPREAD * count, x.shape[-2])), count)

    def apply(self, x: Features, call: CallArguments[Never]) -> tuple[Features, None]:
        if x.shape[-2] == 0:  # nothing to route
            return x, None
        y = conditional_attention(
            x,
            lambda x: self.light(x, is_causal=False).astype(x.dtype),
            lambda queries, sources, _: self.heavy(queries, source=sources).astype(x.dtype),
            self._route(x, self.query_router, self.config.num_queries),
            self._route(x, self.source_router, self.config.num_sources),
            residual=jnp.zeros_like(x),
        )
        return y, None
