"""Families of models: conversion of their `config.json` to architectures of this package and back.

A field that is not listed here is refused, since it may change results.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.rope import (
    OBJECTS,
    Fields,
    Given,
    Rope,
    Size,
    given_fields,
    place_of,
)
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.config import MLPKind, Norm
from heinsen_jax.models.pattern import Pattern, shortest_period
from heinsen_jax.typing import JSON

IRRELEVANT = {
    # names, versions and the representation of weights
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("_attn_implementation", "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"),
    *("auto_map", "mamba_ssm_dtype"),
    *("is_llama_config", "transformers.js_config", "torchscript", "tf_legacy_loss"),
    # tokens, and lengths that no parameter depends on
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("tokenizer_class", "prefix", "n_ctx"),
    # training
    *("initializer_range", "gradient_checkpointing", "pretraining_tp"),
    *("attention_dropout", "hidden_dropout", "classifier_dropout"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob"),
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    # other heads and tasks than the readout
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "n_special", "predict_special_tokens", "finetuning_task"),
    *("task_specific_params", "problem_type", "id2label", "label2id", "_num_labels"),
    # outputs of a call, and the order of its computation
    *("output_attentions", "output_hidden_states", "output_scores", "output_past", "return_dict"),
    *("use_return_dict", "return_dict_in_generate", "use_cache", "is_decoder"),
    *("chunk_size_feed_forward", "reorder_and_upcast_attn"),
    # defaults of generation
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty"),
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("num_return_sequences", "remove_invalid_values"),
}
"""Fields that do not change the logits. Dropout is off outside of training."""

FIELDS = {
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_embeddings",
    "n_positions": "max_length",
    "max_position_embeddings": "trained_length",
    "use_parallel_residual": "parallel_branches",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logit_divisor",
    **dict.fromkeys(("hidden_size", "n_embd"), "model_dim"),
    **dict.fromkeys(("intermediate_size", "n_inner"), "mlp_dim"),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), "num_layers"),
    **dict.fromkeys(("num_attention_heads", "n_head"), "num_heads"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "norm_epsilon"),
}
"""Fields of `LanguageModelConfig` by the names of fields of all families."""

ACTIVATIONS: dict[str, MLPKind] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
Activation = Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]


class Family(Fields):
    """Fields of a `config.json` that determine the model."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    rope_names: ClassVar[dict[str, str]] = {}
    """Further names of fields for rotary positions outside of `rope_parameters` and
    `rope_scaling`."""
    null_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields for which null is not their default: without `rope_theta`, no positions."""

    vocab_size: Size
    tie_word_embeddings: bool = False
    is_encoder_decoder: Literal[False] = pydantic.Field(False, exclude=True)
    tie_encoder_decoder: Literal[False] = pydantic.Field(False, exclude=True)
    add_cross_attention: Literal[False] = pydantic.Field(False, exclude=True)
    use_bfloat16: Literal[False] = pydantic.Field(False, exclude=True)

    @pydantic.model_validator(mode="after")
    def _has_positions(self) -> "Family":
        rope = getattr(self, "rope", None)
        if rope is not None and rope.rope_theta is None and not self.null_fields:
            raise ValueError(f"rope_theta=None is unsupported in {self.model_type}; give a number")
        return self

    def to_model(self) -> LanguageModelConfig:
        """The architecture."""
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        """The fields of `LanguageModelConfig` that are fields of the family, too."""
        names = FIELDS.keys() & type(self).model_fields.keys()
        return {FIELDS[name]: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, JSON]:
        """The fields as versions 4 and 5 of transformers read them."""
        fields = self.model_dump(exclude={"rope"})
        if fields.get("max_position_embeddings", ...) is None:  # transformers has a default
            del fields["max_position_embeddings"]
        rope = getattr(self, "rope", None)
        if rope is not None:
            plain = {old: getattr(rope, new) for new, old in self.rope_names.items()}
            fields |= plain | {"rope_scaling": rope.scaling()}
        return fields


class LlamaLike(Family):
    """Models with RMS norms, SwiGLU and rotary positions."""

    rope_names: ClassVar = {"rope_theta": "rope_theta"}
    has_bias: ClassVar[bool] = False
    """Whether queries, keys and values have biases in all models of the family."""
    qk_norm: ClassVar[bool] = False
    norm: ClassVar[Norm | None] = None
    rotates_whole_heads: ClassVar[bool] = True
    has_head_dim: ClassVar[bool] = True
    """Whether the head dimension is free, not hidden_size / num_attention_heads."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None
    head_dim: Size | None = None
    max_position_embeddings: Size | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    rope: Rope = Rope()

    @pydantic.model_validator(mode="after")
    def _rotates_whole_heads(self) -> "LlamaLike":
        if self.rotates_whole_heads and self.rope.partial_rotary_factor != 1:
            raise ValueError(f"partial_rotary_factor must be 1 in {self.model_type}")
        return self

    @pydantic.model_validator(mode="after")
    def _has_the_depth_of_its_family(self) -> "LlamaLike":
        depth = self.hidden_size / self.num_attention_heads
        if not self.has_head_dim and self.head_dim not in (None, depth):
            raise ValueError(
                f"head_dim={self.head_dim} must be hidden_size / num_attention_heads in "
                f"{self.model_type}"
            )
        return self

    def to_json(self) -> dict[str, JSON]:
        fields = super().to_json()
        return {k: v for k, v in fields.items() if k != "head_dim" or self.has_head_dim}

    @property
    def window(self) -> int | None:
        """Sliding window of all layers, in tokens; None without one."""
        return None

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        """The attention layers, with options of all softmax attention."""
        return Layers("gqa" if self.window is None else "sliding_window", options=options)

    def to_model(self) -> LanguageModelConfig:
        depth = self.head_dim
        depth = None if depth == self.hidden_size / self.num_attention_heads else depth
        bias = getattr(self, "attention_bias", False)
        options: dict[str, FieldValue] = {
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "use_bias": self.has_bias or bias,
            "output_bias": bias,
            **self.rope.options(),
            **({} if self.window is None else {"window_size": self.window}),
        }
        return LanguageModelConfig(
            **self.sizes(),
            attention=self.attention(options),
            block="llama",
            use_bias=getattr(self, "mlp_bias", None) or None,
            norm=self.norm,
            qk_norm=self.qk_norm,
            key_depth=depth,
            value_depth=depth,
        )


