"""Families of models with layers of the gated delta rule and of softmax attention."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.interop.transformers.family import LlamaLike, Olmo2
from heinsen_jax.interop.transformers.rope import Rope, Size
from heinsen_jax.models import Layers
from heinsen_jax.models.pattern import Pattern, shortest_period


def default_layer_types(interval: int, number: int) -> list[str]:
    """The types of layers, of which one in each interval has softmax attention, the last."""
    return [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(number)
    ]


def layers_of(types: Sequence[str], linear: dict[str, FieldValue], softmax: Layers) -> Pattern:
    """The attention layers of these types, with options of Gated DeltaNet."""
    delta = Layers("gated_deltanet", options=linear)
    pattern = [delta if kind == "linear_attention" else softmax for kind in types]
    return tuple(shortest_period(pattern))


class OlmoHybrid(Olmo2):
    """Olmo Hybrid: layers of Gated DeltaNet, and of softmax attention as in OLMo 2."""

    model_type = "olmo_hybrid"
    architecture = "OlmoHybridForCausalLM"
    may_lack_positions = True

    rms_norm_eps: PositiveFloat = 1e-6
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Size = 4
    linear_allow_neg_eigval: bool = True
    linear_use_gate: Literal[True] = pydantic.Field(True, exclude=True)

    @pydantic.model_validator(mode="after")
    def _has_layers_of_both_kinds(self) -> "OlmoHybrid":
        if len({*self.types}) < 2:
            raise ValueError("layer_types must have layers of both kinds in olmo_hybrid")
        return self

    @property
    def types(self) -> list[str]:
        """`layer_types`, with the default resolved: every fourth layer is of softmax attention."""
        if self.layer_types is not None:
            return [*self.layer_types]
        types = default_layer_types(4, self.num_hidden_layers)
        return types if "full_attention" in types else [*types[:-1], "full_attention"]

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        heads = self.linear_num_key_heads or self.num_attention_heads
        depth = self.linear_key_head_dim or int(0.75 * self.hidden_size / heads)
        linear: dict[str, FieldValue] = {
            "num_key_heads": heads,
            "num_value_heads": self.linear_num_value_heads or self.num_attention_heads,
            "key_depth": depth,
            "value_depth": self.linear_value_head_dim or 2 * depth,
            "convolution_size": self.linear_conv_kernel_dim,
            "negative_eigenvalues": self.linear_allow_neg_eigval,
            "norm_epsilon": 1e-5,
        }
        return layers_of(self.types, linear, self.softmax(options))


class Qwen35Text(LlamaLike):
    """Qwen 3.5, dense, for text: layers of Gated DeltaNet, and of softmax attention with a gate."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    rope_names: ClassVar = {name: name for name in ("rope_theta", "partial_rotary_factor")}
    norm = "zero_centered_rms"

    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    rope: Rope = Rope(partial_rotary_factor=0.25)
    attention_bias: bool = False
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    full_attention_interval: Size | None = pydantic.Field(None, exclude=True)
    attn_output_gate: Literal[True] = pydantic.Field(True, exclude=True)
    output_gate_type: Literal["swish"] = pydantic.Field("swish", exclude=True)
    mlp_only_layers: list[int] = pydantic.Field([], exclude=True, max_length=0)
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Size = 4

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        linear: dict[str, FieldValue] = {
            "num_key_heads": self.linear_num_key_heads,
            "num_value_heads": self.linear_num_value_heads,
            "key_depth": self.linear_key_head_dim,
            "value_depth": self.linear_value_head_dim,
            "convolution_size": self.linear_conv_kernel_dim,
        }
        softmax = options | {"query_key_norm": True, "output_gate": "feature"}
        default = default_layer_types(self.full_attention_interval or 4, self.num_hidden_layers)
        return layers_of(self.layer_types or default, linear, Layers("gqa", options=softmax))
