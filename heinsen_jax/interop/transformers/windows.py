"""Families of models with sliding windows in some layers."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.interop.transformers.family import GateActivation, LlamaLike, Olmo2
from heinsen_jax.interop.transformers.hybrids import default_layer_types
from heinsen_jax.interop.transformers.rope import Rope, Size, given_fields
from heinsen_jax.models import Layers
from heinsen_jax.models.pattern import Pattern, shortest_period
from heinsen_jax.typing import JSON


class Windowed(LlamaLike):
    """Models with sliding windows in most layers, whose rotary positions may have another base."""

    has_local_theta: ClassVar[bool] = False
    """Whether `rope_local_base_freq` is a field of files."""

    sliding_window: Size | None = 4096
    layer_types: list[Literal["sliding_attention", "full_attention"]] | None = None
    rope_local_base_freq: PositiveFloat
    """Base of the rotary positions in layers with windows."""

    @property
    def interval(self) -> int:
        """Every `interval`-th layer has full attention, unless `layer_types` is given."""
        return 4

    @property
    def types(self) -> list[str]:
        """`layer_types`, with the default resolved."""
        default = default_layer_types(self.interval, self.num_hidden_layers, "sliding_attention")
        return [*(self.layer_types or default)]

    @pydantic.model_validator(mode="after")
    def _has_the_size_of_its_windows(self) -> "Windowed":
        if self.sliding_window is None and "sliding_attention" in self.types:
            raise ValueError("sliding_window=None with layers of sliding_attention; give a number")
        return self

    @classmethod
    def flattened(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if not cls.has_local_theta and "rope_local_base_freq" in fields:
            raise ValueError("rope_local_base_freq is unknown, and may change results; remove it")
        kinds = "full_attention", "sliding_attention"
        every = fields.get("rope_parameters")
        if not isinstance(every, dict) or not every.keys() & {*kinds}:
            theta = given_fields(fields, cls.rope_names).get("rope_theta")
            default = cls.model_fields["rope_local_base_freq"].default
            if theta is not None and theta.value != default and not cls.has_local_theta:
                raise ValueError(
                    f"{theta.place}={theta.value!r}: versions of transformers differ in the base "
                    "of layers with windows; give rope_parameters with full_attention and "
                    "sliding_attention, each with its rope_theta"
                )
            return fields
        full, local = (every.get(kind) or {} for kind in kinds)
        local = {"rope_type": "default", **local}
        theta = {"rope_local_base_freq": local.pop("rope_theta")} if "rope_theta" in local else {}
        if every.keys() - {*kinds} or local != {"rope_type": "default"}:
            raise ValueError(
                f"rope_parameters={every!r} must have full_attention, and sliding_attention of "
                "rope_type default; choose another model"
            )
        return {**fields, "rope_parameters": full} | theta

    def attention(self) -> Pattern:
        local = Rope(rope_theta=self.rope_local_base_freq)
        window = self.softmax(local) | {"window_size": self.sliding_window}
        layers = {
            "sliding_attention": Layers(
                "sliding_window", options=window, norm_after=self.norm_after
            ),
            "full_attention": Layers("gqa", options=self.softmax(), norm_after=self.norm_after),
        }
        return tuple(shortest_period([layers[kind] for kind in self.types]))

    def to_json(self) -> dict[str, JSON]:
        fields, rope = super().to_json(), self.rope
        if not self.has_local_theta:
            del fields["rope_local_base_freq"]
        full: dict[str, JSON] = {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta}
        local: dict[str, JSON] = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
        types = {"full_attention": full | (rope.scaling() or {}), "sliding_attention": local}
        return fields | {"rope_parameters": types}


class Olmo3(Windowed, Olmo2):
    """OLMo 3."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"

    num_key_value_heads: Size | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    rope: Rope = Rope(rope_theta=5e5)
    rope_local_base_freq: PositiveFloat = 5e5


class Gemma3Text(Windowed):
    """Gemma 3, for text."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    ignored = frozenset(("cache_implementation", "_sliding_window_pattern"))
    norm = "zero_centered_rms"
    qk_norm = True
    norm_after = "both"
    has_local_theta = True

    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    hidden_act: GateActivation = pydantic.Field("gelu_pytorch_tanh", alias="hidden_activation")
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    rope: Rope = Rope(rope_theta=1e6)
    rope_local_base_freq: PositiveFloat = 1e4
    sliding_window_pattern: Size = pydantic.Field(6, exclude=True)
    query_pre_attn_scalar: Size = 256
    final_logit_softcapping: PositiveFloat | None = None
    attn_logit_softcapping: None = pydantic.Field(None, exclude=True)
    use_bidirectional_attention: Literal[False] | None = pydantic.Field(None, exclude=True)

    @property
    def interval(self) -> int:
        return self.sliding_window_pattern

    @property
    def scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"embedding_multiplier": self.hidden_size**0.5}
