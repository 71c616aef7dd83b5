"""Softmax attention with a truncated exponential, as a layer."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import pydantic

from heinsen_jax.attention.features import FeaturesAttention, FeaturesConfig
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.ops.taylor import check_num_terms, taylor_attention
from heinsen_jax.typing import config_dataclass


@config_dataclass
class TaylorConfig(FeaturesConfig):
    """Configuration of Taylor attention."""

    key_depth: pydantic.PositiveInt = 8
    """Head dimension of queries and keys; small, as the number of features grows with its power."""
    num_terms: pydantic.PositiveInt = 3
    """Number of terms of the series; odd, so that weights are positive."""
    allow_negative_weights: bool = False
    """Whether num_terms may be even."""

    def feature_depth(self, key_depth: int) -> int:
        terms = self.num_terms - 1
        return math.comb(key_depth + terms, terms)


class TaylorAttention(FeaturesAttention[TaylorConfig]):
    """Softmax attention with a truncated Taylor series in place of the exponential.

    The state is a matrix and a vector of C(key_depth + num_terms - 1, num_terms - 1) features per
    head, 45 by default.

    References:
      Heinsen and Kozachkov, 2026, arXiv:2602.00294; Arora et al., 2024, Based, arXiv:2402.18668.
    """

    Config = TaylorConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        check_num_terms(self.config.num_terms, self.config.allow_negative_weights)

    def _op(self) -> Callable[..., Any]:
        chosen = self.config
        return partial(
            taylor_attention,
            num_terms=chosen.num_terms,
            allow_negative_weights=chosen.allow_negative_weights,
        )
