"""Softmax attention over the last tokens and log-attention over earlier ones, as a layer."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.features import FeaturesConfig
from heinsen_jax.attention.heads import HeadedAttention
from heinsen_jax.attention.log import hedgehog_features
from heinsen_jax.attention.parameters import (
    LayerOptions,
    decay_projection,
    identity,
    in_float32,
    parameter,
)
from heinsen_jax.attention.rotary import RotaryOptions
from heinsen_jax.ops.arguments import positions_in_segments, segment_starts
from heinsen_jax.ops.log_attention import Chunked
from heinsen_jax.ops.log_window import LogWindowState, log_window_attention
from heinsen_jax.typing import (
    Array,
    Features,
    Float,
    Integer,
    Keys,
    Mixed,
    Query,
    Values,
    config_dataclass,
)


@config_dataclass
class LogWindowConfig(RotaryOptions, FeaturesConfig):
    """Configuration of softmax attention over a window, with log-attention over earlier tokens."""

    window_size: pydantic.PositiveInt = 64
    """Window size in tokens, including the query."""
    features: Literal["hedgehog", "identity"] = "hedgehog"
    """Log features of queries and keys for earlier tokens. hedgehog: log softmax(x W) and
    log softmax(-x W), with a trained matrix W per head; twice as many features. identity: the
    queries and keys themselves."""
    decay: Literal["head"] | None = None
    """Decay of earlier tokens at every token; no decay when None. head: at a trained rate that
    depends on the token, one per key/value head."""
    max_timescale: Annotated[float, pydantic.Field(ge=1)] = 4096.0
    """Initial time constant, in tokens, of the slowest-decaying head; the fastest starts at the
    window size, if it is smaller. Unused without decay."""
    positions: Literal["none", "rotary"] = "none"
    """Position encoding of queries and keys, before their log features: none; or rotary, which
    rotates them by angles proportional to their positions (RoPE)."""
    implementation: Literal["scan", "chunked", "gpu"] | Chunked | None = None
    """Implementation of log-attention; chosen automatically when None. "gpu" is experimental."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, streaming=True, segments=True, mergeable=True)

    def feature_depth(self, key_depth: int) -> int:
        return key_depth * (2 if self.features == "hedgehog" else 1)

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        key_depth, value_depth = self.depths(model_dim, num_heads)
        window = min(self.window_size, length)
        visible = window - window * (window - 1) / (2 * length)
        window_flops = 2.0 * num_heads * (key_depth + value_depth) * visible
        return window_flops + super().flops(model_dim, num_heads, length, is_causal)


