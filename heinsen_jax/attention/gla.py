"""Gated linear attention, as a layer."""

from typing import Unpack

import jax
import pydantic

from heinsen_jax.attention.matrix_state import Gates, MatrixStateAttention, MatrixStateConfig
from heinsen_jax.attention.parameters import LayerOptions, LowRank, in_float32
from heinsen_jax.typing import Features, config_dataclass

TEMPERATURE = 16.0
"""Divisor of log decays, which makes them small at initialization."""


@config_dataclass
class GatedLinearConfig(MatrixStateConfig):
    """Configuration of gated linear attention."""

    key_width = 0.5
    decay_rank: pydantic.PositiveInt = 16
    """Rank of the map from tokens to decays."""


class GatedLinearAttention(MatrixStateAttention[GatedLinearConfig]):
    """Gated linear attention: each key feature decays at a rate that depends on the token.

        S_t = Diag(exp g_t) S_(t-1) + k_t v_t^T,    g = log sigmoid(x Wf Wf' + b) / 16

    with an output gate. The width of keys is half the model's.

    References:
      Yang et al., 2024, Gated Linear Attention Transformers, arXiv:2312.06635.
    """

    Config = GatedLinearConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        keys = self.num_heads * self.key_depth
        self.decay = LowRank(self.model_dim, self.config.decay_rank, keys, **options)

    def gates(self, x: Features) -> Gates:
        decay = jax.nn.log_sigmoid(in_float32(self.decay(x))) / TEMPERATURE
        return {"log_decay": decay.reshape(*x.shape[:-1], self.num_heads, self.key_depth)}
