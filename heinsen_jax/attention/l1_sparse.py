"""Attention by L1 distances along the edges of a graph, as a layer."""

from typing import Unpack

import jax.numpy as jnp
import numpy as np
import pydantic

from heinsen_jax.attention.base import Capabilities
from heinsen_jax.attention.l1 import L1Config
from heinsen_jax.attention.softmax_base import MaskedAttention, MaskKeywords
from heinsen_jax.ops.l1_sparse import l1_sparse_attention
from heinsen_jax.typing import Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class L1SparseConfig(L1Config):
    """Configuration of sparse L1 attention."""

    window_size: pydantic.PositiveInt = 16
    """Number of nearest tokens that a query attends to, itself included; on each side if not
    causal."""
    far: bool = True
    """Whether it also attends to tokens 2, 4, 8, ... windows away: about log2 T more."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True)

    def distances(self, length: int) -> np.ndarray:
        """Distances from a query to the tokens that it attends to, below `length`."""
        near = self.window_size
        far = near * 2 ** np.arange(1, 64) if self.far and near < length else []
        distances = [*range(min(near, length)), *(int(d) for d in far if 0 < d < length)]
        return np.array(distances, np.int32)

    def num_visible(self, length: int, is_causal: bool) -> float:
        count = len(self.distances(length))
        return count if is_causal else 2 * count - 1


class L1SparseAttention(MaskedAttention[L1SparseConfig]):
    """L1 attention along the edges of a graph: to the nearest tokens, and at doubling distances.

    `l1_sparse_attention` accepts any graph; this graph is for sequences. The state has all keys and
    values.
    """

    Config = L1SparseConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"window_size": length // 16}

    def between(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[MaskKeywords]
    ) -> Mixed:
        query_offset = keywords.get("query_offset", 0)
        length, sources = query.shape[-3], key.shape[-3]
        distances = self.config.distances(sources)
        if not keywords.get("is_causal", True):
            distances = np.concatenate([distances, -distances[1:]])
        at = (np if isinstance(query_offset, int) else jnp).arange(length, dtype=np.int32)[:, None]
        source = query_offset + at - distances[None]
        valid = (source >= 0) & (source < sources)
        if isinstance(query_offset, int):
            edges = np.stack([np.nonzero(valid)[0], source[valid]], -1)
        else:  # the number of edges is unknown: invalid ones end at an additional query
            padding = [(0, 0)] * query.ndim
            padding[-3] = (0, 1)
            query = jnp.pad(query, padding)
            ends = jnp.where(valid, at, length), jnp.where(valid, source, 0)
            edges = jnp.stack([x.reshape(-1) for x in ends], -1)
        bias = self.config.denominator_bias
        y = l1_sparse_attention(query, key, value, edges, denominator_bias=bias)
        return y[..., :length, :, :]
