"""Log-attention as a layer: the residual branch of Heinsen's (2024) language model."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Capabilities
from heinsen_jax.attention.cache import WindowCache
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig, linear
from heinsen_jax.ops.log_attention import Chunked, LogAttentionState, log_attention
from heinsen_jax.typing import Array

LONGEST_MEMORY = 4096.0  # tokens, at first


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class LogConfig(HeadsConfig):
    """Of log-attention."""

    gated: bool = True
    """Whether a gated linear unit comes before the output's projection, as in Heinsen's block."""
    window_size: pydantic.PositiveInt | None = None
    """Tokens a query sees, itself included; all when None."""
    decay: Literal["head", "feature"] | None = None
    """What fades at every token, at a rate that is a learned function of it: all of a head at once,
    or each of its key features; nothing when None."""
    implementation: Literal["reference", "scan", "chunked", "gpu"] | Chunked | None = None
    """Of `log_attention`; None chooses."""


class LogAttention(HeadedAttention):
    """Projections, log-attention, and a gated output; no parameter is in the attention itself.

        q | k | log v = x W1 + b1                   of each key/value head, next to one another
        y = GLU(log_attention(q, k, log v) W2 + b2) W3        GLU(a, b) = a * sigmoid(b)

    Heads are concatenated. The branch takes log Y as it is: values are never formed. Decay, where
    there is any, is log sigmoid(x Wd + bd), and lasts for 1 to 4096 tokens at first.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """

    Config = LogConfig
    capabilities = Capabilities(
        causal=True, bidirectional=True, streaming=True, cross=True, segments=True
    )

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: LogConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        if self.config.window_size is not None:
            self.capabilities = Capabilities(causal=True, streaming=True, segments=True)
        if self.config.decay is not None:
            rates = self.num_kv_heads * self._rates_of_a_head
            self.fade = linear(model_dim, rates, ("embed", "heads"), **options)
            memories = jnp.geomspace(1.0, LONGEST_MEMORY, rates, dtype=param_dtype)
            assert self.fade.bias is not None
            self.fade.bias[...] = jnp.log(memories)  # log sigmoid(b) is about -exp(-b)

    @property
    def _rates_of_a_head(self) -> int:
        return {None: 0, "head": 1, "feature": self.key_depth}[self.config.decay]

    def mix(
        self,
        x: Array,
        *,
        source: Array | None,
        is_causal: bool,
        segment_ids: Array | None,
        state: Any,
    ) -> tuple[Array, Any]:
        query, key, log_value = self.heads(x, source)
        log_decay = None
        if self.config.decay is not None:
            log_decay = jax.nn.log_sigmoid(self.fade(x if source is None else source))
            log_decay = log_decay.reshape(*key.shape[:-1], self._rates_of_a_head)
        attend = self._over_window if isinstance(state, WindowCache) else self._over_all
        options = {"is_causal": is_causal, "segment_ids": segment_ids, "state": state}
        with jax.named_scope("log_attention"):
            log_y, state = attend(query, key, log_value, log_decay, **options)
        return self.back(log_y), state

    def _over_all(self, query, key, log_value, log_decay, *, is_causal, segment_ids, state):
        if log_decay is not None and self.config.decay == "head":
            log_decay = log_decay[..., 0]
        result = log_attention(
            query,
            key,
            log_value,
            is_causal=is_causal,
            segment_ids=segment_ids,
            local_window_size=self.config.window_size,
            log_decay=log_decay,
            initial_state=state,
            return_state=state is not None,
            implementation=self.config.implementation,
        )
        return result if state is not None else (result, None)

    def _over_window(self, query, key, log_value, log_decay, *, is_causal, segment_ids, state):
        """Over the tokens of the window before these, too."""
        del is_causal
        if segment_ids is not None:
            raise NotImplementedError(
                "LogAttention: a window and segment_ids together with a state"
            )
        new = (key, log_value) if log_decay is None else (key, log_value, log_decay)
        arrays, after = state.append(*new)
        padding = [(0, 0)] * query.ndim
        padding[-3] = (state.size, 0)
        there = jnp.stack([state.first, jnp.asarray(arrays[0].shape[-3])])
        log_decay = arrays[2] if log_decay is not None else None
        if log_decay is not None and self.config.decay == "head":
            log_decay = log_decay[..., 0]
        log_y = log_attention(
            jnp.pad(query, padding),
            *arrays[:2],
            key_value_seq_lengths=jnp.broadcast_to(there, (*query.shape[:-3], 2)),
            local_window_size=self.config.window_size,
            log_decay=log_decay,
            implementation=self.config.implementation,
        )
        return log_y[..., state.size :, :, :], after

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LogAttentionState | WindowCache:
        del capacity  # the same for any number of tokens
        groups, dtype = self.num_kv_heads, jnp.promote_types(self.param_dtype, jnp.float32)
        if self.config.window_size is None:
            sizes = groups, self.key_depth, self.value_depth
            state = LogAttentionState.empty(batch_shape, *sizes, dtype)
            if self.config.decay is None:
                return state
            return LogAttentionState(state.log_s, state.log_z, jnp.zeros_like(state.log_z))
        depths = self.key_depth, self.value_depth, self._rates_of_a_head
        shapes = [(groups, depth) for depth in depths if depth]
        return WindowCache.empty(batch_shape, shapes, dtype, self.config.window_size - 1)
