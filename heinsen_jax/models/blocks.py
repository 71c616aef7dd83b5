"""Residual blocks: what stands around attention in a layer."""

from typing import Any

import jax
from flax import nnx

from heinsen_jax.attention import mechanism
from heinsen_jax.attention.layers import layer_norm, linear
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.sharding import constrain
from heinsen_jax.typing import Array


class Block(nnx.Module):
    """A residual block. For x `[..., T, D]` and h = norm(x), by its kind:

        paper         x + attention(h)
        standard      x' + mlp(norm(x')),    x' = x + attention(h)
        fastformer    x' + mlp(norm(x')),    x' = h + attention(h)

    Returned with it: the attention's state after x, or None if it is not wanted.
    """

    def __init__(self, config: LanguageModelConfig, turn: int, **options: Any):
        self.kind, self.is_causal = config.block, config.is_causal
        self.norm = layer_norm(config.model_dim, **options)
        build = mechanism(config.turns[turn])
        sizes = config.model_dim, config.num_heads
        self.attention = build(*sizes, config.mechanisms()[turn], **options)
        if self.kind != "paper":
            self.mlp_norm = layer_norm(config.model_dim, **options)
            wide = config.mlp_ratio * config.model_dim
            has_bias = self.kind == "standard"
            self.mlp = Perceptron(config.model_dim, wide, use_bias=has_bias, **options)

    def __call__(self, x: Array, *, state: Any, return_state: bool) -> tuple[Array, Any]:
        with jax.named_scope("norm"):
            normed = self.norm(x)
        with jax.named_scope("attention"):
            options = {"is_causal": self.is_causal, "state": state, "return_state": return_state}
            y = self.attention(normed, **options)
            y, state = y if return_state else (y, None)
        x = (normed if self.kind == "fastformer" else x) + y.astype(x.dtype)
        if self.kind != "paper":
            with jax.named_scope("mlp"):
                x = x + self.mlp(self.mlp_norm(x)).astype(x.dtype)
        return constrain(x, "tokens", None), state


class Perceptron(nnx.Module):
    """GELU(x W1 + b1) W2 + b2; without b1 and b2, if use_bias is False."""

    def __init__(self, narrow: int, wide: int, *, use_bias: bool = True, **options: Any):
        options["use_bias"] = use_bias
        self.up = linear(narrow, wide, ("embed", "mlp"), **options)
        self.down = linear(wide, narrow, ("mlp", "embed"), **options)

    def __call__(self, x: Array) -> Array:
        wide = constrain(self.up(x), "tokens", "mlp")
        return self.down(jax.nn.gelu(wide, approximate=False))