class Llama(LlamaLike):
    """Llama 2 and 3, SmolLM, and others of the same architecture."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    num_key_value_heads: Size | None = None
    rope_interleaved: Literal[False] = pydantic.Field(False, exclude=True)
    attention_bias: bool = False
    mlp_bias: bool = False


class Mistral(LlamaLike):
    """Mistral 7B and others of the same architecture."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"

    sliding_window: Size | None

    @property
    def window(self) -> int | None:
        return self.sliding_window


class QwenLike(LlamaLike):
    """Fields of Qwen, whose sliding windows are unsupported."""

    use_sliding_window: Literal[False] = False
    use_mrope: Literal[False] = pydantic.Field(False, exclude=True)
    sliding_window: Size | None = pydantic.Field(None, exclude=True)
    max_window_layers: int | None = pydantic.Field(None, exclude=True)
    layer_types: list[Literal["full_attention"]] | None = pydantic.Field(None, exclude=True)


class Qwen2(QwenLike):
    """Qwen 2 and 2.5."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    has_bias = True


class Qwen3(QwenLike):
    """Qwen 3."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True

    head_dim: Size | None = 128
    attention_bias: bool = False


class SmolLM3(QwenLike):
    """SmolLM3, some of whose layers have no positions."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"

    num_key_value_heads: Size | None = 4
    rope: Rope = Rope(rope_theta=2e6)
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: list[Literal[0, 1]] | None = None
    no_rope_layer_interval: Size = 4

    @pydantic.model_validator(mode="after")
    def _has_equally_many_layers(self) -> "SmolLM3":
        count = len(self.no_rope_layers or [])
        if self.no_rope_layers is not None and count < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {count} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}; correct one of them"
            )
        return self

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        others = {k: v for k, v in options.items() if not k.startswith("rotary_")}
        layers = (
            Layers("gqa", options=others | {"positions": "none"}),
            Layers("gqa", options=options),
        )
        number, interval = self.num_hidden_layers, self.no_rope_layer_interval
        default = [int((i + 1) % interval != 0) for i in range(number)]
        rotary = (self.no_rope_layers or default)[:number]
        return tuple(shortest_period([layers[x] for x in rotary]))


class Granite(LlamaLike):
    """Granite 3, dense."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"

    num_key_value_heads: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0
    attention_multiplier: PositiveFloat = 1.0
    logits_scaling: PositiveFloat = 1.0

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        return Layers("gqa", options=options | {"scale": self.attention_multiplier})


