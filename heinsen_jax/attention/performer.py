"""Attention by random features, as a layer."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pydantic

from heinsen_jax.attention.features import FeaturesAttention, FeaturesConfig
from heinsen_jax.ops.log_attention import HeinsenAttentionState
from heinsen_jax.ops.performer import orthogonal_features, performer_attention
from heinsen_jax.typing import config_dataclass


@config_dataclass
class PerformerConfig(FeaturesConfig):
    """Configuration of Performer attention."""

    num_features: pydantic.PositiveInt | None = None
    """Number of random features per head; key_depth * log(key_depth) by default."""
    seed: int = 0
    """Seed of the random features, which are not trained."""

    def feature_depth(self, key_depth: int) -> int:
        return self.num_features or math.ceil(key_depth * math.log(max(key_depth, 3)))


class PerformerAttention(FeaturesAttention[PerformerConfig]):
    """FAVOR+: an estimate of softmax attention at constant cost per token.

    References:
      Choromanski et al., 2021, Rethinking Attention with Performers, arXiv:2009.14794.
    """

    Config = PerformerConfig
    state_type = HeinsenAttentionState

    def _op(self) -> Callable[..., Any]:
        features = _features(self.config.seed, self.num_features, self.key_depth)
        return partial(performer_attention, projection=features)


@cache
def _features(seed: int, num_features: int, key_depth: int) -> Any:
    """The random features `[num_features, key_depth]`: constants in compiled functions and, up to
    rounding, the same on all platforms, whatever `jax_default_prng_impl` is."""
    with jax.ensure_compile_time_eval():
        key = jax.random.key(seed, impl="threefry2x32")
        return np.asarray(orthogonal_features(key, num_features, key_depth))
