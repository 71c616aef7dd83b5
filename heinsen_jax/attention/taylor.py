"""Softmax attention with a truncated exponential, as a layer."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Unpack

import jax.numpy as jnp
import pydantic

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.ops.linear import LinearAttentionState
from heinsen_jax.ops.taylor import check_num_terms, taylor_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class TaylorConfig(HeadsConfig):
    """Configuration of Taylor attention."""

    key_depth: pydantic.PositiveInt = 8
    """Head dimension of queries and keys; small, as the number of features grows with its power."""
    num_terms: pydantic.PositiveInt = 3
    """Number of terms of the series; odd, so that weights are positive."""
    allow_negative_weights: bool = False
    """Whether num_terms may be even."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities.all()


class TaylorAttention(HeadedAttention[TaylorConfig, LinearAttentionState]):
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

    @property
    def num_features(self) -> int:
        terms = self.config.num_terms - 1
        return math.comb(self.key_depth + terms, terms)

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[LinearAttentionState]
    ) -> tuple[Mixed, LinearAttentionState | None]:
        chosen = self.config
        op = partial(
            taylor_attention,
            num_terms=chosen.num_terms,
            allow_negative_weights=chosen.allow_negative_weights,
        )
        empty = self.init_state(query.shape[:-3])
        return devices.recur(call, op, query, key, value, empty=empty)

    def flops(self, length: int, is_causal: bool = True) -> float:
        return 4.0 * self.num_heads * self.num_features * self.value_depth

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> LinearAttentionState:
        del capacity  # the same for any number of tokens
        sizes = self.num_kv_heads, self.num_features, self.value_depth
        dtype = jnp.promote_types(self.param_dtype, jnp.float32)
        return LinearAttentionState.empty(batch_shape, *sizes, dtype)
