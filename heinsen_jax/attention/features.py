"""Base class of linear attention with features of queries and keys, as layers."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.ops.linear import LinearAttentionState
from heinsen_jax.ops.log_attention import HeinsenAttentionState
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass

FeatureState: TypeAlias = LinearAttentionState | HeinsenAttentionState


@config_dataclass
class FeaturesConfig(HeadsConfig):
    """Configuration of a mechanism whose state has a vector for each feature of a key."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities.all()

    def feature_depth(self, key_depth: int) -> int:
        """Number of features of a query or key."""
        return key_depth

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        key_depth, value_depth = self.depths(model_dim, num_heads)
        return 4.0 * num_heads * self.feature_depth(key_depth) * value_depth


FeaturesT = TypeVar("FeaturesT", bound=FeaturesConfig)


class FeaturesAttention(HeadedAttention[FeaturesT, FeatureState]):
    """Linear attention with features of queries and keys: `_op`, whose state is a `state_type`."""

    state_type: ClassVar[type[FeatureState]] = LinearAttentionState

    @property
    def num_features(self) -> int:
        """Number of features of a query or key."""
        return self.config.feature_depth(self.key_depth)

    def _op(self) -> Callable[..., Any]:
        """The mechanism, a function of queries, keys and values, as configured."""
        raise NotImplementedError

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[FeatureState]
    ) -> tuple[Mixed, FeatureState | None]:
        empty = self.init_state(query.shape[:-3])
        return devices.recur(call, self._op(), query, key, value, empty=empty)

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> FeatureState:
        sizes = self.num_kv_heads, self.num_features, self.value_depth
        return self.state_type.empty(batch_shape, *sizes, self.sums_dtype)
