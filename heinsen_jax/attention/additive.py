"""Additive attention (Fastformer), made causal, as a layer."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, Capabilities
from heinsen_jax.attention.heads import head_depth, linear
from heinsen_jax.ops.additive import AdditiveState, additive_pooling, additive_weights
from heinsen_jax.typing import Array

LAYER_NORM_EPSILON = 1e-5


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class AdditiveConfig(AttentionConfig):
    """Of additive attention."""

    window_size: pydantic.PositiveInt | None = None
    """Tokens that are averaged, up to a token itself; all when None."""


class AdditiveAttention(Attention):
    """Additive attention: two averages of tokens, under weights of their own, for each head.

        p = pool(x Wq; wq) Wp,    m = p * (x Wk)
        y = m + pool(norm(x + m); wk) * (x Wv)

    where pool averages under the weights softmax(w . x / sqrt(depth)) of each head. The vectors w
    are 0 at first: plain averages. Published as x + y, for an x already normalised.

    References:
      Wu et al., 2021, Fastformer: Additive Attention Can Be All You Need, arXiv:2108.09084.
    """

    Config = AdditiveConfig
    capabilities = Capabilities(causal=True, bidirectional=True, streaming=True, segments=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: AdditiveConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        head_depth(model_dim, num_heads)

        def square(axes: tuple[str, str]) -> nnx.Linear:
            return linear(model_dim, model_dim, axes, use_bias=False, **options)

        self.query, self.key, self.value = (square(("embed", "heads")) for _ in range(3))
        self.project = square(("heads", "embed"))
        self.norm = nnx.LayerNorm(
            model_dim, epsilon=LAYER_NORM_EPSILON, param_dtype=self.param_dtype, rngs=rngs
        )
        self.query_weights = nnx.Param(jnp.zeros(model_dim, self.param_dtype))
        self.key_weights = nnx.Param(jnp.zeros(model_dim, self.param_dtype))

    def mix(
        self,
        x: Array,
        *,
        source: Array | None,
        is_causal: bool,
        segment_ids: Array | None,
        state: Any,
    ) -> tuple[Array, Any]:
        del source  # not declared
        options = {"is_causal": is_causal, "segment_ids": segment_ids}
        first, second = (None, None) if state is None else state
        pooled, first = self._pool(self.query(x), self.query_weights, first, **options)
        mixed = self.project(pooled) * self.key(x)
        pooled, second = self._pool(self.norm(x + mixed), self.key_weights, second, **options)
        y = mixed + pooled.astype(mixed.dtype) * self.value(x)
        return y, None if state is None else (first, second)

    def importance(self, x: Array) -> tuple[Array, Array]:
        """The weights of the two averages, `[..., T, S, num_heads]`: how much of each token s is in
        that of token t. For explanation; of quadratic size."""
        query, window = self.query(x), self.config.window_size
        pooled, _ = self._pool(query, self.query_weights, None, is_causal=True, segment_ids=None)
        between = self.norm(x + self.project(pooled) * self.key(x))
        logits = self._logits(query, self.query_weights), self._logits(between, self.key_weights)
        first, second = (additive_weights(x, local_window_size=window) for x in logits)
        return first, second

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.num_heads, self.model_dim // self.num_heads)

    def _logits(self, x: Array, weights: nnx.Param) -> Array:
        heads, weight = self._heads(x), self._heads(weights[...]).astype(x.dtype)
        return jnp.einsum("...nd,nd->...n", heads, weight) / heads.shape[-1] ** 0.5

    def _pool(
        self, x: Array, weights: nnx.Param, state: AdditiveState | None, **options: Any
    ) -> tuple[Array, AdditiveState | None]:
        result = additive_pooling(
            self._heads(x),
            self._logits(x, weights),
            local_window_size=self.config.window_size if options["is_causal"] else None,
            initial_state=state,
            return_state=state is not None,
            **options,
        )
        pooled, state = (result, None) if state is None else result
        return pooled.reshape(x.shape), state

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> tuple[AdditiveState, AdditiveState]:
        del capacity  # the same for any number of tokens
        sizes = self.num_heads, self.model_dim // self.num_heads, self.config.window_size
        empty = AdditiveState.empty(batch_shape, *sizes, self.param_dtype)
        return empty, empty
