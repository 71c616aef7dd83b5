"""Attention by random features, as a layer."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import pydantic

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.ops.log_attention import HeinsenAttentionState
from heinsen_jax.ops.performer import orthogonal_features, performer_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class PerformerConfig(HeadsConfig):
    """Configuration of Performer attention."""

    num_features: pydantic.PositiveInt | None = None
    """Number of random features per head; key_depth * log(key_depth) by default."""
    seed: int = 0
    """Seed of the random features, which are not trained."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities.all()


class PerformerAttention(HeadedAttention[PerformerConfig, HeinsenAttentionState]):
    """FAVOR+: an estimate of softmax attention at constant cost per token.

    References:
      Choromanski et al., 2021, Rethinking Attention with Performers, arXiv:2009.14794.
    """

    Config = PerformerConfig

    @property
    def num_features(self) -> int:
        default = math.ceil(self.key_depth * math.log(max(self.key_depth, 3)))
        return self.config.num_features or default

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[HeinsenAttentionState]
    ) -> tuple[Mixed, HeinsenAttentionState | None]:
        seed = jax.random.key(self.config.seed)
        features = orthogonal_features(seed, self.num_features, self.key_depth)
        op = partial(performer_attention, projection=features)
        empty = self.init_state(query.shape[:-3])
        return devices.recur(call, op, query, key, value, empty=empty)

    def flops(self, length: int, is_causal: bool = True) -> float:
        return 4.0 * self.num_heads * self.num_features * self.value_depth

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> HeinsenAttentionState:
        del capacity  # the same for any number of tokens
        sizes = self.num_kv_heads, self.num_features, self.value_depth
        dtype = jnp.promote_types(self.param_dtype, jnp.float32)
        return HeinsenAttentionState.empty(batch_shape, *sizes, dtype)
