"""Architectures of a `config.json`: defaults of each family."""

import dataclasses
import math
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


def test_short_convolutions():
    """With the fields of LFM2-1.2B, and as transformers writes it."""
    published = {
        **{"vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_heads": 32, "num_key_value_heads": 8},
        **{"block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256},
        **{"block_ffn_dim_multiplier": 1.0, "block_dim": 2048, "block_norm_eps": 1e-5},
        **{"block_use_swiglu": True, "block_mlp_init_scale": 1.0, "conv_use_xavier_init": True},
        **{"conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048},
        **{"full_attn_idxs": [2], "norm_eps": 1e-5, "rope_theta": 1e6, "use_pos_enc": True},
    }
    lfm = model("lfm2", **published)
    assert lfm.layer_pattern == ("short_convolution",) * 2 + ("gqa", "short_convolution")
    assert (lfm.mlp_width, lfm.norm_epsilon, lfm.tie_embeddings) == (8192, 1e-5, True)
    convolution, _, softmax, _ = lfm.mechanisms()
    assert (convolution.convolution_size, convolution.use_bias) == (3, False)
    assert (softmax.query_key_norm, softmax.rotary_base, softmax.num_kv_heads) == (True, 1e6, 8)
    types = ["conv", "conv", "full_attention", "conv"]
    written = {"layer_types": types, "intermediate_size": 12288, "tie_word_embeddings": False}
    others = {k: v for k, v in published.items() if k not in ("block_ff_dim", "full_attn_idxs")}
    assert dataclasses.replace(model("lfm2", **others | written), tie_embeddings=True) == lfm
    wide = model("lfm2", **published | {"block_ffn_dim_multiplier": 1.3, "tie_embedding": False})
    assert (wide.mlp_width, wide.tie_embeddings) == (10752, False)
    assert model("lfm2", **published | {"full_attn_idxs": None}).layer_pattern == ("gqa",)


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 5}
GRANITE = SIZES | MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 48}
NEMOTRON = SIZES | {"num_hidden_layers": 7, "num_key_value_heads": 2}
PATTERN = {"hybrid_override_pattern": "M-M*-M-"}


def test_layers_of_mamba():
    kinds = {"layer_types": ["mamba", "attention"]}
    more = {"normalization_function": "rmsnorm", "init_method": "mup", "rope_theta": 1e4}
    limits = [[0.0, math.inf], [0.0, {"__float__": "Infinity"}], None]
    for limit in limits:
        config = model("granitemoehybrid", **GRANITE, **kinds, **more, time_step_limit=limit)
    assert config.layer_pattern == ("mamba2", "gqa")
    assert config.mlp_width == 48
    mamba, softmax = config.mechanisms()
    assert (mamba.num_value_heads, mamba.num_key_heads) == (4, 1)
    assert (mamba.key_depth, mamba.value_depth, mamba.convolution_bias) == (5, 8, True)
    assert softmax.positions == "none"
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    config = model("granitemoehybrid", **GRANITE, **kinds, position_embedding_type="rope")
    assert config.mechanisms()[1].positions == "rotary"
    config = model("nemotron_h", **NEMOTRON | PATTERN)
    assert [str(x).partition(":")[0] for x in config.layers] == [
        "mamba2",
        "mamba2",
        "gqa",
        "mamba2",
    ]
    assert [x.has_mlp for x in config.layers] == [True, False, True, True]
    assert (config.mlp_kind, config.num_layers, config.key_depth) == ("squared_relu", 4, 128)
    mamba, _, softmax, _ = config.mechanisms()
    assert (mamba.num_value_heads, mamba.num_key_heads, mamba.value_depth) == (128, 8, 64)
    assert softmax.positions == "none"
    kinds = {"M": "mamba", "*": "attention", "-": "mlp"}
    listed = {"layers_block_type": [kinds[x] for x in PATTERN["hybrid_override_pattern"]]}
    assert model("nemotron_h", **NEMOTRON | listed) == config


