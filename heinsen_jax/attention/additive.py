"""Additive attention (Fastformer), in a causal form, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias, Unpack

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.heads import head_depth
from heinsen_jax.attention.parameters import LayerNorm, LayerOptions, linear, parameter
from heinsen_jax.ops.additive import (
    AdditiveState,
    additive_pooling,
    additive_summary,
    additive_weights,
)
from heinsen_jax.typing import Array, Features, common_dtype, config_dataclass

AdditiveStates: TypeAlias = tuple[AdditiveState, AdditiveState]


@config_dataclass
class AdditiveConfig(AttentionConfig):
    """Configuration of additive attention."""

    window_size: pydantic.PositiveInt | None = None
    """Number of tokens in an average, up to the token itself; all when None."""

    @property
    def capabilities(self) -> Capabilities:
        if self.window_size is not None:
            return Capabilities(causal=True, streaming=True, segments=True)
        return Capabilities(
            causal=True, bidirectional=True, streaming=True, segments=True, mergeable=True
        )


class AdditiveAttention(Attention[AdditiveConfig, AdditiveStates]):
    """Additive attention: two weighted averages of tokens for each head.

        p = pool(x Wq; wq) Wp,    m = p * (x Wk)
        y = m + pool(norm(x + m); wk) * (x Wv)

    where pool averages with the weights softmax(w . x / sqrt(depth)) of each head. The vectors w
    are 0 at initialization: plain averages. Published as x + y, for a normalized x.

    References:
      Wu et al., 2021, Fastformer: Additive Attention Can Be All You Need, arXiv:2108.09084.
    """

    Config = AdditiveConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        width = self.model_dim
        head_depth(width, self.num_heads)
        square = partial(linear, width, width, use_bias=False, **options)
        self.query, self.key, self.value = (square(("embed", "heads")) for _ in range(3))
        self.project = square(("heads", "embed"))
        self.norm = LayerNorm(width, **options)
        self.query_weights = parameter(nnx.initializers.zeros, width, kind="vector", **options)
        self.key_weights = parameter(nnx.initializers.zeros, width, kind="vector", **options)

    def apply(
        self, x: Features, call: CallArguments[AdditiveStates]
    ) -> tuple[Features, AdditiveStates | None]:
        first, second = call.state or (None, None)
        pooled, first = self._pool(self.query(x), self.query_weights, call.with_state(first))
        mixed = self.project(pooled) * self.key(x)
        dtype = common_dtype(x, mixed)
        between = self.norm(x.astype(dtype) + mixed.astype(dtype))
        pooled, second = self._pool(between, self.key_weights, call.with_state(second))
        y = mixed + pooled.astype(mixed.dtype) * self.value(x)
        return y, None if first is None or second is None else (first, second)

    def importance(self, x: Array) -> tuple[Array, Array]:
        """Weights of token s in the two averages at token t, `[..., T, S, num_heads]`. For
        inspection; the size is quadratic."""
        query, window = self.query(x), self.config.window_size
        pooled, _ = self._pool(query, self.query_weights, CallArguments())
        between = self.norm(x + self.project(pooled) * self.key(x))
        logits = self._logits(query, self.query_weights), self._logits(between, self.key_weights)
        first, second = (additive_weights(x, local_window_size=window) for x in logits)
        return first, second

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.num_heads, self.model_dim // self.num_heads)

    def _logits(self, x: Array, weights: nnx.Param[Array]) -> Array:
        heads, weight = self._heads(x), self._heads(weights[...]).astype(x.dtype)
        return jnp.einsum("...nd,nd->...n", heads, weight) / heads.shape[-1] ** 0.5

    def _pool(
        self, x: Array, weights: nnx.Param[Array], call: CallArguments[AdditiveState]
    ) -> tuple[Array, AdditiveState | None]:
        arrays, window = (self._heads(x), self._logits(x, weights)), self.config.window_size
        if window is None:
            pooled, state = devices.recur(
                call,
                additive_pooling,
                *arrays,
                empty=self.init_state(x.shape[:-2])[0],
                summary=additive_summary,
                state_axes=(None, "heads"),
            )
        else:
            op = partial(additive_pooling, local_window_size=window)
            pooled, state = call.recur(op, *arrays, **call.keywords)
        return pooled.reshape(x.shape), state

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> AdditiveStates:
        sizes = self.num_heads, self.model_dim // self.num_heads, self.config.window_size
        first, second = (
            AdditiveState.empty(batch_shape, *sizes, self.sums_dtype) for _ in range(2)
        )
        return first, second
