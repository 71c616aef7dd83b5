"""Make `tests/golden/transformers`: checkpoints of the library transformers, with its results.

    python -m venv make && make/bin/pip install torch transformers
    make/bin/python tests/golden/make_transformers.py all

Names of cases in place of `all` make these alone. Each folder is a tiny random model as
`save_pretrained` writes it, with `expected.npz`: the logits in float32 of `tokens`, and a greedy
continuation of `prompts`. Weights are larger than at a usual initialization, so that an error in
any part shows in the logits. `qwen2` has a tokenizer, too, with `chats.json`: conversations as its
template renders and encodes them.

With `check` and a folder that `write_exports.py` has written, it makes `exports.json`: the
configurations in that folder, after checking that these models have the same logits, and `qwen2`
the same texts.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).resolve().parent / "transformers"

LLAMA = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
NEOX = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 3.0,
    "beta_slow": 1.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

CASES = {
    "llama2": transformers.LlamaConfig(
        **LLAMA | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LINEAR,
    ),
    "llama3": transformers.LlamaConfig(**LLAMA, head_dim=8, rope_parameters=LLAMA3),
    "qwen2": transformers.Qwen2Config(
        **LLAMA | {"vocab_size": 272},
        tie_word_embeddings=True,
        max_window_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=8),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=5),
    "smollm3": transformers.SmolLM3Config(
        **LLAMA | {"num_hidden_layers": 3},
        no_rope_layers=[1, 1, 0],
        **NO_TOKENS,
    ),
    "granite": transformers.GraniteConfig(
        **LLAMA,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=0.7,
    ),
    "qwen3_5": transformers.Qwen3_5TextConfig(
        **LLAMA | {"num_hidden_layers": 4, "rms_norm_eps": 1e-2},
        attention_bias=True,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=5,
        linear_value_head_dim=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e5,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        },
    ),
    "phi3": transformers.Phi3Config(
        **LLAMA,
        sliding_window=5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        **NO_TOKENS,
    ),
    "olmo2": transformers.Olmo2Config(**LLAMA, eos_token_id=None, pad_token_id=None),
    "olmo3": transformers.Olmo3Config(
        **LLAMA,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        eos_token_id=None,
        pad_token_id=None,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **LLAMA,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        query_pre_attn_scalar=5,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        **NO_TOKENS,
    ),
    "smollm3_yarn": transformers.SmolLM3Config(
        **LLAMA,
        no_rope_layers=[1, 0],
        rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": None, "beta_slow": None},
        **NO_TOKENS,
    ),
    "olmo_hybrid": transformers.OlmoHybridConfig(
        **LLAMA | {"num_hidden_layers": 4, "rms_norm_eps": 1e-2},
        layer_types=["linear_attention", "full_attention"] * 2,
        eos_token_id=None,
        pad_token_id=None,
    ),
    "olmo_hybrid_nope": transformers.OlmoHybridConfig(
        **LLAMA | {"num_hidden_layers": 3},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_value_heads=8,
        linear_key_head_dim=5,
        linear_value_head_dim=4,
        linear_conv_kernel_dim=3,
        linear_allow_neg_eigval=False,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": None},
        eos_token_id=None,
        pad_token_id=None,
    ),
    "lfm2": transformers.Lfm2Config(
        **{name: size for name, size in LLAMA.items() if name != "rms_norm_eps"}
        | {"num_hidden_layers": 3},
        norm_eps=1e-2,
        layer_types=["conv", "conv", "full_attention"],
        conv_bias=True,
        conv_L_cache=4,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.3,
        **NO_TOKENS,
    ),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **LLAMA | {"num_hidden_layers": 3, "rms_norm_eps": 1e-2},
        num_local_experts=0,
        shared_intermediate_size=20,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_d_conv=3,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=0.7,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "granitemoehybrid_rope": transformers.GraniteMoeHybridConfig(
        **LLAMA,
        num_local_experts=0,
        shared_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
        position_embedding_type="rope",
        mamba_n_heads=4,
        mamba_d_state=5,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
    # Version 5 bounds steps from below by `time_step_min`, which the published model does not.
    "nemotron_h": transformers.NemotronHConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        layers_block_type=[
            *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
            *("linear_attention", "mlp"),
        ],
        mamba_num_heads=6,
        mamba_head_dim=4,
        n_groups=2,
        ssm_state_size=5,
        layer_norm_epsilon=1e-2,
        time_step_min=1e-30,
        **NO_TOKENS,
    ),
    "falcon_h1": transformers.FalconH1Config(
        **LLAMA,
        head_dim=6,
        mamba_d_ssm=24,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        embedding_multiplier=3.0,
        lm_head_multiplier=0.7,
        attention_in_multiplier=0.8,
        attention_out_multiplier=0.9,
        key_multiplier=0.4,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.6,
        ssm_multipliers=[0.35, 0.5, 0.7, 0.9, 0.8],
        mlp_multipliers=[0.9, 0.6],
        **NO_TOKENS,
    ),
    "falcon_h1_norm": transformers.FalconH1Config(
        **LLAMA,
        mamba_d_ssm=None,
        mamba_n_heads=4,
        mamba_d_state=5,
        mamba_conv_bias=False,
        mamba_rms_norm=True,
        tie_word_embeddings=True,
        **NO_TOKENS,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=67, n_positions=40, n_embd=16, n_layer=2, n_head=2, layer_norm_epsilon=1e-4
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**NEOX),
    "gpt_neox_serial": transformers.GPTNeoXConfig(
        **NEOX
        | {
            "hidden_act": "gelu_fast",
            "rope_parameters": YARN | {"partial_rotary_factor": 1.0},
        },
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
}
DTYPES = {"gpt2": torch.float32, "llama2": torch.float32, "gpt_neox": torch.float16}
SHARDED = {"llama3"}

TEMPLATE = """\
{%- if tools %}
<|im_start|>tools
{{ tools | tojson(indent=1) }}<|im_end|>
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
{{ "<|im_start|>" + message.role + "\\n" }}
    {%- generation %}{{ message["content"] | trim }}{{ eos_token }}{% endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
"""
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & c"}}
QUESTION = {"role": "user", "content": "  What is 2 + 2?\n"}
ANSWER = {"role": "assistant", "content": "4, I <think> é."}
SYSTEM = {"role": "system", "content": "Be exact. <|im_end|>"}
CHATS = [
    {"messages": [QUESTION]},
    {"messages": [SYSTEM, QUESTION, ANSWER, SYSTEM, QUESTION], "add_generation_prompt": True},
    {"messages": [QUESTION], "tools": [TOOL], "add_generation_prompt": True},
    {
        "messages": [QUESTION],
        "add_generation_prompt": True,
        "variables": {"enable_thinking": False},
    },
]
TEXTS = ["", "Attention is 4.", "a <|im_end|> b", "naïve\n\n  日本"]


def randomize(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Draw parameters with values of a dtype. Other tensors, such as rotary frequencies, have no
    rounding errors when a checkpoint of that dtype is read in float32."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in model.named_parameters():
        drawn = torch.randn(x.shape, generator=generator)
        is_table = any(part in name for part in ("embed", "wte", "wpe"))
        scale = 0.3 if is_table or x.ndim == 1 else 2 * x.shape[-1] ** -0.5
        is_norm = x.ndim == 1 and name.endswith("weight")
        x.data = ((1.0 if is_norm else 0.0) + scale * drawn).to(dtype).float()


def make(name: str, config: transformers.PreTrainedConfig) -> None:
    """Write a checkpoint and its results, with the first seed for which greedy decoding neither
    depends on rounding nor repeats few tokens."""
    folder, dtype = FOLDER / name, DTYPES.get(name, torch.bfloat16)
    config._attn_implementation = "eager"
    for seed in range(1000):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        randomize(model, seed, dtype)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 17))
        prompts = tokens[:, :9]
        with torch.no_grad():
            logits = model(torch.tensor(tokens)).logits.numpy()
            options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
            made = model.generate(torch.tensor(prompts), **options)
            best = model(made).logits[:, 8:-1].sort(-1).values
        gap, new = (best[..., -1] - best[..., -2]).min().item(), made[:, 9:].numpy()
        if gap > 0.02 and len(np.unique(new)) > 8:
            break
    print(f"{name}: seed {seed}, logits of std {logits.std():.2f}, gap of the best two {gap:.3f}")
    model.to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": "9KB"} if name in SHARDED else {}))
    (folder / "generation_config.json").unlink()
    if name.startswith("olmo_hybrid"):
        publish(folder)
    arrays = {"tokens": tokens.astype(np.int32), "prompts": prompts.astype(np.int32)}
    np.savez(folder / "expected.npz", logits=logits, new=new.astype(np.int32), **arrays)


def publish(folder: Path) -> None:
    """Give the tensors of Olmo Hybrid their published names and shapes. transformers reads them,
    but writes the norms of softmax attention with the names of the other layers, and convolutions
    of equally many features."""
    fields = json.loads((folder / "config.json").read_text())
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    tensors = load_file(folder / "model.safetensors")
    for layer, kind in enumerate(fields["layer_types"]):
        place = f"model.layers.{layer}"
        if kind == "full_attention":
            norm = tensors.pop(f"{place}.feedforward_layer_norm.weight")
            tensors[f"{place}.post_attention_layernorm.weight"] = norm
            continue
        names = [f"{place}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
        rows = torch.cat([tensors[name] for name in names])
        parts = rows.split([keys, keys, len(rows) - 2 * keys])
        tensors |= {name: x.clone() for name, x in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_tokenizer(folder: Path) -> None:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=268, special_tokens=special, initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(["attention is exact and is 4 and is 2 " * 3], trainer)
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[begin]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    chats = []
    for chat in CHATS:
        options = {k: v for k, v in chat.items() if k not in ("messages", "variables")}
        options |= chat.get("variables", {})
        text = fast.apply_chat_template(chat["messages"], tokenize=False, **options)
        ids = fast.apply_chat_template(chat["messages"], return_dict=False, **options)
        chats.append({**chat, "text": text, "ids": ids})
    texts = [{"text": text, "ids": fast(text)["input_ids"]} for text in TEXTS]
    content = {"chats": chats, "texts": texts}
    (folder / "chats.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")


def main(names: list[str]) -> None:
    for name in CASES if names == ["all"] else names:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        make(name, CASES[name])
        if name == "qwen2":
            make_tokenizer(FOLDER / name)
    for path in FOLDER.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)


def check_exports(exports: Path) -> None:
    checked = {}
    for folder in sorted(path for path in exports.iterdir() if path.is_dir()):
        name, options = folder.name, {"dtype": torch.float32, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        original = FOLDER / name if name in CASES else folder
        with np.load(original / "expected.npz") as want, torch.no_grad():
            logits = model(torch.tensor(want["tokens"], dtype=torch.int64)).logits.numpy()
            np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=1e-4)
            print(f"{name}: largest difference {np.abs(logits - want['logits']).max():.1e}")
        checked[name] = json.loads((folder / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(exports / "qwen2")
    want = json.loads((FOLDER / "qwen2" / "chats.json").read_text())
    assert all(tokenizer(one["text"])["input_ids"] == one["ids"] for one in want["texts"])
    chat = want["chats"][0]
    assert tokenizer.apply_chat_template(chat["messages"], tokenize=False) == chat["text"]
    (FOLDER / "exports.json").write_text(json.dumps(checked, indent=1) + "\n")


if __name__ == "__main__":
    check_exports(Path(sys.argv[2])) if sys.argv[1] == "check" else main(sys.argv[1:])
