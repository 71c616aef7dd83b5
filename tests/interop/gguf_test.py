"""Files of llama.cpp: tiny ones, written by the library gguf from checkpoints of transformers."""

import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from heinsen_jax.errors import UserError
from heinsen_jax.generate import generate
from heinsen_jax.interop.transformers import from_pretrained, import_model
from heinsen_jax.interop.transformers.__main__ import main
from heinsen_jax.interop.transformers.gguf import Gguf
from heinsen_jax.interop.transformers.gguf_tokenizer import PRE_TOKENIZERS, _merges_of
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.load import load_run
from tests.conftest import GOLDEN_FOLDER
from tests.models.small import apply

FOLDER = GOLDEN_FOLDER / "transformers"
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
Types = gguf.GGMLQuantizationType


def rows_of_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores them for the architecture llama."""
    in_two = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return in_two.swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, name: str, kind: Types = Types.F32, **changes) -> Path:
    """Write a checkpoint of the golden data, with matrices of a kind; changes of its fields, of
    which None removes one."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    arrays = {}
    for file in (FOLDER / name).glob("*.safetensors"):
        arrays |= load_file(file)
    model = config["model_type"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[model], layers)
    writer = gguf.GGUFWriter(path, model)
    heads = config.get("num_attention_heads") or config["n_head"]
    fields: dict = {"block_count": layers, "attention.head_count": heads}
    if model == "gpt2":
        fields |= {"context_length": config["n_positions"], "embedding_length": config["n_embd"]}
        fields |= {"feed_forward_length": 4 * config["n_embd"]}
        fields |= {"attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
    else:
        kv_heads = config["num_key_value_heads"]
        depth = config.get("head_dim") or config["hidden_size"] // heads
        fields |= {"attention.head_count_kv": kv_heads, "embedding_length": config["hidden_size"]}
        fields |= {"feed_forward_length": config["intermediate_size"], "context_length": 128}
        fields |= {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
        fields |= {"rope.freq_base": float(config["rope_parameters"]["rope_theta"])}
        fields |= {"rope.dimension_count": depth} if model == "llama" else {}
        fields |= {"attention.key_length": depth, "attention.value_length": depth}
    fields = {f"{model}.{k}": v for k, v in fields.items()} | changes
    for field, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add |= {list: writer.add_array, bool: writer.add_bool}
        if value is not None:
            add[type(value)](field, value)
    for key, x in arrays.items():
        value = np.float32(x)
        if model == "llama" and key.endswith(("q_proj.weight", "q_proj.bias")):
            value = rows_of_pairs(value, heads)
        if model == "llama" and key.endswith(("k_proj.weight", "k_proj.bias")):
            value = rows_of_pairs(value, config["num_key_value_heads"])
        if model == "gpt2" and ".c_" in key and value.ndim == 2:
            value = value.T
        type_of = Types.F32 if value.ndim == 1 else kind
        data = gguf.quantize(np.ascontiguousarray(value), type_of)
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), data, raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "Ġ", "Ġab", "1"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 3,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("qwen3", Types.F32, marks=pytest.mark.nightly),
        ("llama2", Types.F32),
        pytest.param("qwen2", Types.BF16, marks=pytest.mark.nightly),
        ("gpt2", Types.F16),
    ],
)
def test_logits_and_greedy_continuations_are_those_of_transformers(name, kind, tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    changes = scaling if name == "llama2" else {}
    model, tokenizer = from_pretrained(write(tmp_path / "a.gguf", name, kind, **TOKENS, **changes))
    assert tokenizer.vocab_size == 7
    assert model.config.param_dtype == ("bfloat16" if kind == Types.BF16 else "float32")
    theirs, _ = from_pretrained(FOLDER / name)
    ours, theirs = (flatten_with_names(nnx.state(x, nnx.Param)) for x in (model, theirs))
    for path, x in theirs.items():
        tolerance = 1e-3 if kind == Types.F16 else 0  # the golden file has float32
        np.testing.assert_allclose(np.float32(ours[path]), np.float32(x), atol=tolerance)
    if kind != Types.F16:
        with np.load(FOLDER / name / "expected.npz") as want:
            tolerance = 1e-4 * np.std(want["logits"])
            logits = apply(model, want["tokens"])
            np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=tolerance)
            made = generate(model, want["prompts"], want["new"].shape[1], top_k=1)
            np.testing.assert_array_equal(made, want["new"])


