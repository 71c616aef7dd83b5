"""Residual blocks around attention."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention import mechanism
from heinsen_jax.attention.convolution import CausalConvolution
from heinsen_jax.attention.parameters import NORMS, LayerOptions, linear, scaled
from heinsen_jax.models.config import GATED, LanguageModelConfig
from heinsen_jax.sharding import constrain
from heinsen_jax.typing import Array, Features, Float, Integer, PyTree, exported_tuple


@exported_tuple
class BlockState(NamedTuple):
    """State of a block.

    Attributes:
      attention: the mechanism's state.
      convolutions: the last inputs of each convolution, if any.
    """

    attention: PyTree[Array]
    convolutions: tuple[Float[Array, "*B last D"], ...] = ()


class Block(nnx.Module):
    """A residual block. For x `[..., T, D]` and h = norm(x), by kind:

        paper                      x + attention(h)
        standard, decay, llama     x' + mlp(norm(x')),    x' = x + attention(h)
        fastformer                 x' + mlp(norm(x')),    x' = h + attention(h)

    With parallel branches, mlp(norm(x)) in place of mlp(norm(x')). With `norm_after`, norms follow
    both: x + norm(attention(x)) and x' + norm(mlp(x')); if it is "both", norms precede and follow.
    Outputs of both are multiplied by `residual_multiplier`, and the MLP's by `mlp_multiplier`.
    With convolutions, as always in the decay block, they precede attention and mlp:
    attention(convolution(norm(x))). Returns the result and the state after x, or None unless
    requested.
    """

    def __init__(self, config: LanguageModelConfig, index: int, **options: Unpack[LayerOptions]):
        self.kind, self.is_causal = config.block, config.is_causal
        self.is_parallel = config.parallel_branches
        self.norm_after = config.layers[index].norm_after
        self.multiplier = config.residual_multiplier
        self.mlp_multiplier = config.mlp_multiplier
        norm = partial(NORMS[config.norm_kind], epsilon=config.norm_epsilon)
        self.norm = norm(config.model_dim, **options)
        build = mechanism(config.layer_pattern[index])
        sizes = config.model_dim, config.num_heads
        self.attention = build(*sizes, config.mechanisms()[index], **options)
        kind = config.mlp_kind
        self.has_mlp = kind is not None and config.layers[index].has_mlp
        if kind is not None and self.has_mlp:
            self.mlp_norm = norm(config.model_dim, **options)
            has_bias = config.mlp_has_bias
            build_mlp = partial(MLP, activation=kind)
            if kind in GATED:
                multiplier = config.mlp_gate_multiplier
                build_mlp = partial(GatedMLP, activation=GATED[kind], gate_multiplier=multiplier)
            sizes, rank = (config.model_dim, config.mlp_width), config.lora_rank
            self.mlp = build_mlp(*sizes, use_bias=has_bias, lora_rank=rank, **options)
        if self.norm_after == "both":
            self.output_norms = nnx.List(
                norm(config.model_dim, **options) for _ in range(2 if self.has_mlp else 1)
            )
        size, branches = config.convolution or 0, 2 if self.has_mlp else 1
        self.convolutions = nnx.List(
            CausalConvolution(size, config.model_dim, "embed", **options)
            for _ in range(branches if size else 0)
        )

    def __call__(
        self,
        x: Features,
        *,
        state: BlockState | None,
        return_state: bool,
        segment_ids: Integer[Array, "*B T"] | None = None,
    ) -> tuple[Features, BlockState | None]:
        normed, inputs, first = self.attention_input(x, state=state, segment_ids=segment_ids)
        with jax.named_scope("attention"):
            options = {"is_causal": self.is_causal, "segment_ids": segment_ids}
            attend = partial(self.attention, inputs, **options)
            earlier = None if state is None else state.attention
            if return_state:
                attended, attention = attend(state=earlier, return_state=True)
            else:
                attended, attention = attend(state=earlier), None
        x, second = self.after_attention(x, normed, attended, state=state, segment_ids=segment_ids)
        return x, BlockState(attention, first + second) if return_state else None

    def attention_input(
        self,
        x: Features,
        *,
        state: BlockState | None = None,
        segment_ids: Integer[Array, "*B T"] | None = None,
    ) -> tuple[Features, Features, tuple[Array, ...]]:
        """The input of attention.

        Returns:
          normed: norm(x), or x if norms follow, `[..., T, D]`.
          inputs: normed, or convolution(normed) with convolutions, `[..., T, D]`.
          after: the state of the convolution, if any, after x.
        """
        with jax.named_scope("norm"):
            normed = x if self.norm_after is True else self.norm(x)
        return normed, *self._convolved(normed, 0, state, segment_ids)

    def after_attention(
        self,
        x: Features,
        normed: Features,
        attended: Features,
        *,
        state: BlockState | None = None,
        segment_ids: Integer[Array, "*B T"] | None = None,
    ) -> tuple[Features, tuple[Array, ...]]:
        """The result of the block, given the output of attention.

        Args:
          x: input of the block, `[..., T, D]`.
          normed: the first result of `attention_input`, `[..., T, D]`.
          attended: output of attention, `[..., T, D]`.
          state: the state before x.
          segment_ids: segment of each token, `[..., T]`.

        Returns:
          y: the result, `[..., T, D]`.
          after: the state of the convolution of the MLP, if any, after x.
        """
        before_attention, after = x, ()
        branch = self._branch(attended, x, 0)
        x = (normed if self.kind == "fastformer" else x) + branch
        if self.has_mlp:
            with jax.named_scope("mlp"):
                inputs = before_attention if self.is_parallel else x
                inputs = inputs if self.norm_after is True else self.mlp_norm(inputs)
                inputs, after = self._convolved(inputs, 1, state, segment_ids)
                y = scaled(self.mlp_multiplier, self.mlp(inputs))
                x = x + self._branch(y, x, 1)
        return constrain(x, "tokens", None), after

    def _branch(self, y: Features, x: Features, index: int) -> Features:
        """The output of attention (0) or the MLP (1) as a branch of the residual stream x."""
        if self.norm_after:
            is_both = self.norm_after == "both"
            y = (self.output_norms if is_both else (self.norm, self.mlp_norm))[index](y)
        return scaled(self.multiplier, y.astype(x.dtype))

    def _convolved(
        self,
        x: Features,
        branch: int,
        state: BlockState | None,
        segment_ids: Integer[Array, "*B T"] | None,
    ) -> tuple[Features, tuple[Array, ...]]:
        if not self.convolutions:
            return x, ()
        before = None if state is None else state.convolutions[branch]
        with jax.named_scope("convolution"):
            x, after = self.convolutions[branch](x, state=before, segment_ids=segment_ids)
        return x, (after,)

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> BlockState:
        """The state before the first token, with a capacity in tokens."""
        attention = self.attention.init_state(batch_shape, capacity=capacity)
        return BlockState(attention, tuple(x.init_state(batch_shape) for x in self.convolutions))


def squared_relu(x: Features) -> Features:
    """max(x, 0)^2 (So et al., 2021, Primer, arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "squared_relu": squared_relu,
    "silu": jax.nn.silu,
}


