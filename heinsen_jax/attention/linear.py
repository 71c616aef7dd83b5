"""Linear attention with feature maps, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax.numpy as jnp

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.ops.linear import LinearAttentionState, linear_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class LinearConfig(HeadsConfig):
    """Configuration of linear attention."""

    feature_map: Literal["elu1", "relu", "identity"] = "elu1"
    """Feature map of queries and keys; elu1 is elu(x) + 1."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities.all()


class LinearAttention(HeadedAttention[LinearConfig, LinearAttentionState]):
    """Linear attention; the state is a matrix and a vector per head.

    References:
      Katharopoulos et al., 2020, Transformers are RNNs, arXiv:2006.16236.
    """

    Config = LinearConfig

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[LinearAttentionState]
    ) -> tuple[Mixed, LinearAttentionState | None]:
        op = partial(linear_attention, feature_map=self.config.feature_map)
        empty = self.init_state(query.shape[:-3])
        return devices.recur(call, op, query, key, value, empty=empty)

    def flops(self, length: int, is_causal: bool = True) -> float:
        return 4.0 * self.num_heads * self.key_depth * self.value_depth

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LinearAttentionState:
        del capacity  # the same for any number of tokens
        sizes = self.num_kv_heads, self.key_depth, self.value_depth
        dtype = jnp.promote_types(self.param_dtype, jnp.float32)
        return LinearAttentionState.empty(batch_shape, *sizes, dtype)