class LogWindowAttention(HeadedAttention[LogWindowConfig, LogWindowState]):
    """Softmax attention over the last w tokens and log-attention over all earlier ones, with one
    sum.

        Y_t = sum_s softmax_s(A_ts) v_s
        A_ts = q_t . k_s / sqrt(K)                      if t - s < w
        A_ts = LSE_f(phi(q_t)_f + psi(k_s)_f) + g_t + sum_(s<r<=t-w) d_r     if t - s >= w
        g_t = q_t . u + b
        d_r = log sigmoid(x_r Wd + bd)                  0 without decay

    phi and psi are log features, Hedgehog's by default. The trained log weight g of earlier tokens,
    from the query without its position, is needed since Hedgehog's features ignore the norm of the
    query, which has no effect in log-attention alone, but here decides between both parts.
    Initially u = 0, and b is such that A = 0 for queries and keys of zeros, on both sides of the
    window: log(K / 2) for Hedgehog's 2 K features of -log K, and -log K for K features of 0.
    LoLCATs (Zhang et al., 2024) has one trained factor per head in place of exp(g), and adds sums;
    here averages are merged with their exact normalizers. Tokens decay only outside the window,
    whose scores stay exact. The state has the keys, values and log features of w tokens, with decay
    also their decays, and averages of all earlier tokens.

    Raises:
      ValueError: positions are rotary and key_depth is odd; and as in `HeadedAttention`.

    References:
      Zhang et al., 2024, LoLCATs: On Low-Rank Linearizing of Large Language Models,
      arXiv:2410.10254; Heinsen, 2024, Softmax Attention with Constant Cost per Token,
      arXiv:2404.05843.
    """

    Config = LogWindowConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        if self.config.positions == "rotary":
            self.config.rotated(self.key_depth)
        if self.config.features == "hedgehog":
            shape = self.key_depth, self.key_depth
            self.query_features = parameter(
                identity, self.num_heads, *shape, kind="matrix", **options
            )
            self.key_features = parameter(
                identity, self.num_kv_heads, *shape, kind="matrix", **options
            )
        zeros = nnx.initializers.zeros
        self.log_weight = parameter(zeros, self.num_heads, self.key_depth, kind="vector", **options)
        depth, is_hedgehog = self.key_depth, self.config.features == "hedgehog"
        neutral = nnx.initializers.constant(math.log(depth / 2 if is_hedgehog else 1 / depth))
        self.log_weight_bias = parameter(neutral, self.num_heads, kind="vector", **options)
        if self.config.decay is not None:
            longest = self.config.max_timescale
            self.decay_proj = decay_projection(
                self.model_dim,
                self.num_kv_heads,
                longest,
                min_timescale=min(self.config.window_size, longest),
                **options,
            )

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"window_size": length // 4}

    @property
    def num_features(self) -> int:
        """Number of log features of a query or key."""
        return self.config.feature_depth(self.key_depth)

    def apply(
        self, x: Features, call: CallArguments[LogWindowState]
    ) -> tuple[Features, LogWindowState | None]:
        log_decay = None
        if self.config.decay is not None:
            log_decay = jax.nn.log_sigmoid(in_float32(self.decay_proj(x)))
        with jax.named_scope("mechanism"):
            y, state = self.attend(*self.heads(x), call, log_decay)
        return self.out_proj(y), state

    def attend(
        self,
        query: Query,
        key: Keys,
        value: Values,
        call: CallArguments[LogWindowState],
        log_decay: Float[Array, "*B T G"] | None = None,
    ) -> tuple[Mixed, LogWindowState | None]:
        wide, weight, bias = map(
            in_float32, (query, self.log_weight[...], self.log_weight_bias[...])
        )
        log_weight = jnp.einsum("...nk,nk->...n", wide, weight)
        log_weight += jnp.broadcast_to(bias, log_weight.shape)
        if self.config.positions == "rotary":
            positions = self._positions(query.shape[:-2], call)
            query, key = (self.config.rotate(x, positions) for x in (query, key))
        features = query, key
        if self.config.features == "hedgehog":
            features = (
                hedgehog_features(query, self.query_features[...]),
                hedgehog_features(key, self.key_features[...]),
            )
        return devices.recur(
            call,
            partial(_log_window_attention, self.config),
            *(query, key, value, *features, log_weight),
            *(() if log_decay is None else (log_decay,)),
            empty=self.init_state(query.shape[:-3]),
            summary=partial(_summary, self.config),
        )

    def _positions(
        self, shape: tuple[int, ...], call: CallArguments[LogWindowState]
    ) -> Integer[Array, "*B T"]:
        """Positions in segments, so that features do not depend on other segments."""
        starts = None if call.segment_ids is None else segment_starts(call.segment_ids, None)
        before = None if call.state is None else call.state.num_tokens[..., 0]
        return positions_in_segments(starts, shape, before)

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LogWindowState:
        return LogWindowState.empty(
            batch_shape,
            self.num_kv_heads,
            self.key_depth,
            self.value_depth,
            self.num_features,
            self.config.window_size,
            self.sums_dtype,
            has_decay=self.config.decay is not None,
        )


def _log_window_attention(
    config: LogWindowConfig, *arrays: Array, is_causal: bool, **options: Any
) -> Any:
    del is_causal
    *tokens, log_weight = arrays[:6]
    return log_window_attention(
        *tokens,
        log_weight=log_weight,
        log_decay=arrays[6] if len(arrays) > 6 else None,
        local_window_size=config.window_size,
        implementation=config.implementation,
        **options,
    )


def _summary(
    config: LogWindowConfig,
    *arrays: Array,
    key_value_seq_lengths: Integer[Array, "*B 2"] | None = None,
) -> LogWindowState:
    """The state of a device's tokens alone, starting at the first token of the given range."""
    _, key, value, _, features, _, *decay = arrays
    first = None if key_value_seq_lengths is None else key_value_seq_lengths[..., 0]
    return LogWindowState.of_tokens(
        key, value, features, *decay, local_window_size=config.window_size, first=first
    )
