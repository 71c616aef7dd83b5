"""RWKV-7: a delta rule that erases along another direction than it writes, as a layer."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import CallArguments
from heinsen_jax.attention.convolution import shifted
from heinsen_jax.attention.matrix_state import (
    Gates,
    MatrixStateAttention,
    MatrixStateConfig,
    MatrixStates,
    OfHeads,
    delta_rule,
    l2_normalized,
)
from heinsen_jax.attention.parameters import (
    LayerNorm,
    LayerOptions,
    LowRank,
    in_float32,
    linear,
    parameter,
)
from heinsen_jax.typing import Array, Features, config_dataclass

LARGEST_DECAY = math.exp(-0.5)
"""Largest negative log decay."""
PARTS = "query", "decay", "key", "value", "rate", "gate"
"""Projections, each of its own mixture of a token and the one before it."""


@config_dataclass
class RWKV7Config(MatrixStateConfig):
    """Configuration of RWKV-7."""

    has_erasure = True
    decay_rank: pydantic.PositiveInt | None = None
    """Rank of the map to decays; 2.5 sqrt(model_dim), rounded to a multiple of 32, when None."""
    rate_rank: pydantic.PositiveInt | None = None
    """Rank of the map to the shares that are erased; as `decay_rank` when None."""
    gate_rank: pydantic.PositiveInt | None = None
    """Rank of the map to the output gate; 5 sqrt(model_dim), rounded to a multiple of 32, when
    None."""

    def __post_init__(self) -> None:
        for name in ("output_gate", "gate_activation"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: rwkv7 has a gate of its own, of low rank; leave it out")

    def ranks(self, model_dim: int) -> tuple[int, int, int]:
        """The ranks of the maps to decays, shares and gates, with the defaults resolved."""

        def default(factor: float) -> int:
            return max(round(factor * math.sqrt(model_dim) / 32), 1) * 32

        return (
            self.decay_rank or default(2.5),
            self.rate_rank or self.decay_rank or default(2.5),
            self.gate_rank or default(5),
        )


class RWKV7Attention(MatrixStateAttention[RWKV7Config]):
    """RWKV-7 ("Goose"): the time mixing of RWKV with a generalized delta rule.

        S_t = (Diag(exp g_t) - (a_t * e_t) e_t^T) S_(t-1) + k_t v_t^T,    o_t = S_t^T r_t
        y = ((norm(o) + (r . (u * k)) v) * (sigmoid(x_g G) G')) Wo

    with x_i = x_t + m_i * (x_(t-1) - x_t) for each projection i, r = x_r Wr, v = x_v Wv,

        g = -exp(-1/2) sigmoid(tanh(x_w W) W' + b),    a = sigmoid(x_a A A' + c)
        e = (x_k Wk * p) / |x_k Wk * p|,               k = x_k Wk * (1 + (a - 1) * q)

    of each head, vectors m, p, q and u of parameters, and a layer norm of each head. The published
    model also mixes v with the values of its first layer, which a layer by itself does not have.
    At initialization m = 1/2, p = 0.71, q = 1.02, u = -0.04 as published in the middle of the model
    (Peng et al., 2025), and the biases b rise from -6 to 0 over the features.

    References:
      Peng et al., 2025, RWKV-7 "Goose", arXiv:2503.14456, equations 3 to 17.
    """

    Config = RWKV7Config
    _op = staticmethod(partial(delta_rule, scale=1.0))
    softmax_projections = ("value",)

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        model_dim, heads, config = self.model_dim, self.num_heads, self.config
        self.num_key_heads, self.num_steps = heads, 1
        self.key_depth, self.value_depth = config.depths(model_dim, heads)
        keys, values = heads * self.key_depth, heads * self.value_depth
        ones, rank = nnx.initializers.constant, config.lora_rank

        def vector(value: float, size: int) -> nnx.Param[Array]:
            return parameter(ones(value), size, kind="vector", **options)

        self.mixes = nnx.Dict({name: vector(0.5, model_dim) for name in PARTS})
        axes = "embed", "heads"
        self.query, self.key, self.value = (
            linear(model_dim, width, axes, use_bias=False, lora_rank=rank, **options)
            for width in (keys, keys, values)
        )
        decay, rate, gate = config.ranks(model_dim)
        self.decay = LowRank(model_dim, decay, keys, **options)
        assert self.decay.up.bias is not None
        bias = self.decay.up.bias
        bias[...] = jnp.linspace(-6, 0, keys, dtype=bias.dtype)
        self.rate = LowRank(model_dim, rate, keys, **options)
        self.gate = LowRank(model_dim, gate, values, use_bias=False, **options)
        self.key_scale, self.key_rate = vector(0.71, keys), vector(1.02, keys)
        self.bonus = vector(-0.04, keys)
        epsilon = config.norm_epsilon or 1e-5 * self.value_depth
        self.norm = LayerNorm(self.value_depth, epsilon=epsilon, has_parameters=False, **options)
        self.norm_scale, self.norm_bias = vector(1.0, values), vector(0.0, values)
        output = values, model_dim, ("heads", "embed")
        self.output = linear(*output, use_bias=False, lora_rank=rank, **options)
        self.convolutions = nnx.List([])

    def apply(
        self, x: Features, call: CallArguments[MatrixStates]
    ) -> tuple[Features, MatrixStates | None]:
        state = self.init_state(x.shape[:-2]) if call.state is None else call.state
        (before, _), last = shifted(x, 2, state.convolutions[0], call.segment_ids)

        def mixed(part: str) -> Features:
            weight = self.mixes[part][...].astype(x.dtype)
            return x + jnp.broadcast_to(weight, x.shape) * (before - x)

        def heads(x: Array, depth: int = self.key_depth) -> OfHeads:
            return x.reshape(*x.shape[:-1], self.num_heads, depth)

        def vector(parameter: nnx.Param[Array], like: Array) -> Array:
            value = parameter[...].astype(like.dtype).reshape(like.shape[-2:])
            return jnp.broadcast_to(value, like.shape)

        logits = self.decay.up(jnp.tanh(self.decay.down(mixed("decay"))))
        log_decay = heads(-LARGEST_DECAY * jax.nn.sigmoid(in_float32(logits)))
        share = heads(jax.nn.sigmoid(in_float32(self.rate(mixed("rate")))))
        plain = heads(in_float32(self.key(mixed("key"))))
        erased = l2_normalized(plain * vector(self.key_scale, plain))
        key = plain * (1 + (share - 1) * vector(self.key_rate, plain))
        # The op decays the state before it reads; the published rule reads before.
        gates: Gates = {
            "log_decay": log_decay,
            "erase": share * jnp.exp(log_decay),
            "erase_key": erased * jnp.exp(-log_decay),
        }
        query = heads(self.query(mixed("query")))
        value = heads(self.value(mixed("value")), self.value_depth)
        y, matrix = self.recur(query, key.astype(value.dtype), value, gates, call)
        y = self.norm(y.astype(value.dtype)).astype(value.dtype)
        y = y * vector(self.norm_scale, y) + vector(self.norm_bias, y)
        itself = jnp.sum(in_float32(query) * key * vector(self.bonus, key), -1, keepdims=True)
        y = y + itself.astype(value.dtype) * value
        gate = self.gate.up(jax.nn.sigmoid(self.gate.down(mixed("gate"))))
        y = self.output(y.reshape(gate.shape) * gate)
        return y, self._state_after(x, matrix, (last,), call)

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> MatrixStates:
        state = super().init_state(batch_shape)
        last = jnp.zeros((*batch_shape, 1, self.model_dim), self.cache_dtype)
        return MatrixStates(state.matrix, (last,))
