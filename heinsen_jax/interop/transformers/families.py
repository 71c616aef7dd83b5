"""Families of models: their `config.json` as architectures of this package, and back."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.family import (
    ACTIVATIONS,
    IRRELEVANT,
    Activation,
    Family,
    Granite,
    LlamaLike,
    Olmo2,
)
from heinsen_jax.interop.transformers.hybrids import (
    FalconH1,
    GraniteHybrid,
    Lfm2,
    NemotronH,
    OlmoHybrid,
    Qwen35Text,
)
from heinsen_jax.interop.transformers.rope import (
    OBJECTS,
    Given,
    Rope,
    Size,
    given_fields,
    place_of,
)
from heinsen_jax.interop.transformers.windows import Gemma3Text, Olmo3
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.pattern import Pattern, shortest_period
from heinsen_jax.typing import JSON


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

    sliding_window: Size | None = 4096

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

    def attention(self) -> Pattern:
        without, rotating = (
            Layers("gqa", options=self.softmax(rope)) for rope in (Rope(rope_theta=None), self.rope)
        )
        number, interval = self.num_hidden_layers, self.no_rope_layer_interval
        default = [int((i + 1) % interval != 0) for i in range(number)]
        rotary = (self.no_rope_layers or default)[:number]
        return tuple(shortest_period([rotating if x else without for x in rotary]))


class Phi3(LlamaLike):
    """Phi 3 and 4, without LongRoPE."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    rope_names: ClassVar = {name: name for name in ("rope_theta", "partial_rotary_factor")}
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

    def to_json(self) -> dict[str, JSON]:
        """The fields, with `original_max_position_embeddings`, which llama.cpp needs."""
        fields = super().to_json()
        if self.max_position_embeddings is not None:
            fields["original_max_position_embeddings"] = self.max_position_embeddings
        return fields

    @property
    def window(self) -> int | None:
        return self.sliding_window


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
        if (factor := self.rope.score_factor) != 1:
            options["scale"] = factor * (self.hidden_size / self.num_attention_heads) ** -0.5
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
        *(Llama, Qwen2, Qwen3, Qwen35Text, Mistral, SmolLM3, Granite, Phi3, Olmo2, Olmo3),
        *(Gemma3Text, OlmoHybrid),
        *(GraniteHybrid, NemotronH, FalconH1, Lfm2, GPT2, GPTNeoX),
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
    own = {name for key, field in family.model_fields.items() for name in (key, field.alias)}
    nullable = {*own, *(["rope_theta"] if family.may_lack_positions else [])}
    known = {
        k: v
        for k, v in fields.items()
        if k not in IRRELEVANT | family.ignored | {"model_type"}
        and (v is not None or k in nullable)
    }
    given: dict[str, Given] = {}
    try:
        if family.rope_names:
            known = {**family.flattened(known)}
            given = given_fields(known, family.rope_names)
            if "rope" in known:
                raise ValueError("rope is unknown, and may change results; remove it")
            outer = {*OBJECTS, *family.rope_names, *family.rope_names.values()}
            default = family.model_fields["rope"].default
            rope: dict[str, Any] = default.model_dump(
                include={"partial_rotary_factor", "rope_theta"}
            )
            rope |= {name: x.value for name, x in given.items()}
            length = known.get("max_position_embeddings")
            if rope.get("rope_type") in ("llama3", "yarn") and length is not None:
                rope.setdefault("original_max_position_embeddings", length)
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
