"""Find the family of transformers that has an architecture."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from heinsen_jax.attention.base import Attention
from heinsen_jax.attention.gated_deltanet import GatedDeltaNetAttention
from heinsen_jax.attention.mamba2 import Mamba2Attention
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.attention.parameters import EPSILONS
from heinsen_jax.attention.registry import ParallelAttention, parts_of
from heinsen_jax.attention.rotary import PositionsConfig, RotaryAttention
from heinsen_jax.attention.short_convolution import ShortConvolution
from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.families import FAMILIES, describe_problem
from heinsen_jax.interop.transformers.family import FIELDS, Family
from heinsen_jax.interop.transformers.rope import Rope
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.pattern import shortest_period

LAYER_TYPES = {
    **dict.fromkeys(("softmax", "gqa"), "full_attention"),
    "sliding_window": "sliding_attention",
    "gated_deltanet": "linear_attention",
    "mamba2": "mamba",
    "short_convolution": "conv",
}
LETTERS = {"mamba2": "M", "softmax": "*", "gqa": "*"}
HIDDEN_ACTS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "squared_relu": "relu2",
    "swiglu": "silu",
    "geglu_tanh": "gelu_pytorch_tanh",
}


def family_for(config: LanguageModelConfig, only: str | None) -> Family:
    """The fields of the `config.json` of a model.

    Args:
      config: its architecture.
      only: model type; chosen by the architecture when None.

    Raises:
      UserError: no supported model has this architecture; the message names a field.
    """
    problems: dict[str, list[str]] = {}
    distances: dict[str, float] = {}
    facts, wanted = _facts(config), resolved(config)
    for name, kind in FAMILIES.items():
        if only not in (name, None):
            continue
        try:
            family = _family_with(facts, kind)
            candidate = resolved(family.to_model())
        except ValueError as error:
            problems[name], distances[name] = [_reason(error)], math.inf
            continue
        every = sorted(candidate.keys() | wanted.keys())
        differing = [key for key in every if not _equal(candidate.get(key), wanted.get(key))]
        distances[name] = len(differing)
        if "attention" in differing:  # options of other mechanisms
            differing = [x for x in differing if not x.startswith(("attention.", "attention["))]
        if not differing:
            return family
        problems[name] = [
            f"model.{key} is {wanted.get(key)!r}, not {candidate.get(key)!r}" for key in differing
        ]
    name = min(problems, key=lambda name: distances[name])
    if only is not None:
        raise UserError(
            f"like (--like): its model_type is {only}, but the model has another architecture: "
            f"{'; '.join(problems[only])}; leave like out, so that the model type follows from the "
            "architecture, or change these fields"
        )
    raise UserError(
        f"model: no supported model of transformers has its architecture; in the closest one, "
        f"{name}: {'; '.join(problems[name])}; change these fields, or save the model with "
        "heinsen_jax.interop.hub"
    )


def _family_with(facts: Mapping[str, Any], kind: type[Family]) -> Family:
    """The family with the values for its fields."""
    given = {k: facts[k] for k in kind.model_fields if k in facts}
    if "rope" in given and given["rope"].rope_theta is None and not kind.may_lack_positions:
        del given["rope"]  # so that the difference is named
    return kind.model_validate(given)


def _reason(error: ValueError) -> str:
    """Why a family cannot have an architecture."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    first = error.errors()[0]
    description = describe_problem(first)
    return f"its field {description}" if first["loc"] else description


