"""Architectures of a `config.json`: defaults of each family."""

from pathlib import Path

import pytest

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
