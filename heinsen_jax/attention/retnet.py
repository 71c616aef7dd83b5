"""Retention: linear attention with rotary positions and a fixed decay by head, as a layer."""

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
import numpy as np

from heinsen_jax.attention.base import CallArguments
from heinsen_jax.attention.matrix_state import (
    Gates,
    HeadsAndStates,
    MatrixStateAttention,
    MatrixStateConfig,
    MatrixStates,
)
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.attention.rotary import check_pairs
from heinsen_jax.ops.rotary import rotary
from heinsen_jax.typing import Features, config_dataclass, wide


@config_dataclass
class RetentionConfig(MatrixStateConfig):
    """Configuration of retention."""

    value_width = 2.0
    depth_multiple = 2  # rotations need pairs of features


class RetentionAttention(MatrixStateAttention[RetentionConfig]):
    """Retention (RetNet): linear attention with rotary queries and keys, and a decay by head.

        S_t = (1 - 2^(-5 - n)) S_(t-1) + k_t v_t^T,    o_t = S_t^T q_t / sqrt(K)

    for head n = 0, 1, ..., with q and k rotated in adjacent pairs of features, and an output gate.
    The RMS norm of each head replaces the published group norm. The width of values is twice the
    model's.

    References:
      Sun et al., 2023, Retentive Network, arXiv:2307.08621.
    """

    Config = RetentionConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        check_pairs(self.key_depth)

    def heads(self, x: Features, call: CallArguments[MatrixStates]) -> HeadsAndStates:
        query, key, value, after = super().heads(x, call)
        count = None if call.state is None else call.state.num_tokens
        before = 0 if count is None else count
        positions = before + jnp.arange(x.shape[-2], dtype=jnp.int32)
        return rotary(query, positions), rotary(key, positions), value, after

    def gates(self, x: Features) -> Gates:
        decay = np.log1p(-(2.0 ** (-5 - np.arange(self.num_heads))))
        dtype = wide(x)
        shape = *x.shape[:-1], self.num_heads
        return {"log_decay": jnp.broadcast_to(jnp.asarray(decay, dtype), shape)}

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> MatrixStates:
        state = super().init_state(batch_shape, capacity=capacity)
        return state._replace(num_tokens=jnp.zeros((), jnp.int32))
