"""Architectures of a `config.json`: defaults of each family."""

from pathlib import Path

import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.families import family_of
from heinsen_jax.interop.transformers.matching import family_for
from heinsen_jax.models import LanguageModelConfig

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = SIZES | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64, "rope_theta": 500.0}
GPT2 = {"vocab_size": 11, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}


def model(kind: str, **fields) -> LanguageModelConfig:
    config = family_of({"model_type": kind, **fields}, Path("config.json")).to_model()
    assert family_for(config, kind).to_model() == config
    return config


def options(kind: str, *names: str, **fields) -> list:
    (layer,) = model(kind, **fields).mechanisms()
    return [getattr(layer, name) for name in names]


@pytest.mark.parametrize(
    ("kind", "fields", "biases"),
    [
        ("llama", LLAMA, [False, False]),
        ("llama", LLAMA | {"attention_bias": True}, [True, True]),
        ("qwen2", LLAMA, [True, False]),
        ("qwen3", LLAMA | {"head_dim": 4}, [False, False]),
    ],
)
def test_biases_of_projections(kind, fields, biases):
    assert options(kind, "use_bias", "output_bias", **fields) == biases


def test_rotary_positions():
    names = "rotary_base", "rotary_factor", "rotary_original_length", "rotary_fraction"
    assert options("llama", *names, **LLAMA) == [10000.0, 1.0, None, 1.0]
    scaled = LLAMA | {"rope_parameters": SCALED}
    assert options("llama", *names, **scaled) == [500.0, 8.0, 64, 1.0]
    neox = SIZES | {"hidden_size": 32}
    assert options("gpt_neox", *names, **neox) == [10000.0, 1.0, None, 0.25]


def test_layers_without_positions():
    default = model("smollm3", **SIZES | {"num_hidden_layers": 8})
    assert [x.positions for x in default.mechanisms()] == ["rotary"] * 3 + ["none"]
    assert default.mechanisms()[0].rotary_base == 2e6
    assert model("smollm3", **SIZES, no_rope_layers=[0] * 3).mechanisms()[0].positions == "none"
    config = model("smollm3", **SIZES, no_rope_layers=[0, 1, 0], rope_theta=5e5)
    assert [(x.positions, x.rotary_base) for x in config.mechanisms()] == [
        ("none", 10000.0),
        ("rotary", 5e5),
    ]


def test_positions_of_a_part_of_each_head():
    phi = {"hidden_size": 32, "rope_theta": 250000.0, "partial_rotary_factor": 0.5}
    names = "rotary_base", "rotary_fraction"
    assert options("phi3", *names, **SIZES | phi) == [250000.0, 0.5]
    assert options("phi3", "window_size", **SIZES | phi, sliding_window=7) == [7]


def test_multipliers():
    multipliers = {"embedding_multiplier": 12, "residual_multiplier": 0.25, "logits_scaling": 8.0}
    config = model("granite", **SIZES, **multipliers, attention_multiplier=0.015625)
    assert (config.embedding_multiplier, config.residual_multiplier) == (12, 0.25)
    assert config.logit_divisor == 8
    assert config.mechanisms()[0].scale == 0.015625


def test_hybrids():
    hybrid = model("olmo_hybrid", **SIZES | {"num_hidden_layers": 8})
    assert hybrid.layer_pattern == ("gated_deltanet",) * 3 + ("gqa",)
    assert [layer.norm_after for layer in hybrid.layers] == [False] * 3 + [True]
    linear, *_, softmax = hybrid.mechanisms()
    assert (linear.key_depth, linear.value_depth, linear.norm_epsilon) == (3, 6, 1e-5)
    assert linear.negative_eigenvalues
    assert (softmax.query_key_norm, softmax.norm_epsilon) == ("joint", 1e-6)
    assert (softmax.positions, softmax.rotary_base) == ("rotary", 10000.0)
    for none in ({"rope_theta": None}, {"rope_parameters": {"rope_theta": None}}):
        hybrid = model("olmo_hybrid", **SIZES | {"num_hidden_layers": 4} | none)
        assert hybrid.mechanisms()[-1].positions == "none"
    assert model("olmo_hybrid", **SIZES).layer_pattern == ("gated_deltanet", "gqa")
    sizes = SIZES | {"num_hidden_layers": 8}
    qwen = model("qwen3_5_text", **sizes)
    linear, *_, softmax = qwen.mechanisms()
    assert (linear.num_key_heads, linear.num_value_heads, linear.key_depth) == (16, 32, 128)
    assert (softmax.output_gate, softmax.rotary_fraction, softmax.key_depth) == (
        "feature",
        0.25,
        256,
    )
    assert (softmax.query_key_norm, softmax.zero_centered_norm) == (True, True)
    assert qwen.norm_kind == "zero_centered_rms"
    others = {"attn_output_gate": True, "mlp_only_layers": [], "mtp_num_hidden_layers": 1}
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 1e7}
    *_, softmax = model("qwen3_5_text", **sizes, **others, rope_parameters=rope).mechanisms()
    assert (softmax.rotary_fraction, softmax.rotary_base) == (0.25, 1e7)
    assert model("qwen3_5_text", **SIZES, full_attention_interval=1).layer_pattern == ("gqa",)
    qwen = model("qwen3_5_text", **SIZES, full_attention_interval=2)
    assert qwen.layer_pattern == ("gated_deltanet", "gqa")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("olmo_hybrid", {"layer_types": ["linear_attention"]}, "layer_types has 1 layers, but"),
        ("olmo_hybrid", {"layer_types": ["full_attention"] * 2}, "layers of both kinds"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is uns"),
        ("olmo_hybrid", {"layer_types": ["mamba"] * 2}, r"layer_types\.0='mamba' is unsupported"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 layers, but num_hidden"),
        ("phi3", {"attention_bias": True}, "attention_bias=True is unsupported"),
        ("qwen3_5_text", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is unsupported"),
        ("qwen3_5_text", {"num_experts": 4}, "num_experts=4 is unknown, and may change results"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 is unsupported"),
        ("olmo2", {"head_dim": 8}, "head_dim=8 must be hidden_size / num_attention_heads"),
        ("olmo2", {"rope_parameters": {"rope_theta": None}}, "rope_theta=None is unsupported"),
        ("olmo2", {"clip_qkv": 8.0}, r"clip_qkv=8\.0 is unknown, and may change results"),
    ],
)
def test_other_fields_are_refused(kind, fields, message):
    with pytest.raises(UserError, match=message):
        family_of({"model_type": kind, **SIZES, **fields}, Path("config.json"))


def test_sizes_and_norms():
    llama = model("llama", **LLAMA)
    assert (llama.norm_kind, llama.norm_epsilon, llama.mlp_kind) == ("rms", 1e-5, "swiglu")
    assert (llama.mlp_width, llama.tie_embeddings, llama.position_kind) == (24, False, "none")
    assert options("mistral", "window_size", **LLAMA, sliding_window=7) == [7]
    assert options("qwen3", "key_depth", "query_key_norm", **LLAMA, head_dim=8) == [8, True]
    gpt2 = model("gpt2", **GPT2)
    assert (gpt2.mlp_kind, gpt2.mlp_width, gpt2.tie_embeddings) == ("gelu_tanh", 64, True)
    assert (gpt2.position_kind, gpt2.max_length, gpt2.norm_epsilon) == ("learned", 32, 1e-5)
    assert model("gpt_neox", **SIZES | {"hidden_size": 32}).parallel_branches
