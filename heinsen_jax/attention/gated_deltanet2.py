"""Gated DeltaNet-2: the delta rule with gates of erasure and writing by feature, as a layer."""

from typing import Unpack

import jax

from heinsen_jax.attention.kda import KimiDeltaAttention
from heinsen_jax.attention.matrix_state import Gates
from heinsen_jax.attention.parameters import LayerOptions, in_float32, linear
from heinsen_jax.typing import Features


class GatedDeltaNet2Attention(KimiDeltaAttention):
    """Gated DeltaNet-2: Kimi Delta Attention whose erasure and writing have gates of their own.

        S_t = (I - k_t (b_t * k_t)^T) Diag(exp g_t) S_(t-1) + k_t (w_t * v_t)^T
        b = sigmoid(x Wb),    w = sigmoid(x Ww)

    with b by key feature and w by value feature; all else is as in `KimiDeltaAttention`. With
    `negative_eigenvalues`, b is up to 2, and w stays.

    References:
      Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, 2026, arXiv:2605.22791.
    """

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        axes, values = ("embed", "heads"), self.num_heads * self.value_depth
        keys = self.num_heads * self.key_depth
        self.beta = linear(self.model_dim, keys, axes, use_bias=False, **options)
        self.write = linear(self.model_dim, values, axes, use_bias=False, **options)

    def gates(self, x: Features) -> Gates:
        sizes = (self.beta, self.key_depth), (self.write, self.value_depth)
        erase, write = (
            jax.nn.sigmoid(in_float32(gate(x))).reshape(*x.shape[:-1], self.num_heads, depth)
            for gate, depth in sizes
        )
        erase = 2 * erase if self.config.negative_eigenvalues else erase
        return {"log_decay": self.log_decay(x), "erase": erase, "write": write}
