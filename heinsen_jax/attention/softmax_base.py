"""Base class of all forms of softmax attention as layers."""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, Unpack

import numpy as np

from heinsen_jax.attention.base import CallArguments, OpKeywords
from heinsen_jax.attention.cache import TokenCache, WindowCache
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.ops.masks import Causal, Mask
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import Array, Integer, Keys, Mixed, Query, Values, config_dataclass

TokenStates: TypeAlias = TokenCache | WindowCache


class MaskKeywords(OpKeywords, total=False):
    """Keywords of `MaskedAttention.between`."""

    query_offset: int | Integer[Array, ""]
    key_value_seq_lengths: Integer[Array, "*B 2"]


@config_dataclass
class MaskedConfig(HeadsConfig):
    """Configuration of a form of softmax attention."""

    def rule(self, is_causal: bool = True) -> Mask | None:
        """Rule for the visible keys, if causal among those up to the query; all when None. A rule
        of limited span depends only on differences of positions, except for first tokens that are
        visible to all."""
        del is_causal
        return None

    def reach(self) -> int | None:
        """Maximum distance of earlier tokens that are visible to a query, apart from first tokens
        that are visible to all; unlimited when None."""
        return None

    def num_visible(self, length: int, is_causal: bool) -> float:
        """Visible keys per query, on average; estimated from some of the queries under a rule."""
        rule = self.rule(is_causal)
        if rule is None:
            return (length + 1) / 2 if is_causal else length
        rule = rule & Causal() if is_causal else rule
        queries = np.unique(np.linspace(0, length - 1, 256).round().astype(int))
        return float(np.mean(np.sum(rule(queries[:, None], np.arange(length)[None]), 1)))

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        depths = sum(self.depths(model_dim, num_heads))
        return 2.0 * num_heads * depths * self.num_visible(length, is_causal)


MaskedT = TypeVar("MaskedT", bound=MaskedConfig)


class MaskedAttention(HeadedAttention[MaskedT, TokenStates]):
    """Softmax attention under a rule for visible keys; the state has the needed ones."""

    def with_positions(
        self, query: Query, key: Keys, before: int | Integer[Array, ""]
    ) -> tuple[Query, Keys]:
        """Queries and keys with their positions encoded, after that many tokens."""
        del before
        return query, key

    def over_all(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[OpKeywords]
    ) -> Mixed:
        """The mechanism over a complete sequence."""
        return self.between(query, key, value, **keywords)

    def between(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[MaskKeywords]
    ) -> Mixed:
        """The mechanism between any queries and keys, with keywords of `dot_product_attention`."""
        return dot_product_attention(query, key, value, mask=self.config.rule(), **keywords)

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[TokenStates]
    ) -> tuple[Mixed, TokenStates | None]:
        state = call.state
        query, key = self.with_positions(query, key, 0 if state is None else state.num_tokens)
        if state is None:
            return self.over_all(query, key, value, **call.keywords), None
        self.check_segments(call)
        if isinstance(state, TokenCache):
            state, offset = state.append(key, value)
            y = self.between(query, *state.tokens, is_causal=True, query_offset=offset)
            return state.or_nan(y), state
        arrays, after = state.append(key, value)
        valid = state.bounds(query.shape[-3], query.shape[:-3])
        y = self.between(
            query, *arrays, is_causal=True, query_offset=state.size, key_value_seq_lengths=valid
        )
        return y, after

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> TokenStates:
        reach = self.config.reach()
        if reach is None:
            return TokenCache.empty(batch_shape, self.token_shapes, self.cache_dtype, capacity)
        return WindowCache.empty(batch_shape, self.token_shapes, self.cache_dtype, reach)