class Phi3(LlamaLike):
    """Phi 3 and 4, without LongRoPE."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    rope_names: ClassVar = {name: name for name in ("rope_theta", "partial_rotary_factor")}
    rotates_whole_heads = False
    has_head_dim = False

    num_key_value_heads: Size | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    sliding_window: Size | None = None
    original_max_position_embeddings: Size | None = pydantic.Field(None, exclude=True)
    attention_bias: Literal[False] = pydantic.Field(False, exclude=True)

    @pydantic.model_validator(mode="after")
    def _has_plain_positions(self) -> "Phi3":
        if self.rope.rope_type != "default":
            raise ValueError(f"rope_type={self.rope.rope_type!r} is unsupported in phi3")
        return self

    @property
    def window(self) -> int | None:
        return self.sliding_window


class Olmo2(LlamaLike):
    """OLMo 2."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"

    has_head_dim = False

    num_key_value_heads: Size | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = False

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        return Layers("gqa", options=options | {"query_key_norm": "joint"}, norm_after=True)


class OlmoHybrid(Olmo2):
    """Olmo Hybrid: layers of Gated DeltaNet, and of softmax attention as in OLMo 2."""

    model_type = "olmo_hybrid"
    architecture = "OlmoHybridForCausalLM"
    null_fields = frozenset({"rope_theta"})

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
        if len(self.types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}; correct one of them"
            )
        if len({*self.types}) < 2:
            raise ValueError("layer_types must have layers of both kinds in olmo_hybrid")
        return self

    @property
    def types(self) -> list[str]:
        """`layer_types`, with the default resolved: every fourth layer is of softmax attention."""
        if self.layer_types is not None:
            return [*self.layer_types]
        number = self.num_hidden_layers
        types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(number)]
        return types if number > 3 else [*types[:-1], "full_attention"]

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
        layers = {
            "linear_attention": Layers("gated_deltanet", options=linear),
            "full_attention": super().attention(options),
        }
        return tuple(shortest_period([layers[kind] for kind in self.types]))


class Qwen35Text(LlamaLike):
    """Qwen 3.5, dense, for text: layers of Gated DeltaNet, and of softmax attention with a gate."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    rope_names: ClassVar = {name: name for name in ("rope_theta", "partial_rotary_factor")}
    norm = "zero_centered_rms"
    rotates_whole_heads = False

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

    @pydantic.model_validator(mode="after")
    def _has_equally_many_layers(self) -> "Qwen35Text":
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}; correct one of them"
            )
        return self

    def attention(self, options: dict[str, FieldValue]) -> Pattern:
        linear: dict[str, FieldValue] = {
            "num_key_heads": self.linear_num_key_heads,
            "num_value_heads": self.linear_num_value_heads,
            "key_depth": self.linear_key_head_dim,
            "value_depth": self.linear_value_head_dim,
            "convolution_size": self.linear_conv_kernel_dim,
        }
        softmax = options | {"query_key_norm": True, "output_gate": "feature"}
        layers = {
            "linear_attention": Layers("gated_deltanet", options=linear),
            "full_attention": Layers("gqa", options=softmax),
        }
        number, interval = self.num_hidden_layers, self.full_attention_interval or 4
        kinds = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(number)
        ]
        return tuple(shortest_period([layers[kind] for kind in self.layer_types or kinds]))


class GPT2(Family):
    """GPT-2."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"

    n_positions: Size
    n_embd: Size
    n_layer: Size
    n_head: Size
    n_inner: Size | None = None
    activation_function: Activation = "gelu_new"
    layer_norm_epsilon: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False

    def to_model(self) -> LanguageModelConfig:
        sizes: dict[str, Any] = self.sizes() | {"mlp_dim": self.n_inner or 4 * self.n_embd}
        return LanguageModelConfig(
            **sizes,
            attention="softmax",
            block="standard",
            mlp=ACTIVATIONS[self.activation_function],
            positions="learned",
        )


