"""Linear attention with feature maps, as a layer."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from heinsen_jax.attention.features import FeaturesAttention, FeaturesConfig
from heinsen_jax.ops.linear import linear_attention
from heinsen_jax.typing import config_dataclass


@config_dataclass
class LinearConfig(FeaturesConfig):
    """Configuration of linear attention."""

    feature_map: Literal["elu1", "relu", "identity"] = "elu1"
    """Feature map of queries and keys; elu1 is elu(x) + 1."""


class LinearAttention(FeaturesAttention[LinearConfig]):
    """Linear attention; the state is a matrix and a vector per head.

    References:
      Katharopoulos et al., 2020, Transformers are RNNs, arXiv:2006.16236.
    """

    Config = LinearConfig

    def _op(self) -> Callable[..., Any]:
        return partial(linear_attention, feature_map=self.config.feature_map)
