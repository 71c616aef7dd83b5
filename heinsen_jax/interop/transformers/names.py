"""Names of tensors in transformers, by model type."""

from collections.abc import Sequence

from heinsen_jax.interop.tensors import (
    DENSE,
    FUSED,
    GATED,
    INTERLEAVED,
    NORM_OF_HEADS,
    OUTPUT_GATE,
    SAME,
    SEPARATE,
    TAPS,
    THIRDS,
    Heads,
    Names,
    rows_of,
)


def _qkv(heads: Heads) -> Sequence[int]:
    return heads.widths


def _convolved(heads: Heads) -> Sequence[int]:
    """Mamba-2's x, B and C."""
    return heads.widths[::-1]


def _projected(heads: Heads) -> Sequence[int]:
    """Mamba-2's z, x, B, C and dt."""
    return heads.widths[2], *heads.widths[::-1], heads.num_heads


# Module of this package -> (module in transformers, layout). A name with {} exists once per layer;
# {mixer} and {mlp} are indices of layers that count attention and MLP apart. One with * is
# q, k and v. Names of layers of one mechanism begin with it instead of "blocks". A
# key that ends with the name of a parameter has the name of a tensor.
LLAMA: Names = {
    "embed": ("model.embed_tokens", SAME),
    "unembed": ("lm_head", SAME),
    "norm": ("model.norm", SAME),
    "blocks.norm": ("model.layers.{}.input_layernorm", SAME),
    "blocks.attention.project": ("model.layers.{}.self_attn.*_proj", SEPARATE),
    "blocks.attention.query_norm": ("model.layers.{}.self_attn.q_norm", NORM_OF_HEADS),
    "blocks.attention.key_norm": ("model.layers.{}.self_attn.k_norm", NORM_OF_HEADS),
    "blocks.attention.output": ("model.layers.{}.self_attn.o_proj", DENSE),
    "blocks.mlp_norm": ("model.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp.gate": ("model.layers.{}.mlp.gate_proj", DENSE),
    "blocks.mlp.up": ("model.layers.{}.mlp.up_proj", DENSE),
    "blocks.mlp.down": ("model.layers.{}.mlp.down_proj", DENSE),
}
GPT2: Names = {
    "embed": ("transformer.wte", SAME),
    "unembed": ("lm_head", SAME),
    "position": ("transformer.wpe", SAME),
    "norm": ("transformer.ln_f", SAME),
    "blocks.norm": ("transformer.h.{}.ln_1", SAME),
    "blocks.attention.project": ("transformer.h.{}.attn.c_attn", THIRDS),
    "blocks.attention.output": ("transformer.h.{}.attn.c_proj", SAME),
    "blocks.mlp_norm": ("transformer.h.{}.ln_2", SAME),
    "blocks.mlp.up": ("transformer.h.{}.mlp.c_fc", SAME),
    "blocks.mlp.down": ("transformer.h.{}.mlp.c_proj", SAME),
}
GPT_NEOX: Names = {
    "embed": ("gpt_neox.embed_in", SAME),
    "unembed": ("embed_out", SAME),
    "norm": ("gpt_neox.final_layer_norm", SAME),
    "blocks.norm": ("gpt_neox.layers.{}.input_layernorm", SAME),
    "blocks.attention.project": ("gpt_neox.layers.{}.attention.query_key_value", INTERLEAVED),
    "blocks.attention.output": ("gpt_neox.layers.{}.attention.dense", DENSE),
    "blocks.mlp_norm": ("gpt_neox.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h", DENSE),
    "blocks.mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h", DENSE),
}
PHI3: Names = LLAMA | {
    "blocks.attention.project": ("model.layers.{}.self_attn.qkv_proj", FUSED),
    "blocks.mlp.gate": ("model.layers.{}.mlp.gate_up_proj", rows_of(0, 2)),
    "blocks.mlp.up": ("model.layers.{}.mlp.gate_up_proj", rows_of(1, 2)),
}
OLMO2: Names = LLAMA | {
    "blocks.norm": ("model.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp_norm": ("model.layers.{}.post_feedforward_layernorm", SAME),
}
GEMMA3: Names = LLAMA | {
    "blocks.output_norms.0": ("model.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp_norm": ("model.layers.{}.pre_feedforward_layernorm", SAME),
    "blocks.output_norms.1": ("model.layers.{}.post_feedforward_layernorm", SAME),
}
DELTA = "model.layers.{}.linear_attn"
OLMO_HYBRID: Names = OLMO2 | {
    "gated_deltanet.norm": ("model.layers.{}.attention_layer_norm", SAME),
    "gated_deltanet.mlp_norm": ("model.layers.{}.feedforward_layer_norm", SAME),
    "gated_deltanet.attention.query": (f"{DELTA}.q_proj", DENSE),
    "gated_deltanet.attention.key": (f"{DELTA}.k_proj", DENSE),
    "gated_deltanet.attention.value": (f"{DELTA}.v_proj", DENSE),
    "gated_deltanet.attention.convolutions.0.taps": (f"{DELTA}.q_conv1d.weight", TAPS),
    "gated_deltanet.attention.convolutions.1.taps": (f"{DELTA}.k_conv1d.weight", TAPS),
    "gated_deltanet.attention.convolutions.2.taps": (f"{DELTA}.v_conv1d.weight", TAPS),
    "gated_deltanet.attention.decay": (f"{DELTA}.a_proj", DENSE),
    "gated_deltanet.attention.to_log_decay.log_rate": (f"{DELTA}.A_log", SAME),
    "gated_deltanet.attention.to_log_decay.bias": (f"{DELTA}.dt_bias", SAME),
    "gated_deltanet.attention.beta": (f"{DELTA}.b_proj", DENSE),
    "gated_deltanet.attention.gate": (f"{DELTA}.g_proj", DENSE),
    "gated_deltanet.attention.norm": (f"{DELTA}.o_norm", SAME),
    "gated_deltanet.attention.output": (f"{DELTA}.o_proj", DENSE),
}
QWEN3_5: Names = LLAMA | {
    "blocks.attention.project": ("model.layers.{}.self_attn.*_proj", GATED),
    "blocks.attention.output_gate": ("model.layers.{}.self_attn.q_proj", OUTPUT_GATE),
    "gated_deltanet.attention.query": (f"{DELTA}.in_proj_qkv", rows_of(0, _qkv)),
    "gated_deltanet.attention.key": (f"{DELTA}.in_proj_qkv", rows_of(1, _qkv)),
    "gated_deltanet.attention.value": (f"{DELTA}.in_proj_qkv", rows_of(2, _qkv)),
    "gated_deltanet.attention.convolutions.0.taps": (
        f"{DELTA}.conv1d.weight",
        rows_of(0, _qkv, TAPS),
    ),
    "gated_deltanet.attention.convolutions.1.taps": (
        f"{DELTA}.conv1d.weight",
        rows_of(1, _qkv, TAPS),
    ),
    "gated_deltanet.attention.convolutions.2.taps": (
        f"{DELTA}.conv1d.weight",
        rows_of(2, _qkv, TAPS),
    ),
    "gated_deltanet.attention.decay": (f"{DELTA}.in_proj_a", DENSE),
    "gated_deltanet.attention.to_log_decay.log_rate": (f"{DELTA}.A_log", SAME),
    "gated_deltanet.attention.to_log_decay.bias": (f"{DELTA}.dt_bias", SAME),
    "gated_deltanet.attention.beta": (f"{DELTA}.in_proj_b", DENSE),
    "gated_deltanet.attention.gate": (f"{DELTA}.in_proj_z", DENSE),
    "gated_deltanet.attention.norm": (f"{DELTA}.norm", SAME),
    "gated_deltanet.attention.output": (f"{DELTA}.out_proj", DENSE),
}
CONV = "model.layers.{}.conv"
LFM2: Names = LLAMA | {
    "norm": ("model.embedding_norm", SAME),
    "blocks.norm": ("model.layers.{}.operator_norm", SAME),
    "blocks.attention.query_norm": ("model.layers.{}.self_attn.q_layernorm", NORM_OF_HEADS),
    "blocks.attention.key_norm": ("model.layers.{}.self_attn.k_layernorm", NORM_OF_HEADS),
    "blocks.attention.output": ("model.layers.{}.self_attn.out_proj", DENSE),
    "blocks.mlp_norm": ("model.layers.{}.ffn_norm", SAME),
    "blocks.mlp.gate": ("model.layers.{}.feed_forward.w1", DENSE),
    "blocks.mlp.up": ("model.layers.{}.feed_forward.w3", DENSE),
    "blocks.mlp.down": ("model.layers.{}.feed_forward.w2", DENSE),
    "short_convolution.attention.input_gate": (f"{CONV}.in_proj", rows_of(0, 3)),
    "short_convolution.attention.output_gate": (f"{CONV}.in_proj", rows_of(1, 3)),
    "short_convolution.attention.value": (f"{CONV}.in_proj", rows_of(2, 3)),
    "short_convolution.attention.convolution.taps": (f"{CONV}.conv.weight", TAPS),
    "short_convolution.attention.convolution.bias": (f"{CONV}.conv.bias", SAME),
    "short_convolution.attention.output": (f"{CONV}.out_proj", DENSE),
}


def _mamba2(module: str) -> Names:
    """Names of a layer of Mamba-2, a module of each layer."""
    convolutions = {
        f"mamba2.attention.convolutions.{index}.{leaf}": (
            f"{module}.conv1d.{name}",
            rows_of(2 - index, _convolved, layout),
        )
        for index in range(3)
        for leaf, name, layout in (("taps", "weight", TAPS), ("bias", "bias", SAME))
    }
    projections = {
        f"mamba2.attention.{name}": (f"{module}.in_proj", rows_of(part, _projected))
        for part, name in enumerate(("gate", "value", "key", "query", "step"))
    }
    return {
        **convolutions,
        **projections,
        "mamba2.attention.to_log_decay.log_rate": (f"{module}.A_log", SAME),
        "mamba2.attention.to_log_decay.bias": (f"{module}.dt_bias", SAME),
        "mamba2.attention.skip": (f"{module}.D", SAME),
        "mamba2.attention.norm": (f"{module}.norm", SAME),
        "mamba2.attention.output": (f"{module}.out_proj", DENSE),
    }


GRANITE_HYBRID: Names = {
    **LLAMA,
    **_mamba2("model.layers.{}.mamba"),
    "blocks.mlp.gate": ("model.layers.{}.shared_mlp.input_linear", rows_of(0, 2)),
    "blocks.mlp.up": ("model.layers.{}.shared_mlp.input_linear", rows_of(1, 2)),
    "blocks.mlp.down": ("model.layers.{}.shared_mlp.output_linear", DENSE),
}
FALCON_H1: Names = {
    **LLAMA,
    **_mamba2("model.layers.{}.mamba"),
    "norm": ("model.final_layernorm", SAME),
    "blocks.mlp_norm": ("model.layers.{}.pre_ff_layernorm", SAME),
    "blocks.mlp.gate": ("model.layers.{}.feed_forward.gate_proj", DENSE),
    "blocks.mlp.up": ("model.layers.{}.feed_forward.up_proj", DENSE),
    "blocks.mlp.down": ("model.layers.{}.feed_forward.down_proj", DENSE),
}
MIXER, MLP = "backbone.layers.{mixer}", "backbone.layers.{mlp}"
NEMOTRON_H: Names = {
    **_mamba2(f"{MIXER}.mixer"),
    "embed": ("backbone.embeddings", SAME),
    "unembed": ("lm_head", SAME),
    "norm": ("backbone.norm_f", SAME),
    "blocks.norm": (f"{MIXER}.norm", SAME),
    "blocks.attention.project": (f"{MIXER}.mixer.*_proj", SEPARATE),
    "blocks.attention.output": (f"{MIXER}.mixer.o_proj", DENSE),
    "blocks.mlp_norm": (f"{MLP}.norm", SAME),
    "blocks.mlp.up": (f"{MLP}.mixer.up_proj", DENSE),
    "blocks.mlp.down": (f"{MLP}.mixer.down_proj", DENSE),
}
NAMES: dict[str, Names] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "smollm3", "granite"), LLAMA),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "qwen3_5_text": QWEN3_5,
    "phi3": PHI3,
    **dict.fromkeys(("olmo2", "olmo3"), OLMO2),
    "gemma3_text": GEMMA3,
    "olmo_hybrid": OLMO_HYBRID,
    "lfm2": LFM2,
    "granitemoehybrid": GRANITE_HYBRID,
    "nemotron_h": NEMOTRON_H,
    "falcon_h1": FALCON_H1,
}
"""Names by `model_type`."""
TEXT_PREFIXES: dict[str, str] = {"qwen3_5_text": "model.language_model."}
"""Beginnings of names, in place of "model.", in models of text and images."""
IGNORED: dict[str, tuple[str, ...]] = {
    "qwen3_5_text": ("model.visual.", "mtp."),
    "nemotron_h": ("mtp.",),
}
"""Beginnings of names of tensors that do not change the logits of text."""
OTHER_NAMES: dict[str, Names] = {
    "olmo_hybrid": {"blocks.norm": ("model.layers.{}.feedforward_layer_norm", SAME)}
}
"""Names by `model_type` that transformers writes instead of the published ones."""
DIVIDED: dict[str, str] = {"olmo_hybrid": f"{DELTA}.*_conv1d.weight"}
"""Tensors q, k and v among which transformers divides their rows equally, whatever their widths."""