class MLP(nnx.Module):
    """activation(x W1 + b1) W2 + b2, for one of `ACTIVATIONS`; without biases, if use_bias is
    False."""

    def __init__(
        self,
        narrow: int,
        wide: int,
        *,
        use_bias: bool = True,
        lora_rank: int | None = None,
        activation: str,
        **options: Unpack[LayerOptions],
    ):
        self.activation = activation
        dense = partial(linear, use_bias=use_bias, lora_rank=lora_rank, **options)
        self.up = dense(narrow, wide, ("embed", "mlp"))
        self.down = dense(wide, narrow, ("mlp", "embed"))

    def __call__(self, x: Features) -> Features:
        wide = constrain(self.up(x), "tokens", "mlp")
        return self.down(ACTIVATIONS[self.activation](wide))


class GatedMLP(nnx.Module):
    """(activation(g (x W1 + b1)) * (x W2 + b2)) W3 + b3, for a constant g and one of `ACTIVATIONS`;
    without biases, if use_bias is False.

    References:
      Shazeer, 2020, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.
    """

    def __init__(
        self,
        narrow: int,
        wide: int,
        *,
        use_bias: bool,
        lora_rank: int | None = None,
        activation: str = "silu",
        gate_multiplier: float = 1.0,
        **options: Unpack[LayerOptions],
    ):
        self.activation, self.gate_multiplier = activation, gate_multiplier
        dense = partial(linear, use_bias=use_bias, lora_rank=lora_rank, **options)
        self.gate, self.up = (dense(narrow, wide, ("embed", "mlp")) for _ in range(2))
        self.down = dense(wide, narrow, ("mlp", "embed"))

    def __call__(self, x: Features) -> Features:
        gate = ACTIVATIONS[self.activation](scaled(self.gate_multiplier, self.gate(x)))
        wide = constrain(gate * self.up(x), "tokens", "mlp")
        return self.down(wide)
