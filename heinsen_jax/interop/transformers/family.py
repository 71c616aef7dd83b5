"""Fields that families of models share, and what becomes of them.

A field that a family does not list is refused, since it may change results.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.interop.transformers.rope import Count, Fields, Rope, Size
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.config import MLPKind, Norm
from heinsen_jax.models.pattern import Pattern
from heinsen_jax.typing import JSON

NOT_EXPORTED = {
    *("auto_map", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
}
"""Fields of code and of multi-token prediction, which exports do not contain."""
IRRELEVANT = NOT_EXPORTED | {
    # names, versions and the representation of weights
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("_attn_implementation", "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"),
    *("mamba_ssm_dtype", "is_llama_config", "transformers.js_config", "torchscript"),
    "tf_legacy_loss",
    # tokens, and lengths that no parameter depends on
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("tokenizer_class", "prefix", "n_ctx", "max_sequence_length"),
    # training
    *("initializer_range", "gradient_checkpointing", "pretraining_tp"),
    *("attention_dropout", "hidden_dropout", "classifier_dropout"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob"),
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "init_method"),
    *("rescale_prenorm_residual", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_mlp_init_scale", "block_out_init_scale"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    # other heads and tasks than the readout
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "n_special", "predict_special_tokens", "finetuning_task"),
    *("task_specific_params", "problem_type", "id2label", "label2id", "_num_labels"),
    # outputs of a call, and the order of its computation
    *("output_attentions", "output_hidden_states", "output_scores", "output_past", "return_dict"),
    *("use_return_dict", "return_dict_in_generate", "use_cache", "is_decoder"),
    *("chunk_size_feed_forward", "reorder_and_upcast_attn", "num_logits_to_keep"),
    *("logits_to_keep", "chunk_size", "mamba_chunk_size", "use_mamba_kernels"),
    *("residual_in_fp32", "mamba_ssm_cache_dtype"),
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
    "final_logit_softcapping": "logit_soft_cap",
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
GATE_ACTIVATIONS: dict[str, MLPKind] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
GateActivation = Literal["silu", "gelu_pytorch_tanh"]


class Family(Fields):
    """Fields of a `config.json` that determine the model."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    rope_names: ClassVar[dict[str, str]] = {}
    """Further names of fields for rotary positions outside of `rope_parameters` and
    `rope_scaling`."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Further fields that do not change the logits."""
    may_lack_positions: ClassVar[bool] = False
    """Whether `rope_theta` may be null, for softmax attention without positions."""

    vocab_size: Size
    tie_word_embeddings: bool = False
    is_encoder_decoder: Literal[False] = pydantic.Field(False, exclude=True)
    tie_encoder_decoder: Literal[False] = pydantic.Field(False, exclude=True)
    add_cross_attention: Literal[False] = pydantic.Field(False, exclude=True)
    use_bfloat16: Literal[False] = pydantic.Field(False, exclude=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _has_each_field_once(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Drop a field whose alias is present, too, which transformers prefers."""
        aliases = {name: field.alias for name, field in cls.model_fields.items()}
        return {k: v for k, v in fields.items() if aliases.get(k) not in fields}

    @pydantic.model_validator(mode="after")
    def _has_positions(self) -> "Family":
        rope = getattr(self, "rope", None)
        if rope is not None and rope.rope_theta is None and not self.may_lack_positions:
            raise ValueError(f"rope_theta=None is unsupported in {self.model_type}; give a number")
        return self

    @classmethod
    def flattened(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of a file, with one object for the rotary positions."""
        return fields

    def to_model(self) -> LanguageModelConfig:
        """The architecture."""
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        """The fields of `LanguageModelConfig` that are fields of the family, too."""
        names = FIELDS.keys() & type(self).model_fields.keys()
        return {FIELDS[name]: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, JSON]:
        """The fields as versions 4 and 5 of transformers read them."""
        fields = self.model_dump(exclude={"rope"}, by_alias=True)
        if fields.get("max_position_embeddings", ...) is None:  # transformers has a default
            del fields["max_position_embeddings"]
        rope = getattr(self, "rope", None)
        if rope is not None:
            plain = {old: getattr(rope, new) for new, old in self.rope_names.items()}
            fields |= plain | {"rope_scaling": rope.scaling()}
        return fields


class LlamaLike(Family):
    """Models with RMS norms, gated MLPs, and rotary positions."""

    rope_names: ClassVar = {"rope_theta": "rope_theta"}
    has_bias: ClassVar[bool] = False
    """Whether queries, keys and values have biases in all models of the family."""
    qk_norm: ClassVar[bool] = False
    norm: ClassVar[Norm | None] = None
    norm_after: ClassVar[bool | Literal["both"]] = False
    has_head_dim: ClassVar[bool] = True
    """Whether the head dimension is free, not hidden_size / num_attention_heads."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Size
    num_key_value_heads: Size | None
    head_dim: Size | None = None
    max_position_embeddings: Size | None = None
    hidden_act: GateActivation = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    rope: Rope = Rope()

    @pydantic.model_validator(mode="after")
    def _rotates_whole_heads(self) -> "LlamaLike":
        rotates_whole = "partial_rotary_factor" not in self.rope_names
        if rotates_whole and self.rope.partial_rotary_factor != 1:
            raise ValueError(f"partial_rotary_factor must be 1 in {self.model_type}")
        return self

    @pydantic.model_validator(mode="after")
    def _has_the_activation_of_its_family(self) -> "LlamaLike":
        # in hybrids, the field is the activation of other layers, too, or has no effect
        field = type(self).model_fields["hidden_act"]
        if self.hidden_act != field.default:
            name = field.alias or "hidden_act"
            raise ValueError(f"{name}={self.hidden_act!r} is unsupported in {self.model_type}")
        return self

    @pydantic.model_validator(mode="after")
    def _has_as_many_layers(self) -> "LlamaLike":
        number = self.num_hidden_layers
        for name in ("layer_types", "no_rope_layers"):
            if (given := getattr(self, name, None)) is None:
                continue
            count = len(given)
            if count < number or (count > number and name == "layer_types"):
                raise ValueError(
                    f"{name} has {count} layers, but num_hidden_layers is {number}; correct one of "
                    "them"
                )
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

    @property
    def depth(self) -> int:
        """Head dimension."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scale(self) -> float:
        """Factor of the dot products, without YaRN's."""
        return self.depth**-0.5

    def softmax(self, rope: Rope | None = None) -> dict[str, FieldValue]:
        """Options of layers of softmax attention, with these positions in place of the model's."""
        rope = self.rope if rope is None else rope
        bias, scale = getattr(self, "attention_bias", False), self.scale * rope.score_factor
        return {
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "use_bias": self.has_bias or bias,
            "output_bias": bias,
            **rope.options(),
            **({} if scale == self.depth**-0.5 else {"scale": scale}),
        }

    def attention(self) -> Pattern:
        """The attention layers."""
        if self.window is None:
            return Layers("gqa", options=self.softmax(), norm_after=self.norm_after)
        return Layers("sliding_window", options=self.softmax() | {"window_size": self.window})

    def to_model(self) -> LanguageModelConfig:
        depth = self.head_dim
        depth = None if depth == self.hidden_size / self.num_attention_heads else depth
        return LanguageModelConfig(
            **self.sizes(),
            attention=self.attention(),
            block="llama",
            mlp=GATE_ACTIVATIONS[self.hidden_act],
            use_bias=getattr(self, "mlp_bias", None) or None,
            norm=self.norm,
            qk_norm=self.qk_norm,
            key_depth=depth,
            value_depth=depth,
        )


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

    @property
    def scale(self) -> float:
        return self.attention_multiplier


class Olmo2(LlamaLike):
    """OLMo 2."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"

    norm_after = True
    has_head_dim = False

    num_key_value_heads: Size | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = False

    def softmax(self, rope: Rope | None = None) -> dict[str, FieldValue]:
        return super().softmax(rope) | {"query_key_norm": "joint"}