FALCON = SIZES | {"num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536}
FALCON |= {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_rms_norm": False}


def test_mechanisms_in_parallel():
    """With the fields of Falcon-H1-0.5B."""
    multipliers = {
        **{"embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625},
        **{"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375},
        **{"key_multiplier": 0.390625, "ssm_in_multiplier": 1.25},
        "ssm_out_multiplier": 0.23570226039551587,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    }
    others = {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attn_layer_indices": None}
    others |= {"projectors_bias": False, "mamba_norm_before_gate": False, "rope_theta": 1e11}
    config = model("falcon_h1", **FALCON, **multipliers, **others)
    assert config.layer_pattern == ("gqa+mamba2",)
    assert (config.mlp_gate_multiplier, config.mlp_multiplier) == (0.8838834764831844, 0.5859375)
    assert (config.logit_divisor, config.embedding_multiplier) == (25.6, 5.656854249492381)
    softmax, mamba = config.mechanisms()[0].parts.values()
    assert (softmax.scale, softmax.output_multiplier) == (0.390625 / 8, 0.9375)
    assert (softmax.rotary_base, softmax.num_kv_heads) == (1e11, 2)
    assert (mamba.num_value_heads, mamba.value_depth, mamba.num_key_heads) == (24, 64, 1)
    assert (mamba.output_norm, mamba.output_multiplier) == ("none", 0.23570226039551587)
    assert (mamba.value_multiplier, mamba.query_multiplier) == (0.3125, 0.625)
    with_norm = FALCON | {"mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_d_head": "auto"}
    mamba = model("falcon_h1", **with_norm | {"mamba_n_heads": 4}).mechanisms()[0].parts["mamba2"]
    assert (mamba.output_norm, mamba.value_depth) == ("before_gate", 8)


OLMO3_YARN = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1},
}


def test_windows_and_positions_by_layer():
    """With the fields of Olmo-3-7B and gemma-3-1b, and as version 5 of transformers writes both."""
    sizes = SIZES | {"num_hidden_layers": 4}
    olmo = model("olmo3", **sizes, rope_theta=500000, rope_scaling=OLMO3_YARN, sliding_window=9)
    assert olmo.layer_pattern == ("sliding_window",) * 3 + ("gqa",)
    window, *_, full = olmo.mechanisms()
    assert (window.window_size, window.rotary_base, window.scale) == (9, 5e5, None)
    assert (window.rotary_factor, window.rotary_original_length) == (1, None)
    assert (full.rotary_factor, full.rotary_interpolation) == (8, "pairs")
    assert full.scale == pytest.approx(0.5 * 1.2079441541679836**2)
    assert (full.rotary_low_turns, full.rotary_high_turns) == (1, 32)
    assert (full.query_key_norm, olmo.layers[0].norm_after) == ("joint", True)
    plain = {"rope_type": "default", "rope_theta": 5e5}
    parameters = {"full_attention": plain | OLMO3_YARN, "sliding_attention": plain}
    assert model("olmo3", **sizes, rope_parameters=parameters, sliding_window=9) == olmo
    parameters = {"full_attention": plain | {"rope_theta": 1e6}}  # transformers fills the other in
    window, *_, full = model("olmo3", **sizes, rope_parameters=parameters).mechanisms()
    assert (window.rotary_base, full.rotary_base) == (5e5, 1e6)
    published = {
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 8},
        **{"cache_implementation": "hybrid", "hidden_activation": "gelu_pytorch_tanh"},
        **{"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000},
        **{"sliding_window": 512, "sliding_window_pattern": 2, "num_key_value_heads": 1},
    }
    gemma = model("gemma3_text", **SIZES, **published)
    window, full = gemma.mechanisms()
    assert (window.window_size, window.rotary_base, full.rotary_base) == (512, 1e4, 1e6)
    assert (window.scale, full.scale, full.query_key_norm) == (1 / 16, 1 / 16, True)
    assert (full.zero_centered_norm, gemma.norm_kind) == (True, "zero_centered_rms")
    assert (gemma.mlp_kind, gemma.layers[0].norm_after) == ("geglu_tanh", "both")
    assert (gemma.embedding_multiplier, gemma.tie_embeddings) == (4, True)
    removed = ("rope_local_base_freq", "rope_theta", "sliding_window_pattern")
    written = {k: v for k, v in published.items() if k not in removed}
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    parameters = {x: {"rope_type": "default"} for x in types["layer_types"]}
    parameters["full_attention"]["rope_theta"] = 1e6
    assert model("gemma3_text", **SIZES, **written | types, rope_parameters=parameters) == gemma


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("olmo3", {"rope_local_base_freq": 1e4}, "rope_local_base_freq is unknown, and may change"),
        ("olmo3", {"sliding_window": None}, "sliding_window=None with layers of sliding_attention"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"factor": 2.0}}},
            "rope_parameters=.* must have full_attention, and sliding_attention of rope_type def",
        ),
        ("olmo3", {"rope_theta": 1e6, "sliding_window": 9}, "rope_theta=1000000.0: versions of tr"),
        *(
            (kind, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh' is unsup")
            for kind in ("qwen3_5_text", "lfm2", "olmo_hybrid", "llama")
        ),
        ("falcon_h1", FALCON | {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act=.* is unsupported"),
        ("granitemoehybrid", GRANITE | {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act=.* is uns"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation='silu' is unsupported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 is unsup"),
        ("qwen3_5_text", {"rope_parameters": OLMO3_YARN}, "yarn with partial_rotary_factor is uns"),
        ("falcon_h1", FALCON | {"mamba_d_head": 32}, "mamba_d_ssm = 1536 must be mamba_n_heads"),
        ("falcon_h1", FALCON | {"projectors_bias": True}, "projectors_bias=True is unsupported"),
        ("falcon_h1", FALCON | {"ssm_multipliers": [1.0]}, "ssm_multipliers=.* is unsupported"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types has 1 layers, but"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache=0 is unsupported"),
        ("lfm2", {"norm_eps": 0}, "norm_eps=0 is unsupported"),
        ("granitemoehybrid", GRANITE | {"num_local_experts": 62}, "num_local_experts=62 is unsup"),
        (
            "granitemoehybrid",
            GRANITE | {"mamba_n_heads": 5},
            "mamba_expand . hidden_size = 32 must",
        ),
        ("granitemoehybrid", GRANITE | {"mamba_proj_bias": True}, "mamba_proj_bias=True is unsup"),
        (
            "granitemoehybrid",
            GRANITE | {"time_step_limit": [0.0, 1.0]},
            "steps with limits are uns",
        ),
        ("granitemoehybrid", GRANITE | {"mlp_bias": True}, "mlp_bias is unsupported in granitemoe"),
        (
            "nemotron_h",
            NEMOTRON | {"hybrid_override_pattern": "MEM*MEM"},
            "must have layers M, . and",
        ),
        ("nemotron_h", NEMOTRON | {"layers_block_type": ["moe"]}, "layers_block_type=.* must have"),
        (
            "nemotron_h",
            NEMOTRON | {"hybrid_override_pattern": "-M"},
            "must have - directly after M",
        ),
        ("nemotron_h", NEMOTRON | PATTERN | {"num_hidden_layers": 5}, "has 7 layers, not 5"),
        (
            "nemotron_h",
            NEMOTRON | PATTERN | {"sliding_window": 64},
            "sliding_window=64 is unsupported",
        ),
        ("nemotron_h", NEMOTRON | PATTERN | {"rope_theta": 1e4}, "rope_theta=10000.0 is unknown"),
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


def test_fields_that_are_missing_have_the_defaults_of_transformers():
    assert options("mistral", "window_size", **LLAMA) == [4096]
    yarn = {"rope_type": "yarn", "factor": 2.0}
    lengths = {"max_position_embeddings": 64}
    assert options("llama", "rotary_original_length", **LLAMA, **lengths, rope_scaling=yarn) == [64]


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