def _equal(first: object, second: object) -> bool:
    """Whether two values are equal, numbers up to rounding."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-12)
    return first == second


def _facts(config: LanguageModelConfig) -> dict[str, Any]:
    """Values for the fields of all families, by name."""
    whole = config.abstract_layers()
    number = config.num_layers // len(whole)
    pairs = zip(config.layer_pattern, whole, strict=True)
    layers = [part for pair in pairs for part in parts_of(*pair).values()]
    sizes = vars(config) | {
        "mlp_dim": config.mlp_width,
        "norm_epsilon": config.norm_epsilon or EPSILONS[config.norm_kind],
    }
    facts = _facts_of_softmax(layers, number)
    for kind, describe in RECURRENT.items():
        if (layer := next((x for x in layers if isinstance(x, kind)), None)) is not None:
            facts |= describe(layer)
    names = ("hidden_act", "activation_function", "mlp_hidden_act") if config.mlp_kind else ()
    facts |= dict.fromkeys(names, HIDDEN_ACTS.get(config.mlp_kind or ""))
    if {*config.layer_pattern} <= LAYER_TYPES.keys():
        facts["layer_types"] = [LAYER_TYPES[x] for x in config.layer_pattern] * number
    if {*config.layer_pattern} <= LETTERS.keys():
        letters = [LETTERS[x.mechanism] + "-" * x.has_mlp for x in config.layers]
        facts["hybrid_override_pattern"] = "".join(letters * number)
    return facts | {
        **{name: sizes[field] for name, field in FIELDS.items()},
        "mlp_bias": config.mlp_has_bias,
        "mlp_multipliers": [config.mlp_gate_multiplier, config.mlp_multiplier],
        "lm_head_multiplier": 1 / config.logit_divisor,
        "block_auto_adjust_ff_dim": False,
        "num_local_experts": 0,
    }


def _facts_of_softmax(layers: Sequence[Attention], number: int) -> dict[str, Any]:
    """Values of attention to tokens, given the layers of a period and the number of periods."""
    softmax = [x for x in layers if isinstance(x, RotaryAttention)]
    rotary = [x for x in softmax if x.config.positions == "rotary"]
    windows: list[Any] = [x for x in softmax if hasattr(x.config, "window_size")]
    layer: Any = ([x for x in rotary if x not in windows] or rotary or softmax or layers)[0]
    options: Any = layer.config
    facts = {
        "sliding_window": windows[0].config.window_size if windows else None,
        "num_key_value_heads": getattr(layer, "num_kv_heads", None),
        "head_dim": getattr(layer, "key_depth", None),
        "position_embedding_type": "rope" if rotary else "nope",
    }
    if windows:
        facts["rope_local_base_freq"] = windows[0].config.rotary_base
    if hasattr(options, "use_bias"):
        facts["attention_bias"] = options.use_bias
    if isinstance(options, PositionsConfig):
        plain = windows[0].config.scale if windows else None
        facts["rope"] = rope = Rope.of(options, layer.key_depth, plain)
        scale = (options.scale or layer.key_depth**-0.5) / rope.score_factor
        facts["attention_multiplier"] = scale
        facts["query_pre_attn_scalar"] = round(scale**-2)
        facts["key_multiplier"] = scale * layer.key_depth**0.5
        facts["attention_out_multiplier"] = options.output_multiplier
    if all(getattr(x.config, "positions", "") in ("rotary", "none") for x in layers):
        facts["no_rope_layers"] = [int(x in rotary) for x in layers] * number
    return facts


def _facts_of_gated_deltanet(layer: GatedDeltaNetAttention) -> dict[str, Any]:
    return {
        "linear_num_key_heads": layer.num_key_heads,
        "linear_num_value_heads": layer.num_heads,
        "linear_key_head_dim": layer.key_depth,
        "linear_value_head_dim": layer.value_depth,
        "linear_conv_kernel_dim": layer.config.convolution_size,
        "linear_allow_neg_eigval": layer.config.negative_eigenvalues,
    }


def _facts_of_mamba2(layer: Mamba2Attention) -> dict[str, Any]:
    width = layer.num_heads * layer.value_depth
    return {
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), layer.num_heads),
        **dict.fromkeys(("mamba_n_groups", "n_groups"), layer.num_key_heads),
        **dict.fromkeys(("mamba_d_state", "ssm_state_size"), layer.key_depth),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), layer.value_depth),
        **dict.fromkeys(("mamba_d_conv", "conv_kernel"), layer.config.convolution_size),
        **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), layer.config.convolution_bias),
        "mamba_expand": max(width // layer.model_dim, 1),
        "mamba_d_ssm": width,
        "mamba_rms_norm": layer.config.output_norm != "none",
        "mamba_norm_before_gate": layer.config.output_norm == "before_gate",
        "ssm_multipliers": [
            getattr(layer.config, f"{name}_multiplier")
            for name in ("gate", "value", "key", "query", "step")
        ],
        "ssm_out_multiplier": layer.config.output_multiplier,
    }


def _facts_of_convolution(layer: ShortConvolution) -> dict[str, Any]:
    return {"conv_L_cache": layer.config.convolution_size, "conv_bias": layer.config.use_bias}


RECURRENT: dict[type[Attention], Callable[[Any], dict[str, Any]]] = {
    GatedDeltaNetAttention: _facts_of_gated_deltanet,
    Mamba2Attention: _facts_of_mamba2,
    ShortConvolution: _facts_of_convolution,
}


def resolved(config: LanguageModelConfig) -> dict[str, Any]:
    """The architecture as values that are equal for equal models."""
    architecture: dict[str, Any] = dataclasses.asdict(config)
    for name in ("attention", "key_depth", "value_depth", "qk_norm", "use_bias", "mlp_ratio"):
        del architecture[name]
    for name in ("trained_length", "dtype", "param_dtype", "remat", "remat_policy"):
        del architecture[name]
    pairs = zip(config.layers, config.abstract_layers(), strict=True)
    layers = shortest_period([_resolved_layer(*pair) for pair in pairs])
    architecture |= {
        "block": "fastformer" if config.block == "fastformer" else "pre-norm",
        "norm": config.norm_kind,
        "norm_epsilon": config.norm_epsilon or EPSILONS[config.norm_kind],
        "mlp": config.mlp_kind,
        "mlp_dim": config.mlp_width,
        "mlp_bias": config.mlp_has_bias,
        "positions": config.position_kind,
        "convolution_size": config.convolution,
        "attention": tuple(name for name, _ in layers),
    }
    for index, (_, options) in enumerate(layers):
        place = "attention" if len(layers) == 1 else f"attention[{index}]"
        architecture |= {f"{place}.{name}": value for name, value in options.items()}
    return architecture


def _resolved_layer(entry: Layers, layer: Attention) -> tuple[str, dict[str, Any]]:
    """The mechanism of a layer, and its options, with the defaults resolved."""
    name = entry.mechanism
    if isinstance(layer, ParallelAttention):
        entries = {x: dataclasses.replace(entry, mechanism=x) for x in layer.parts}
        parts = {x: _resolved_layer(entries[x], part) for x, part in layer.parts.items()}
        return name, {f"{x}.{k}": v for x, (_, y) in parts.items() for k, v in y.items()}
    options = dataclasses.asdict(layer.config)
    options.pop("implementation", None)
    options |= {"norm_after": entry.norm_after, "has_mlp": entry.has_mlp}
    if isinstance(layer, MatrixStateAttention):
        options |= {
            "key_depth": layer.key_depth,
            "value_depth": layer.value_depth,
            "norm_epsilon": options["norm_epsilon"] or EPSILONS["rms"],
            "num_key_heads": layer.num_key_heads,
            "num_value_heads": layer.num_heads,
        }
    if not isinstance(layer, RotaryAttention):
        return name, options
    options |= {
        "num_kv_heads": layer.num_kv_heads,
        "key_depth": layer.key_depth,
        "value_depth": layer.value_depth,
        "output_bias": layer.output.bias is not None,
        "norm_epsilon": options["norm_epsilon"] or EPSILONS["rms"],
        "scale": options["scale"] or layer.key_depth**-0.5,
    }
    if not options["query_key_norm"]:
        del options["norm_epsilon"]
    if options["positions"] != "rotary":
        options = {k: v for k, v in options.items() if not k.startswith("rotary_")}
    return "gqa" if name == "softmax" else name, options