class GPTNeoX(Family):
    """GPT-NeoX and Pythia."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    rope_names: ClassVar = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Size | None = None
    hidden_act: Activation = "gelu"
    layer_norm_eps: PositiveFloat = 1e-5
    rope: Rope = Rope(partial_rotary_factor=0.25)
    use_parallel_residual: bool = True
    attention_bias: bool = True

    def to_model(self) -> LanguageModelConfig:
        options = {"use_bias": self.attention_bias, **self.rope.options()}
        return LanguageModelConfig(
            **self.sizes(),
            attention=Layers("softmax", options=options),
            block="standard",
            mlp=ACTIVATIONS[self.hidden_act],
            positions="none",
        )


FAMILIES: dict[str, type[Family]] = {
    family.model_type: family
    for family in (
        *(Llama, Qwen2, Qwen3, Qwen35Text, Mistral, SmolLM3, Granite, Phi3, Olmo2, OlmoHybrid),
        *(GPT2, GPTNeoX),
    )
}


OF_IMAGES = {
    *("vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
}
"""Fields of models of text and images that do not change the logits of text."""
TEXT_PARTS = {"qwen3_5": "qwen3_5_text"}
"""Models of text and images, and the families of their language models."""


def text_part(fields: Mapping[str, JSON], path: Path) -> dict[str, JSON]:
    """The fields of the language model in a `config.json`: all, or `text_config` of a model of text
    and images.

    Raises:
      UserError: `text_config` is missing or of another family.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return {**fields}
    text = fields.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != TEXT_PARTS[kind]:
        raise UserError(
            f"{path}: text_config must be an object with model_type={TEXT_PARTS[kind]!r}; fetch "
            "the file again"
        )
    outer = {k: v for k, v in fields.items() if k not in OF_IMAGES | {"model_type", "text_config"}}
    return {**text, **outer}


def family_of(fields: Mapping[str, JSON], path: Path) -> Family:
    """The fields of a `config.json`.

    Args:
      fields: its content.
      path: its file, for messages.

    Raises:
      UserError: the model is unsupported; the message names the field.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{path}: model_type={kind!r} is unsupported; choose a model of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    known = {
        k: v
        for k, v in fields.items()
        if k not in IRRELEVANT | {"model_type"}
        and (v is not None or k in family.model_fields or k in family.null_fields)
    }
    given: dict[str, Given] = {}
    try:
        if family.rope_names:
            given = given_fields(known, family.rope_names)
            if "rope" in known:
                raise ValueError("rope is unknown, and may change results; remove it")
            outer = {*OBJECTS, *family.rope_names, *family.rope_names.values()}
            default = family.model_fields["rope"].default
            rope: dict[str, Any] = default.model_dump(
                include={"partial_rotary_factor", "rope_theta"}
            )
            rope |= {name: x.value for name, x in given.items()}
            known = {name: x for name, x in known.items() if name not in outer} | {"rope": rope}
        return family.model_validate(known)
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_problem(problem, given) for problem in error.errors())
        raise UserError(f"{path}: {problems}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def describe_problem(
    problem: Mapping[str, Any], given: Mapping[str, Given] = MappingProxyType({})
) -> str:
    """A message for an error of pydantic, in which `given` fields of rotary positions are named by
    their place in the file."""
    name = ".".join(map(str, problem["loc"]))
    if problem["loc"][:1] == ("rope",):
        name = place_of(problem["loc"][1:], given)
    if problem["type"] == "extra_forbidden":
        return (
            f"{name}={problem['input']!r} is unknown, and may change results; choose another "
            "model, or remove the field if it has no effect"
        )
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("missing", "value_error") or not name:
        return f"{name}: {message}" if name else message
    return f"{name}={problem['input']!r} is unsupported: {message}"
