"""The gated short convolution of LFM2, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import jax
import pydantic

from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.convolution import CausalConvolution
from heinsen_jax.attention.parameters import LayerOptions, linear
from heinsen_jax.typing import Array, Features, Float, config_dataclass


@config_dataclass
class ShortConvolutionConfig(AttentionConfig):
    """Configuration of the gated short convolution."""

    convolution_size: pydantic.PositiveInt = 3
    """Kernel size, in tokens, of the causal depthwise convolution."""
    use_bias: bool = False
    """Whether the projections and the convolution have biases."""
    lora_rank: pydantic.PositiveInt | None = None
    """Rank of products A B that are added to the matrices of the projections, as in LoRA; B is
    initially 0. None are added when None."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, streaming=True, segments=True, mergeable=True)

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        return 0.0  # without products of matrices


class ShortConvolution(Attention[ShortConvolutionConfig, Float[Array, "*B last D"]]):
    """A causal depthwise convolution of the last few tokens, between two gates.

        y = (x Wc * convolution(x Wb * x Wv)) Wo

    without activations and heads. The state is the last inputs of the convolution.

    References:
      Liquid AI, 2025, LFM2 Technical Report, arXiv:2511.23404.
    """

    Config = ShortConvolutionConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        width, use_bias = self.model_dim, self.config.use_bias
        dense = partial(
            linear, width, width, use_bias=use_bias, lora_rank=self.config.lora_rank, **options
        )
        self.input_gate, self.output_gate, self.value = (
            dense(("embed", "heads")) for _ in range(3)
        )
        size = self.config.convolution_size
        self.convolution = CausalConvolution(size, width, "heads", use_bias=use_bias, **options)
        self.output = dense(("heads", "embed"))

    def apply(
        self, x: Features, call: CallArguments[Float[Array, "*B last D"]]
    ) -> tuple[Features, Float[Array, "*B last D"] | None]:
        gated = self.input_gate(x) * self.value(x)
        with jax.named_scope("mechanism"):
            options = {"state": call.state, "segment_ids": call.segment_ids}
            y, after = self.convolution(gated, **options)
        y = self.output(self.output_gate(x) * y)
        return y, None if call.state is None else after

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> Float[Array, "*B last D"]:
        return self.convolution.init_state(batch_shape)