def test_quantized_matrices_have_the_values_of_the_library(tmp_path):
    """Blocks of 32 values in a row, and of 256 with scales of scales."""
    path, rng = tmp_path / "a.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 0)
    wanted = {}
    for kind in (Types.Q4_0, Types.Q4_1, Types.Q8_0, Types.Q4_K, Types.Q6_K):
        values, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 60, (3, 512 // values * size), np.uint8)  # small scales, no NaN
        writer.add_tensor(f"{kind.name}.weight", data, raw_dtype=kind)
        wanted[f"{kind.name}.weight"] = gguf.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = Gguf(path)
    assert {*file.keys()} == wanted.keys()
    for name, value in wanted.items():
        part = file.get_slice(name)
        assert (part.get_shape(), part.get_dtype()) == ([3, 512], "F32")
        assert file.get_tensor(name).dtype == np.float32
        np.testing.assert_array_equal(file.get_tensor(name), value)
        assert np.ptp(value) > 0


def test_a_quantized_model_is_imported_with_its_tokenizer(tmp_path):
    path = write(tmp_path / "Tiny-Q8_0.gguf", "llama3", **TOKENS, **{"llama.rope.freq_base": 500.0})
    model, tokenizer, _ = load_run(import_model(path, tmp_path / "run"))
    assert model.config.param_dtype == "float32"
    assert tokenizer.name == "Tiny-Q8_0"
    assert tokenizer.config()["add_prefix_space"] is False
    assert tokenizer.encode("ab ab1b") == [3, 5, 6, 2]
    assert tokenizer.decode([3, 5, 6, 2]) == "ab ab1b"
    assert (tokenizer.start_ids, tokenizer.stop_ids) == ((), (0, 3))
    assert tokenizer.render_chat_template([{"role": "user", "content": "ab"}]) == "ab"
    assert tokenizer.encode_with_special_tokens("<s>ab") == [0, 3]
    assert tokenizer.encode("<s>ab1") != tokenizer.encode_with_special_tokens("<s>ab1")


def test_tokens_that_end_messages_by_their_text_end_generation(tmp_path):
    """Whatever their type."""
    tokens = ["<s>", "a", "b", "ab", "<|im_end|>", "<|end|>", "1"]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    changes |= {"tokenizer.ggml.token_type": [3, 1, 1, 1, 3, 1, 1]}
    _, tokenizer = from_pretrained(write(tmp_path / "a.gguf", "llama3", **TOKENS | changes))
    assert tokenizer.stop_ids == (0, 3, 4, 5)


def test_further_chat_templates_are_read(tmp_path):
    changes = {"tokenizer.chat_templates": ["tool_use"]}
    changes |= {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    _, tokenizer = from_pretrained(write(tmp_path / "a.gguf", "llama3", **TOKENS, **changes))
    default = TOKENS["tokenizer.chat_template"]
    assert tokenizer.templates == {"default": default, "tool_use": "{{ tools }}"}


def test_numbers_are_the_shortest_decimals(tmp_path):
    changes = {"llama.rope.freq_base": 1000042.0, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    changes |= {"llama.rope.scaling.factor": 2.1}
    config = Gguf(write(tmp_path / "a.gguf", "llama2", **changes)).config()
    assert (config["rope_theta"], config["rms_norm_eps"]) == (1000042.0, 1e-5)
    assert config["rope_scaling"]["factor"] == 2.1


@pytest.mark.parametrize(("factor", "is_scaled"), [(4.0, True), (0.0, False), (1.0, False)])
def test_a_factor_of_positions_without_a_type_is_linear(factor, is_scaled, tmp_path):
    path = write(tmp_path / "a.gguf", "llama2", **{"llama.rope.scaling.factor": factor})
    scaling = {"rope_type": "linear", "factor": factor} if is_scaled else None
    assert Gguf(path).config()["rope_scaling"] == scaling


def test_a_model_may_be_imported_in_bfloat16(monkeypatch, tmp_path):
    path = write(tmp_path / "a.gguf", "llama3", **TOKENS)
    words = ["import", str(path), "--workdir", str(tmp_path / "run"), "--param-dtype", "bfloat16"]
    monkeypatch.setattr("sys.argv", ["program", *words])
    assert main() == 0
    model, _, _ = load_run(tmp_path / "run")
    assert model.config.param_dtype == model.embed.embedding.dtype == "bfloat16"


def factors(factor: float) -> np.ndarray:
    """Divisors of the frequencies of Llama 3 for heads of 8 features and the base 500,000."""
    waves = 2 * np.pi * 5e5 ** (np.arange(4) / 4)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    return np.float32(1 / ((1 - smooth) / factor + smooth))


def test_scaled_positions_of_llama_3_are_read_from_their_factors(tmp_path):
    def scaling(divisors):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_uint32("llama.block_count", 0)
        writer.add_float32("llama.rope.freq_base", 5e5)
        writer.add_tensor("token_embd.weight", np.zeros((7, 8), np.float32))
        writer.add_tensor("rope_freqs.weight", divisors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Gguf(tmp_path / "a.gguf").config()["rope_scaling"]

    for factor in (8.0, 16.0, 32.0):
        assert scaling(factors(factor))["factor"] == factor
    with pytest.raises(UserError, match="do not belong to Llama 3"):
        scaling(factors(8.0)[::-1])


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Repeatedly merge the adjacent pair whose result has the highest score, the first one."""
    parts = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if not pairs:
            return parts
        place = -max(pairs)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]


def test_subwords_of_sentencepiece_are_merged_by_their_scores(tmp_path):
    parts = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>"]
    first = len(parts)
    letters = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "▁abc", "cab", "bb"]
    order = [0, 0, 0, 0, -3, -1, -7, -2, -5, -4, -6, -9, -8]
    tokens = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": parts + letters,
        "tokenizer.ggml.scores": [0.0] * first + [float(x) for x in order],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6] + [1] * len(letters),
        **{f"tokenizer.ggml.{x}_token_id": i for i, x in enumerate(("unknown", "bos", "eos"))},
    }
    _, tokenizer = from_pretrained(write(tmp_path / "a.gguf", "llama3", **tokens))
    scores = dict(zip(letters, order, strict=True))
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(rng.choice(list("abc ab"), 12)).strip() or "a"
        wanted = merged("▁" + text.replace(" ", "▁"), scores)
        ids = tokenizer.encode(text)
        assert [(parts + letters)[i] for i in ids] == wanted
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é") == [first, 3, 4]
    assert tokenizer.config()["add_prefix_space"] is True
    assert tokenizer.start_ids == (1,)
    assert _merges_of(["a", "b", "ab", "ba"], [0.0, 0.0, -2.0, -1.0]) == [["b", "a"], ["a", "b"]]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234 é", ["it", "'s", "Ġ1234", "ĠÃ©"]),
        ("smollm", "it's 12 é", ["it", "'s", "Ġ", "1", "2", "ĠÃ©"]),
        ("llama-bpe", "It'S 1234\n\n!", ["It", "'S", "Ġ", "123", "4", "ĊĊ", "!"]),
        ("lfm2", "1234", ["123", "4"]),
        ("qwen2", "it's 12 a", ["it", "'s", "Ġ", "1", "2", "Ġa"]),
        ("deepseek-r1-qwen", "12", ["1", "2"]),
    ],
)
def test_texts_are_divided_as_by_the_original_tokenizers(pre, text, words):
    parts = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre].components}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    divider = Tokenizer.from_str(json.dumps({"model": model, "pre_tokenizer": parts}))
    assert [x for x, _ in divider.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count=8 is unknown, and may change results"),
        ({"llama.attention.value_length": 6}, "attention.value_length, .* differ, which is unsup"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn' is unsupported"),
        ({"split.count": 2}, "is a part of a model; join them"),
        ({"llama.block_count": None}, "llama.block_count is missing; fetch the file again"),
        ({"llama.block_count": 2**31}, "block_count=2147483648, but its tensors have 2 layers"),
        ({"llama.block_count": "2"}, "block_count='2', but its tensors have 2 layers"),
        ({"split.count": "x"}, "is damaged or of an unsupported kind .TypeError"),
        (TOKENS | {"tokenizer.ggml.eot_token_id": 7}, "eot_token_id=7 must be below 7; fetch it"),
        (TOKENS | {"tokenizer.ggml.eos_token_id": "a"}, "eos_token_id='a' must be below 7; fetch"),
        (TOKENS | {"tokenizer.ggml.eos_token_id": None}, r"a\.gguf, as files/tokenizer"),
        (TOKENS | {"tokenizer.ggml.token_type": [1]}, r"is damaged .*zip\(\)"),
        (TOKENS | {"tokenizer.ggml.tokens": ["a"] * 7}, "has equal tokens; fetch it again"),
        (TOKENS | {"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre=None is unsupported"),
        (TOKENS | {"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre='tekken' is unsupported"),
        (TOKENS | {"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is unsupported"),
        (
            TOKENS | {"llama.feed_forward_length": 25},
            "down_proj.weight has shape .*, but its header describes .*; fetch it again, or choos",
        ),
    ],
)
def test_other_fields_are_refused(changes, message, tmp_path):
    path = write(tmp_path / "a.gguf", "llama3", **TOKENS | changes)
    with pytest.raises(UserError, match=message):
        from_pretrained(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"no model")
    with pytest.raises(
        UserError, match=r"a\.gguf is damaged or of an unsupported kind .*; fetch it again"
    ):
        from_pretrained(path)
    with pytest.raises(UserError, match=r"has a file of llama.cpp; give its path, .*a\.gguf"):
        from_pretrained(tmp_path)
    gguf.GGUFWriter(path, "mamba")
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"general\.architecture='mamba' is unsupported; choose"):
        from_pretrained(path)
