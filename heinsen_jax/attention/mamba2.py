"""Mamba-2: a selective state space model with decay by head, as a layer."""

from functools import partial
from typing import Literal, Unpack

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.matrix_state import (
    ConvolvedConfig,
    Gates,
    MatrixStateAttention,
    OfHeads,
    SoftplusDecay,
    delta_rule,
)
from heinsen_jax.attention.parameters import LayerOptions, RMSNorm, linear, parameter, scaled
from heinsen_jax.typing import Array, Features, config_dataclass


@config_dataclass
class Mamba2Config(ConvolvedConfig):
    """Configuration of Mamba-2."""

    value_width = 2.0
    key_depth: pydantic.PositiveInt = 128
    """Size of the state per value feature: the depth of B and C."""
    convolution_size: pydantic.PositiveInt = 4
    """Kernel size, in tokens, of the causal depthwise convolutions of C, B and x."""
    convolution_bias: bool = True
    """Whether these convolutions have biases."""
    num_key_heads: pydantic.PositiveInt | None = 1
    """Number of groups of heads, each with its own B and C; num_value_heads when None."""
    output_norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    """Place of the norm of the outputs: norm(o * silu(x Wg)), norm(o) * silu(x Wg), or no norm."""
    query_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the projection to C."""
    key_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the projection to B."""
    value_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the projection to x."""
    gate_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the projection to the output gate."""
    step_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the projection to steps."""
    output_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the output."""


class Mamba2Attention(MatrixStateAttention[Mamba2Config]):
    """Mamba-2: a state space model (SSD) in the notation of attention, q = C, k = B, v = x.

        S_t = exp(-exp(a) d_t) S_(t-1) + k_t (d_t v_t)^T,    o_t = S_t^T q_t + e * v_t
        d = softplus(x Wd + b),    y = norm(o * silu(x Wg)) Wo

    with q and k shared by the heads of a group, one group by default, a, b and e by head, and an
    RMS norm over the heads of a group. q, k and v are convolved and followed by SiLU. At
    initialization exp(a) is uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1], and e is
    1. The width of values is twice the model's.

    References:
      Dao and Gu, 2024, Transformers are SSMs, arXiv:2405.21060; Zuo et al., 2025, Falcon-H1,
      arXiv:2507.22448 (multipliers).
    """

    Config = Mamba2Config
    _op = staticmethod(partial(delta_rule, scale=1.0))
    norms_heads_jointly = True

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        self.step = linear(
            self.model_dim, self.num_heads, ("embed", "heads"), use_bias=False, **options
        )
        self.to_log_decay = SoftplusDecay((self.num_heads,), (self.num_heads,), **options)
        self.skip = parameter(nnx.initializers.ones, self.num_heads, kind="vector", **options)

    def make_norm(self, **options: Unpack[LayerOptions]) -> RMSNorm | None:
        if self.config.output_norm == "none":
            return None
        size, groups = self.num_heads * self.value_depth, self.num_key_heads
        return RMSNorm(size, epsilon=self.config.norm_epsilon, num_groups=groups, **options)

    def project(self, name: str, x: Features) -> Array:
        return scaled(getattr(self.config, f"{name}_multiplier"), super().project(name, x))

    def gates(self, x: Features) -> Gates:
        step, log_decay = self.to_log_decay(self.project("step", x))
        return {"log_decay": log_decay, "write": step}

    def finish(self, x: Features, y: OfHeads, value: OfHeads) -> Features:
        skip = jnp.broadcast_to(self.skip[...].astype(value.dtype)[:, None], value.shape)
        y = y.astype(value.dtype) + skip * value
        y = y.reshape(*x.shape[:-1], self.num_heads * self.value_depth)
        gate, place = self.activated_gate(x), self.config.output_norm
        y = self.norm(y) * gate if place == "before_gate" else y * gate
        y = self.norm(y) if place == "after_gate" else y
        return scaled(self.config.output_multiplier, self.output(y))
