"""Families of models with layers of softmax attention and of other mechanisms."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.interop.transformers.family import Family, Granite, LlamaLike, Olmo2
from heinsen_jax.interop.transformers.rope import Rope, Size
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.pattern import Pattern, shortest_period
from heinsen_jax.typing import JSON


def default_layer_types(interval: int, number: int, other: str = "linear_attention") -> list[str]:
    """The types of layers, of which one in each interval is full_attention, the last."""
    return [other if (layer + 1) % interval else "full_attention" for layer in range(number)]


def layers_of(types: Sequence[str], linear: Layers, softmax: Layers) -> Pattern:
    """The attention layers of these types: `softmax` for full_attention, `linear` for others."""
    pattern = [softmax if kind == "full_attention" else linear for kind in types]
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

    def attention(self) -> Pattern:
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
        delta = Layers("gated_deltanet", options=linear)
        softmax = Layers("gqa", options=self.softmax(), norm_after=self.norm_after)
        return layers_of(self.types, delta, softmax)


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

    def attention(self) -> Pattern:
        linear: dict[str, FieldValue] = {
            "num_key_heads": self.linear_num_key_heads,
            "num_value_heads": self.linear_num_value_heads,
            "key_depth": self.linear_key_head_dim,
            "value_depth": self.linear_value_head_dim,
            "convolution_size": self.linear_conv_kernel_dim,
        }
        delta = Layers("gated_deltanet", options=linear)
        gates = {"query_key_norm": True, "output_gate": "feature"}
        softmax = Layers("gqa", options=self.softmax() | gates)
        default = default_layer_types(self.full_attention_interval or 4, self.num_hidden_layers)
        return layers_of(self.layer_types or default, delta, softmax)


class Lfm2(LlamaLike):
    """LFM2: layers of short convolutions and of softmax attention."""

    model_type = "lfm2"
    architecture = "Lfm2ForCausalLM"
    has_head_dim = False
    ignored = frozenset(
        ("block_dim", "block_norm_eps", "block_use_swiglu", "conv_dim", "conv_dim_out")
    ) | {"num_heads", "theta", "use_pos_enc", "rms_norm_eps"}

    tie_word_embeddings: bool = pydantic.Field(True, alias="tie_embedding")
    num_key_value_heads: Size | None = 8
    rope: Rope = Rope(rope_theta=1e6)
    rms_norm_eps: PositiveFloat = pydantic.Field(1e-5, alias="norm_eps")
    intermediate_size: Size = pydantic.Field(alias="block_ff_dim")
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: PositiveFloat | None = 1.0
    block_multiple_of: Size = 256
    conv_L_cache: Size = 3
    conv_bias: bool = False
    full_attn_idxs: list[int] | None = pydantic.Field(None, exclude=True)
    layer_types: list[Literal["conv", "full_attention"]] | None = None

    def sizes(self) -> dict[str, Any]:
        width, multiple = self.intermediate_size, self.block_multiple_of
        if self.block_auto_adjust_ff_dim:
            width = 2 * width // 3
            if self.block_ffn_dim_multiplier is not None:
                width = math.ceil(int(self.block_ffn_dim_multiplier * width) / multiple) * multiple
        return super().sizes() | {"mlp_dim": width}

    def attention(self) -> Pattern:
        layers = range(self.num_hidden_layers)
        full = layers if self.full_attn_idxs is None else self.full_attn_idxs
        default = ["full_attention" if layer in full else "conv" for layer in layers]
        sizes = {"convolution_size": self.conv_L_cache, "use_bias": self.conv_bias}
        convolution = Layers("short_convolution", options=sizes)
        softmax = Layers("gqa", options=self.softmax() | {"query_key_norm": True})
        return layers_of(self.layer_types or default, convolution, softmax)


OF_EXPERTS = frozenset[str]().union(
    ("num_experts_per_tok", "router_aux_loss_coef", "output_router_logits", "n_routed_experts"),
    ("n_shared_experts", "moe_intermediate_size", "moe_latent_size", "norm_topk_prob"),
    ("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    ("routed_scaling_factor", "n_group", "topk_group"),
)
"""Fields of experts, in families that have models without any."""


def _unlimited(value: Any) -> None:
    if value not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None):
        raise ValueError("steps with limits are unsupported; choose another model")


Unlimited = Annotated[Any, pydantic.AfterValidator(_unlimited)]


class WithMamba2(LlamaLike):
    """Fields of Mamba-2."""

    mamba_n_heads: Size = 128
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: Literal[False] = pydantic.Field(False, exclude=True)
    time_step_limit: Unlimited = pydantic.Field(None, exclude=True)

    @property
    def mamba_width(self) -> tuple[str, int]:
        """Number of features of all heads, after the name of what determines it."""
        return "mamba_expand * hidden_size", self.mamba_expand * self.hidden_size

    @pydantic.model_validator(mode="after")
    def _has_the_width_of_its_heads(self) -> "WithMamba2":
        name, width = self.mamba_width
        heads = self.mamba_n_heads
        depth = width // heads if self.mamba_d_head == "auto" else self.mamba_d_head
        if depth * heads != width:
            raise ValueError(f"{name} = {width} must be mamba_n_heads * mamba_d_head")
        return self

    def mamba(self) -> dict[str, FieldValue]:
        """Options of Mamba-2."""
        return {
            "num_value_heads": self.mamba_n_heads,
            "num_key_heads": self.mamba_n_groups,
            "key_depth": self.mamba_d_state,
            "value_depth": self.mamba_width[1] // self.mamba_n_heads,
            "convolution_size": self.mamba_d_conv,
            "convolution_bias": self.mamba_conv_bias,
        }


class GraniteHybrid(Granite, WithMamba2):
    """Granite 4 without experts: layers of Mamba-2 and of softmax attention."""

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    ignored = OF_EXPERTS | {"intermediate_size", "normalization_function"}

    num_local_experts: Literal[0]
    intermediate_size: Size = pydantic.Field(alias="shared_intermediate_size")
    position_embedding_type: Literal["rope", "nope"] | None = None
    layer_types: (
        list[Literal["mamba", "attention", "linear_attention", "full_attention"]] | None
    ) = None

    @pydantic.model_validator(mode="after")
    def _has_no_biases_of_the_mlp(self) -> "GraniteHybrid":
        if self.mlp_bias:
            raise ValueError("mlp_bias is unsupported in granitemoehybrid; choose another model")
        return self

    def attention(self) -> Pattern:
        rope = None if self.position_embedding_type == "rope" else Rope(rope_theta=None)
        mamba = Layers("mamba2", options=self.mamba())
        softmax = Layers("gqa", options=self.softmax(rope))
        kinds = {"attention": "full_attention", "mamba": "linear_attention"}
        types = self.layer_types or ["mamba"] * self.num_hidden_layers
        return layers_of([kinds.get(kind, kind) for kind in types], mamba, softmax)

    def to_json(self) -> dict[str, JSON]:
        """The fields, with the published types of layers, which all versions read."""
        kinds = {"full_attention": "attention", "linear_attention": "mamba"}
        types = self.layer_types and [kinds.get(kind, kind) for kind in self.layer_types]
        # transformers has 2 experts of each token by default, which llama.cpp refuses
        return super().to_json() | {"layer_types": types, "num_experts_per_tok": 0}


class FalconH1(WithMamba2):
    """Falcon-H1: Mamba-2 and softmax attention in parallel in each layer."""

    model_type = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    ignored = frozenset(("attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor"))

    num_key_value_heads: Size | None = 8
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: Literal[False] = pydantic.Field(False, exclude=True)
    projectors_bias: Literal[False] = pydantic.Field(False, exclude=True)
    mlp_bias: bool = False
    mamba_d_ssm: Size | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    embedding_multiplier: PositiveFloat = 1.0
    lm_head_multiplier: PositiveFloat = 1.0
    attention_in_multiplier: PositiveFloat = 1.0
    attention_out_multiplier: PositiveFloat = 1.0
    key_multiplier: PositiveFloat = 1.0
    ssm_in_multiplier: PositiveFloat = 1.0
    ssm_out_multiplier: PositiveFloat = 1.0
    ssm_multipliers: list[PositiveFloat] | None = pydantic.Field(None, min_length=5, max_length=5)
    mlp_multipliers: list[PositiveFloat] | None = pydantic.Field(None, min_length=2, max_length=2)

    @property
    def mamba_width(self) -> tuple[str, int]:
        return ("mamba_d_ssm", self.mamba_d_ssm) if self.mamba_d_ssm else super().mamba_width

    @property
    def scale(self) -> float:
        return self.attention_in_multiplier**2 * self.key_multiplier * self.depth**-0.5

    def sizes(self) -> dict[str, Any]:
        gate, down = self.mlp_multipliers or (1.0, 1.0)
        return super().sizes() | {
            "logit_divisor": 1 / self.lm_head_multiplier,
            "mlp_gate_multiplier": gate,
            "mlp_multiplier": down,
        }

    def attention(self) -> Pattern:
        output = self.attention_in_multiplier * self.attention_out_multiplier
        softmax = self.softmax() | {"output_multiplier": output}
        norm = "before_gate" if self.mamba_norm_before_gate else "after_gate"
        mamba = self.mamba() | {
            "output_norm": norm if self.mamba_rms_norm else "none",
            "output_multiplier": self.ssm_out_multiplier,
        }
        names = "gate", "value", "key", "query", "step"
        multipliers = zip(names, self.ssm_multipliers or (1.0,) * 5, strict=True)
        mamba |= {f"{name}_multiplier": self.ssm_in_multiplier * x for name, x in multipliers}
        return Layers(
            "gqa+mamba2",
            options={f"gqa.{name}": value for name, value in softmax.items()}
            | {f"mamba2.{name}": value for name, value in mamba.items()},
        )


class NemotronH(Family):
    """Nemotron-H without experts: layers of Mamba-2 and of softmax attention, some with an MLP."""

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    ignored = OF_EXPERTS | {"rms_norm_eps", "expand", "attention_head_dim"}

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = 8
    head_dim: Size = 128
    max_position_embeddings: Size | None = None
    layer_norm_epsilon: PositiveFloat = 1e-5
    hybrid_override_pattern: str | None = None
    layers_block_type: list[str] | None = pydantic.Field(None, exclude=True)
    number: Size | None = pydantic.Field(None, alias="num_hidden_layers", exclude=True)
    mlp_hidden_act: Literal["relu2"] = "relu2"
    mlp_bias: bool = False
    attention_bias: Literal[False] = pydantic.Field(False, exclude=True)
    use_bias: Literal[False] = pydantic.Field(False, exclude=True)
    sliding_window: None = pydantic.Field(None, exclude=True)
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    n_groups: Size = 8
    ssm_state_size: Size = 128
    conv_kernel: Size = 4
    use_conv_bias: bool = True
    mamba_hidden_act: Literal["silu"] = pydantic.Field("silu", exclude=True)
    mamba_proj_bias: Literal[False] = pydantic.Field(False, exclude=True)
    time_step_limit: Unlimited = pydantic.Field(None, exclude=True)

    LETTERS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("linear_attention", "mamba"), "M"),
        **dict.fromkeys(("full_attention", "attention"), "*"),
        "mlp": "-",
        "moe": "E",
    }

    @property
    def pattern(self) -> str:
        """The layers as letters: M of Mamba-2, * of softmax attention, - of an MLP."""
        if self.layers_block_type is None:
            return self.hybrid_override_pattern or ""
        return "".join(self.LETTERS.get(kind, "?") for kind in self.layers_block_type)

    @pydantic.model_validator(mode="after")
    def _has_known_layers(self) -> "NemotronH":
        name = "hybrid_override_pattern" if self.layers_block_type is None else "layers_block_type"
        if {*self.pattern} - {*"M*-"}:
            raise ValueError(f"{name}={getattr(self, name)!r} must have layers M, * and - alone")
        if not self.pattern or self.pattern.startswith("-") or "--" in self.pattern:
            raise ValueError(f"{name}={getattr(self, name)!r} must have - directly after M or *")
        if self.number not in (None, len(self.pattern)):
            raise ValueError(f"{name} has {len(self.pattern)} layers, not {self.number}")
        return self

    def to_json(self) -> dict[str, JSON]:
        return super().to_json() | {"num_hidden_layers": len(self.pattern)}

    def to_model(self) -> LanguageModelConfig:
        mamba: dict[str, FieldValue] = {
            "num_value_heads": self.mamba_num_heads,
            "num_key_heads": self.n_groups,
            "key_depth": self.ssm_state_size,
            "value_depth": self.mamba_head_dim,
            "convolution_size": self.conv_kernel,
            "convolution_bias": self.use_conv_bias,
        }
        softmax: dict[str, FieldValue] = {
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "use_bias": False,
            "positions": "none",
        }
        kinds = {"M": ("mamba2", mamba), "*": ("gqa", softmax)}
        layers = [
            Layers(kinds[letter][0], options=kinds[letter][1], has_mlp=after == "-")
            for letter, after in zip(self.pattern, self.pattern[1:] + " ", strict=True)
            if letter != "-"
        ]
        return LanguageModelConfig(
            **self.sizes(),
            num_layers=len(layers),
            attention=tuple(shortest_period(layers)),
            block="llama",
            mlp="squared_relu",
            use_bias=self.mlp_bias or None,
            key_depth=self.head_dim,
            value_depth=self.head_dim,
        )
