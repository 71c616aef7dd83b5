"""mLSTM: a matrix memory with exponential gates, as a layer."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention.matrix_state import (
    Gates,
    MatrixStateAttention,
    MatrixStateConfig,
    OfHeads,
)
from heinsen_jax.attention.parameters import LayerNorm, LayerOptions, in_float32, linear, parameter
from heinsen_jax.ops.mlstm import MLSTMState, mlstm_attention, mlstm_summary
from heinsen_jax.typing import Features, config_dataclass, wide

SOFT_CAP = 15.0
"""Bound of the gates' logits, by 15 tanh(logit / 15)."""


@config_dataclass
class MLSTMConfig(MatrixStateConfig):
    """Configuration of mLSTM."""

    key_width = 0.5


class MLSTMAttention(MatrixStateAttention[MLSTMConfig]):
    """mLSTM: a matrix memory with an exponential input gate and a forget gate.

        C_t = f_t C_(t-1) + i_t k_t v_t^T,    n_t = f_t n_(t-1) + i_t k_t
        y = (norm(C^T q / max(|n . q|, 1)) * sigmoid(x Wg)) Wo,    norm(o) = w layer_norm(o)
        log i = cap(x Wi + bi),    log f = log sigmoid(cap(x Wf + bf))

    with cap(x) = 15 tanh(x / 15), and a layer norm of each head, scaled by feature. At
    initialization bi = 0, and bf is linear from 3 in the first head to 6 in the last. (Published:
    gates whose weights start at 0, and bi normal with standard deviation 0.1.) The width of keys is
    half the model's.

    References:
      Beck et al., 2024, xLSTM, arXiv:2405.04517; Beck et al., 2025, xLSTM 7B, arXiv:2503.13427.
    """

    Config = MLSTMConfig
    _op = staticmethod(mlstm_attention)
    _summary = staticmethod(mlstm_summary)
    state_type = MLSTMState
    gate_activation = "sigmoid"

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        epsilon = self.config.norm_epsilon or 1e-6
        self.norm = LayerNorm(self.value_depth, epsilon=epsilon, has_parameters=False, **options)
        values = self.num_heads * self.value_depth
        self.norm_scale = parameter(nnx.initializers.ones, values, kind="vector", **options)
        axes = "embed", "heads"
        self.input_gate, self.forget_gate = (
            linear(self.model_dim, self.num_heads, axes, **options) for _ in range(2)
        )
        dtype = wide(options["param_dtype"])
        assert self.input_gate.bias is not None
        assert self.forget_gate.bias is not None
        self.input_gate.bias[...] = jnp.zeros(self.num_heads, dtype)
        self.forget_gate.bias[...] = jnp.linspace(3, 6, self.num_heads, dtype=dtype)

    def gates(self, x: Features) -> Gates:
        logits = (in_float32(gate(x)) for gate in (self.input_gate, self.forget_gate))
        log_input, forget = (SOFT_CAP * jnp.tanh(x / SOFT_CAP) for x in logits)
        return {"log_input_gate": log_input, "log_forget_gate": jax.nn.log_sigmoid(forget)}

    def finish(self, x: Features, y: OfHeads, value: OfHeads) -> Features:
        y = self.norm(y).astype(y.dtype)
        y = y.reshape(*x.shape[:-1], self.num_heads * self.value_depth)
        scale = jnp.broadcast_to(self.norm_scale[...].astype(y.dtype), y.shape)
        return self.output(y * scale * self.activated_gate(x).astype(y.dtype))
