"""Forgetting attention: softmax attention with a forget gate, as a layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack

import jax

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.cache import TokenCache
from heinsen_jax.attention.parameters import LayerOptions, in_float32, linear
from heinsen_jax.attention.softmax_base import MaskedAttention, MaskedConfig, TokenStates
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class ForgettingConfig(MaskedConfig):
    """Configuration of forgetting attention."""

    implementation: Literal["xla", "tiled"] | None = None
    """Implementation of `dot_product_attention`; chosen automatically when None."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, streaming=True, segments=True)


class ForgettingAttention(MaskedAttention[ForgettingConfig]):
    """Softmax attention whose scores decay by a forget gate per head and token (FoX).

        P_ts = softmax_s(Q_t . K_s / sqrt(K) + sum_{s<r<=t} log f_r),    f = sigmoid(x Wf + bf)

    The state has all keys, values and gates. Positions are not encoded.

    References:
      Lin et al., 2025, Forgetting Transformer: Softmax Attention with a Forget Gate,
      arXiv:2503.02130.
    """

    Config = ForgettingConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        self.forget_gate = linear(self.model_dim, self.num_heads, ("embed", "heads"), **options)

    def apply(
        self, x: Features, call: CallArguments[TokenStates]
    ) -> tuple[Features, TokenStates | None]:
        query, key, value = self.heads(x)
        state = call.state
        log_forget = jax.nn.log_sigmoid(in_float32(self.forget_gate(x)))
        with jax.named_scope("mechanism"):
            if state is None:
                y = dot_product_attention(
                    query,
                    key,
                    value,
                    **call.keywords,
                    log_decay=log_forget,
                    implementation=self.config.implementation,
                )
                return self.out_proj(y), None
            self.check_segments(call)
            assert isinstance(state, TokenCache)
            state, offset = state.append(key, value, log_forget[..., None])
            key, value, cached = state.tokens
            y = dot_product_attention(
                query, key, value, is_causal=True, query_offset=offset, log_decay=cached[..., 0]
            )
        return self.out_proj(state.or_nan(y)), state

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> TokenStates:
        shapes = *self.token_shapes, (self.num_heads, 1)
        cache = TokenCache.empty(batch_shape, shapes, self.cache_dtype, capacity)
        *arrays, gates = cache.arrays  # sums of gates are differences of large numbers
        return replace(cache, arrays=(*arrays, gates.astype(self.sums_dtype)))
