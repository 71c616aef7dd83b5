"""Pretrained models of transformers: its logits and continuations, and exact files."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from lm_eval.api.instance import Instance
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from heinsen_jax import data, evaluate, linearize
from heinsen_jax.config import load_config
from heinsen_jax.data.tokenizer_files import stop_ids_of
from heinsen_jax.errors import UserError
from heinsen_jax.generate import complete, generate
from heinsen_jax.generate.__main__ import main as generate_main
from heinsen_jax.generate.options import TextOptions
from heinsen_jax.generate.text import sample
from heinsen_jax.interop import hub
from heinsen_jax.interop.harness import HarnessModel
from heinsen_jax.interop.transformers import (
    from_pretrained,
    import_model,
    pretrained,
    to_pretrained,
)
from heinsen_jax.interop.transformers.__main__ import main
from heinsen_jax.interop.transformers.families import family_of
from heinsen_jax.interop.transformers.matching import family_for
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers
from heinsen_jax.models.conversion import linear_layers, shared_weights, with_lora
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.load import Precision, load_run
from heinsen_jax.runtime.arguments import parse
from tests.conftest import GOLDEN_FOLDER
from tests.golden.write_exports import TOKENS, linearized
from tests.models.small import apply, random_model

FOLDER = GOLDEN_FOLDER / "transformers"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
SHORT = {"llama3", "qwen3", "gpt2", "gpt_neox", "olmo_hybrid", "granite", "qwen3_5"}
SHORT |= {"lfm2", "nemotron_h", "falcon_h1", "gemma3"}
HYBRIDS = [x for x in NAMES if re.match(".*hybrid|qwen3_5|lfm2|nemotron|falcon|olmo3|gemma", x)]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    files = (load_file(path) for path in folder.glob("*.safetensors"))
    return {name: x for arrays in files for name, x in arrays.items()}


def fields(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def meaning(folder: Path):
    return family_of(fields(folder), folder / "config.json").to_model()


def changed(name: str, folder: Path, **changes) -> Path:
    """A copy of a checkpoint with other fields in its `config.json`; `...` removes one."""
    shutil.copytree(FOLDER / name, folder)
    values = fields(folder) | changes
    values = {k: v for k, v in values.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def assert_same(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert have.keys() == want.keys()
    for name, x in want.items():
        assert have[name].dtype == x.dtype
        np.testing.assert_array_equal(have[name], x, err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.nightly] * (x not in SHORT)) for x in NAMES]
)
def test_logits_and_greedy_continuations_are_those_of_transformers(name):
    model, _ = from_pretrained(FOLDER / name)
    with np.load(FOLDER / name / "expected.npz") as want:
        tolerance = 1e-4 * np.std(want["logits"])
        logits = apply(model, want["tokens"])
        np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=tolerance)
        made = generate(model, want["prompts"], want["new"].shape[1], top_k=1)
        np.testing.assert_array_equal(made, want["new"])


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.nightly] * (x not in SHORT)) for x in HYBRIDS]
)
def test_logits_in_uneven_chunks_are_those_of_transformers(name):
    model, _ = from_pretrained(FOLDER / name)
    with np.load(FOLDER / name / "expected.npz") as want:
        state, chunks = None, []
        for tokens in np.split(want["tokens"], [3, 4, 11], 1):
            logits, state = apply(model, tokens, state, return_state=True)
            chunks.append(logits)
        tolerance = 1e-4 * np.std(want["logits"])
        np.testing.assert_allclose(
            np.concatenate(chunks, 1), want["logits"], rtol=0, atol=tolerance
        )


def test_the_language_model_of_a_model_of_text_and_images_is_read(tmp_path):
    text, folder = fields(FOLDER / "qwen3_5"), tmp_path / "a"
    outer = {name: text.pop(name) for name in ("dtype", "tie_word_embeddings")}
    folder.mkdir()
    content = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}} | outer
    content |= {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(content))
    arrays = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in tensors(FOLDER / "qwen3_5").items()
    }
    other = {name: np.zeros((2, 3), np.float32) for name in ("model.visual.a", "mtp.norm.weight")}
    save_file(arrays | other, folder / "model.safetensors")
    models = (from_pretrained(x)[0] for x in (folder, FOLDER / "qwen3_5"))
    assert_same(*(flatten_with_names(nnx.state(x, nnx.Param)) for x in models))
    written = to_pretrained(from_pretrained(folder)[0], tmp_path / "b", like=folder)
    assert_same(tensors(written), tensors(FOLDER / "qwen3_5"))
    assert fields(written)["model_type"] == "qwen3_5_text"
    assert fields(written)["architectures"] == ["Qwen3_5ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": {}}))
    with pytest.raises(UserError, match=r"quantization_config=.* is unknown, and may change"):
        from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    with pytest.raises(UserError, match="text_config must be an object with model_type='qwen3_5_"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name.startswith("olmo_h")])
def test_hybrids_that_transformers_has_written_are_read(name, tmp_path):
    """It gives norms of softmax attention another name, and convolutions equally many features."""
    folder = changed(name, tmp_path / "a")
    arrays = tensors(folder)
    for path in [*arrays]:
        if path.endswith("self_attn.q_norm.weight"):
            place = path.removesuffix("self_attn.q_norm.weight")
            norm = arrays.pop(f"{place}post_attention_layernorm.weight")
            arrays[f"{place}feedforward_layer_norm.weight"] = norm
        if path.endswith("q_conv1d.weight"):
            names = [path.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
            parts = np.array_split(np.concatenate([arrays[x] for x in names]), 3)
            arrays |= dict(zip(names, parts, strict=True))
    save_file(arrays, folder / "model.safetensors")
    models = (from_pretrained(x)[0] for x in (folder, FOLDER / name))
    assert_same(*(flatten_with_names(nnx.state(x, nnx.Param)) for x in models))


def test_files_in_bfloat16_are_loaded_in_their_own_size(tmp_path):
    """A single matrix in float32 makes all parameters float32."""
    small, _ = from_pretrained(FOLDER / "qwen3")
    wide, _ = from_pretrained(FOLDER / "qwen3", param_dtype="float32")
    assert (small.config.param_dtype, wide.config.param_dtype) == ("bfloat16", "float32")
    ours, theirs = (flatten_with_names(nnx.state(x, nnx.Param)) for x in (small, wide))
    for name, x in ours.items():
        assert x.dtype == (np.float32 if "norm" in name else "bfloat16")
        np.testing.assert_array_equal(np.float32(x), theirs[name])
    assert {x.dtype for x in theirs.values()} == {np.dtype(np.float32)}
    folder, arrays = changed("qwen3", tmp_path / "a"), tensors(FOLDER / "qwen3")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(arrays | {name: np.float32(arrays[name])}, folder / "model.safetensors")
    assert from_pretrained(folder)[0].config.param_dtype == "float32"
    half, _ = from_pretrained(folder, dtype="bfloat16", param_dtype="bfloat16")
    assert (half.config.dtype, half.embed.embedding.dtype) == ("bfloat16", "bfloat16")


def test_commands_choose_the_dtypes_of_a_model(tmp_path):
    run = import_model(str(FOLDER / "qwen2"), tmp_path / "run")
    model, _, _ = load_run(run)
    assert (model.config.dtype, model.config.param_dtype) == ("float32", "bfloat16")
    assert model.embed.embedding.dtype == "bfloat16"
    stored = sum(x.stat().st_size for x in run.glob("*.safetensors"))
    original = sum(x.stat().st_size for x in (FOLDER / "qwen2").glob("*.safetensors"))
    assert stored < 1.2 * original
    model, _, _ = load_run(run, precision=Precision(param_dtype="float32"))
    assert model.embed.embedding.dtype == "float32"
    words = ["--workdir", str(run), "--model.dtype", "bfloat16", "--model.param-dtype=float32"]
    config = parse(TextOptions, prog="x", description=None, arguments=words).load().config
    assert (config.dtype, config.param_dtype) == ("bfloat16", "float32")
    words = ["--workdir", str(run), "--model.dtype", "half"]
    with pytest.raises(
        UserError, match=r"--model\.dtype half: no such choice; choose one of float"
    ):
        parse(TextOptions, prog="x", description=None, arguments=words)


def test_parameters_may_stay_in_the_memory_of_the_host():
    on_host, on_device = (from_pretrained(FOLDER / "gpt2", on_host=x)[0] for x in (True, False))
    ours, theirs = (flatten_with_names(nnx.state(x, nnx.Param)) for x in (on_host, on_device))
    assert {type(x) for x in ours.values()} == {np.ndarray}
    assert all(isinstance(x, jax.Array) for x in theirs.values())
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_written_exactly(name, tmp_path):
    model, tokenizer = from_pretrained(FOLDER / name)
    folder = to_pretrained(model, tmp_path / "a", like=FOLDER / name, tokenizer=tokenizer)
    assert_same(tensors(folder), tensors(FOLDER / name))
    assert meaning(folder) == meaning(FOLDER / name)
    original = fields(FOLDER / name)
    assert fields(folder)["torch_dtype"] == original["dtype"]
    assert fields(folder)["architectures"] == original["architectures"]
    assert fields(folder)["initializer_range"] == original["initializer_range"]
    again, other = from_pretrained(folder)
    leaves = (flatten_with_names(nnx.state(x, nnx.Param)) for x in (again, model))
    assert_same(*leaves)
    if tokenizer is not None:
        assert other is not None
        assert other.fingerprint == tokenizer.fingerprint
        assert other.templates == tokenizer.templates
        assert other.special_tokens == tokenizer.special_tokens
        assert other.start_ids == tokenizer.start_ids
        settings, original = (
            json.loads((x / "tokenizer_config.json").read_text()) for x in (folder, FOLDER / name)
        )
        assert settings.items() >= original.items()


def test_tensors_keep_their_own_dtypes(tmp_path):
    """Published checkpoints have rates of decay in float32."""
    folder = changed("qwen3_5", tmp_path / "a")
    arrays = tensors(folder)
    for name in arrays:
        if name.endswith("A_log"):
            arrays[name] = np.float32(arrays[name]) * np.float32(1.001)
    save_file(arrays, folder / "model.safetensors")
    model, _ = from_pretrained(folder)
    assert_same(tensors(to_pretrained(model, tmp_path / "b", like=folder)), arrays)
    written = tensors(to_pretrained(model, tmp_path / "c", like=folder, dtype="bfloat16"))
    assert {str(x.dtype) for x in written.values()} == {"bfloat16"}


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_is_written(name, tmp_path):
    """It has computed the logits of the originals with these tensors and this configuration."""
    model, tokenizer = from_pretrained(FOLDER / name)
    folder = to_pretrained(model, tmp_path / "a", tokenizer=tokenizer)
    assert_same(tensors(folder), {k: np.float32(x) for k, x in tensors(FOLDER / name).items()})
    assert fields(folder) == json.loads((FOLDER / "exports.json").read_text())[name]


@pytest.mark.parametrize(
    ("name", "kind"), [("llama3", "granitemoehybrid"), ("qwen3", "qwen3_5_text")]
)
def test_linearized_models_are_written(name, kind, tmp_path):
    """As other families, which transformers has read with equal logits."""
    model = linearized(name)
    folder = to_pretrained(model, tmp_path / "a")
    recorded = json.loads((FOLDER / "exports.json").read_text())[f"{name}_linearized"]
    assert fields(folder) == recorded
    assert recorded["model_type"] == kind
    again, _ = from_pretrained(folder)
    np.testing.assert_allclose(apply(again, TOKENS), apply(model, TOKENS), atol=5e-5)


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        (
            "qwen2",
            "gated_deltanet",
            r"hybrid: model.attention\[1\].norm_after is False, not True",
        ),
        ("qwen3", "kda", r"model\.attention is .'kda', 'gqa'., not "),
        ("llama3", "log_window", r"model\.attention is .'log_window', 'gqa'., not "),
    ],
)
def test_linearized_models_without_a_family_are_refused(name, attention, message, tmp_path):
    teacher, _ = from_pretrained(FOLDER / name)
    config = linear_layers(teacher.config, attention, ["1"])
    with pytest.raises(UserError, match=message):
        to_pretrained(LanguageModel(config, rngs=nnx.Rngs(0)), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_model_is_written_without_its_original(tmp_path):
    model, _ = from_pretrained(FOLDER / "mistral")
    folder = to_pretrained(model, tmp_path / "a", shard_bytes=9_000, dtype="bfloat16")
    assert len(list(folder.glob("model-0000*.safetensors"))) > 1
    assert_same(tensors(folder), tensors(FOLDER / "mistral"))
    assert meaning(folder) == meaning(FOLDER / "mistral")
    with pytest.raises(UserError, match="a exists; give the name of a new folder"):
        to_pretrained(model, tmp_path / "a")


def test_a_model_of_this_package_is_written(tmp_path):
    config = LanguageModelConfig(
        vocab_size=11, model_dim=16, num_layers=1, num_heads=4, attention="gqa", block="llama"
    )
    model = random_model(config)
    again, tokenizer = from_pretrained(to_pretrained(model, tmp_path / "a"))
    assert tokenizer is None
    leaves = (flatten_with_names(nnx.state(x, nnx.Param)) for x in (again, model))
    assert_same(*leaves)
    assert fields(tmp_path / "a")["model_type"] == "llama"
    without = replace(config, attention=Layers("gqa", options={"positions": "none"}))
    to_pretrained(random_model(without), tmp_path / "b")
    assert fields(tmp_path / "b")["no_rope_layers"] == [0]


def test_a_tokenizer_of_this_package_is_written_for_other_libraries(tmp_path):
    sizes = {"model_dim": 16, "num_layers": 1, "num_heads": 4}
    model = random_model(
        LanguageModelConfig(vocab_size=257, **sizes, attention="gqa", block="llama")
    )
    ours = data.get_tokenizer("bytes")
    folder = to_pretrained(model, tmp_path / "a", tokenizer=ours)
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.encode("é a<|endoftext|>").ids == [*ours.encode("é a"), 256]
    _, again = from_pretrained(folder)
    assert again.encode("é a") == ours.encode("é a")
    assert again.stop_ids == (ours.end_of_text_id,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": "paper"}, "model: no supported model of transformers has its architecture"),
        ({"logit_soft_cap": 3.0}, r"in the closest one, llama: model\.logit_soft_cap is 3\.0"),
        ({"value_depth": 3}, r"llama: model\.attention\.value_depth is 3, not 4"),
        (
            {"attention": Layers("softmax", options={"positions": "alibi"})},
            r"model\.attention\.positions is 'alibi', not 'rotary'",
        ),
        ({"attention": "log"}, r"model\.attention"),
        ({"attention": ("gqa", "softmax"), "num_layers": 2}, r"model\.attention"),
        (
            {"block": "standard", "model_dim": 15, "num_heads": 3},  # rotary needs even depths
            r"in the closest one, \w+: its field",
        ),
    ],
)
def test_other_architectures_cannot_be_written(changes, message, tmp_path):
    sizes = {"vocab_size": 11, "model_dim": 16, "num_layers": 1, "num_heads": 4}
    block = {"block": "llama", "attention": "softmax"}
    model = random_model(LanguageModelConfig(**sizes | block | changes))
    with pytest.raises(UserError, match=message):
        to_pretrained(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_fields_without_a_fact_in_the_model_are_written(tmp_path):
    """A null window, widths of Mamba-2 below the model's, and YaRN beside another scale."""
    model, _ = from_pretrained(changed("mistral", tmp_path / "a", sliding_window=None))
    written = to_pretrained(model, tmp_path / "b", like=tmp_path / "a")
    assert fields(written)["sliding_window"] is None
    sizes = {"mamba_d_ssm": 8, "mamba_n_heads": 2, "mamba_d_head": 4, "mamba_n_groups": 1}
    falcon = meaning(changed("falcon_h1", tmp_path / "c", **sizes))
    assert family_for(falcon, "falcon_h1").to_model() == falcon
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    local = {"rope_type": "default", "rope_theta": 1e4}
    parameters = {"full_attention": yarn | {"rope_theta": 1e6}, "sliding_attention": local}
    changes = {"rope_parameters": parameters, "query_pre_attn_scalar": 168}
    gemma = meaning(changed("gemma3", tmp_path / "d", **changes))
    again = family_for(gemma, None)
    assert again.model_type == "gemma3_text"
    assert (again.query_pre_attn_scalar, again.rope.attention_factor) == (
        168,
        pytest.approx(0.1 * np.log(4) + 1),
    )


def test_fields_of_parts_that_are_not_written_are_not_copied(tmp_path):
    parts = {"mtp_num_hidden_layers": 1, "auto_map": {"AutoConfig": "own.Config"}}
    like = changed("qwen3_5", tmp_path / "a", **parts)
    written = to_pretrained(from_pretrained(like)[0], tmp_path / "b", like=like)
    assert not parts.keys() & fields(written).keys()


def test_tensors_are_written_without_another_copy(monkeypatch, tmp_path):
    written = {}
    monkeypatch.setattr(pretrained, "save_weights", lambda _, arrays, **__: written.update(arrays))
    to_pretrained(from_pretrained(FOLDER / "llama3")[0], tmp_path / "a", dtype="bfloat16")
    assert all(x.flags.c_contiguous for x in written.values())


def test_too_large_values_are_refused(tmp_path):
    model = nnx.clone(from_pretrained(FOLDER / "llama3")[0])
    model.norm.scale[...] = 1e6 * jnp.ones(16).at[0].set(jnp.inf)
    with pytest.raises(UserError, match=r"float16: model\.norm\.weight exceeds its range"):
        to_pretrained(model, tmp_path / "a", dtype="float16")


@pytest.mark.usefixtures("unchecked")
def test_other_dtypes_are_not_written(tmp_path):
    model, _ = from_pretrained(FOLDER / "llama3")
    like = changed("llama3", tmp_path / "like", dtype=..., torch_dtype="float64")
    with pytest.raises(UserError, match=r"like/config\.json: dtype='float64' is unsupported"):
        to_pretrained(model, tmp_path / "a", like=like)
    with pytest.raises(UserError, match=r"^dtype='float64' is unsupported; give one of float32"):
        to_pretrained(model, tmp_path / "a", dtype="float64")
    with pytest.raises(UserError, match=r"none: not a checkpoint .* give the local folder"):
        to_pretrained(model, tmp_path / "a", like=tmp_path / "none")


@pytest.mark.parametrize(("outer", "expected"), [({}, [5, 7]), ({"eos_token_id": 2}, [2])])
def test_stop_tokens_of_a_model_of_text_and_images(outer, expected, tmp_path):
    values = {"model_type": "qwen3_5", "text_config": {"eos_token_id": [5, 7]}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert stop_ids_of(tmp_path) == expected


def test_a_missing_tokenizer_is_named_before_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no tokenizer\.json; add the file"):
        import_model(tmp_path, tmp_path / "new")


def test_a_linearized_model_is_not_written_like_its_teacher():
    config = linear_layers(meaning(FOLDER / "llama3"), "mamba2", ["1"])
    assert family_for(config, None).model_type == "granitemoehybrid"
    with pytest.raises(UserError, match=r"like .*model_type is llama, .* leave like out"):
        family_for(config, "llama")


YARN = {"rope_type": "yarn", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3", {"model_type": "gemma3"}, r"config\.json: model_type='gemma3' is unsupported"),
        ("llama3", {"residual_multiplier": 2.0}, r"residual_multiplier=2\.0 is unknown"),
        ("llama3", {"quantization_config": {}}, r"quantization_config={} is unknown"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act='gelu' is unsupported: Input should be"),
        ("llama3", {"hidden_size": ...}, "hidden_size: Field required"),
        ("llama3", {"hidden_size": "16"}, "hidden_size='16' is unsupported"),
        ("llama3", {"rope_parameters": DYNAMIC}, r"rope_parameters\.rope_type='dynamic' is unsup"),
        (
            "llama3",
            {"rope_parameters": YARN, "max_position_embeddings": ...},
            "rope_type yarn needs original_max_position_embeddings; add it$",
        ),
        (
            "llama3",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...},
            r"json: rope_scaling\.type='dynamic' is unsupported: Input should be",
        ),
        (
            "llama3",
            {"rope_scaling": {"type": "linear"}, "rope_parameters": ...},
            "json: rope_scaling: rope_type linear needs factor; add it$",
        ),
        (
            "llama3",
            {"rope_scaling": {"factor": 8.0}, "rope_parameters": ...},
            "json: rope_scaling: rope_type default does not use factor; correct one of them$",
        ),
        (
            "llama3",
            {"rope_scaling": {"type": ["linear"]}, "rope_parameters": ...},
            r"json: rope_scaling\.type=\['linear'\] is unsupported",
        ),
        ("llama3", {"rope": {"rope_theta": 1.0}}, "json: rope is unknown, and may change results"),
        (
            "llama3",
            {"rope_scaling": 2.0},
            r"json: rope_scaling=2\.0 must be an object; correct it$",
        ),
        ("llama3", {"model_type": ["llama"]}, r"json: model_type=\['llama'\] is unsupported"),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "llama3", "type": "linear"}},
            r"rope_parameters\.rope_type='llama3' and rope_parameters\.type='linear' differ",
        ),
        (
            "llama3",
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_parameters\.rope_theta=10000\.0 and rope_theta=1000000\.0 differ; remove one$",
        ),
        (
            "llama3",
            {"rope_theta": -1.0, "rope_parameters": ...},
            r"json: rope_theta=-1\.0 is unsup",
        ),
        (
            "llama3",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1 in llama",
        ),
        ("llama3", {"num_key_value_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ("llama3", {"head_dim": 5}, "key_depth=5: rotary"),
        ("llama3", {"head_dim": None, "num_attention_heads": 3}, "num_heads=3 does not divide"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is unsupported"),
        ("qwen2", {"vocab_size": 267}, "vocab_size=267 is less than the 268 tokens of"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, r"layer_types\.0='sliding_attention"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu' is unsupported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True is unsupp"),
        (
            "gpt_neox",
            {"rope_parameters": {"partial_rotary_factor": 0.1}},
            r"rotary_fraction=0\.1: it selects 0 of 8 features",
        ),
        (
            "gpt_neox",
            {"rotary_pct": 0.5, "partial_rotary_factor": 0.25, "rope_parameters": ...},
            r"rotary_pct=0\.5 and partial_rotary_factor=0\.25 differ; remove one",
        ),
        ("llama3", {"is_encoder_decoder": True}, "is_encoder_decoder=True is unsupported"),
        ("mistral", {"add_cross_attention": True}, "add_cross_attention=True is unsupported"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unsupported_fields_are_named_before_weights_are_read(name, changes, message, tmp_path):
    folder = changed(name, tmp_path / "a", **changes)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"n_special": 0, "predict_special_tokens": True, "_num_labels": 1}),
        ("gpt2", {"gradient_checkpointing": False, "output_past": True}),
        ("llama3", {"quantization_config": None, "temperature": 0.6, "top_p": 0.9}),
        ("llama3", {"is_encoder_decoder": False, "tie_encoder_decoder": False}),
        ("gpt_neox", {"add_cross_attention": False, "use_bfloat16": False}),
        ("llama3", {"max_sequence_length": 2048}),
        ("qwen2", {"output_scores": False, "early_stopping": False, "num_beam_groups": 1}),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_fields_without_effect_on_logits_are_accepted(name, changes, tmp_path):
    ours, theirs = from_pretrained(changed(name, tmp_path / "a", **changes))[0], FOLDER / name
    assert ours.config == from_pretrained(theirs)[0].config


def without(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k != name}, path)


def with_tensors(folder: Path, **values: np.ndarray) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {k.replace("__", "."): v for k, v in values.items()}, path)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def as_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: without(folder, "model.layers.1.self_attn.k_proj.weight"),
            r"tensor model\.layers\.1\.self_attn\.k_proj\.weight is missing",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps(fields(folder) | {"tie_word_embeddings": False})
            ),
            r"lm_head\.weight is missing; fetch .* again, or set tie_word_embeddings to true",
        ),
        (
            lambda folder: with_tensors(folder, model__extra=np.ones(3)),
            r"model\.safetensors: tensor model\.extra has dtype F64, which is unsupported",
        ),
        (
            lambda folder: with_tensors(folder, score__weight=np.ones(3, "f")),
            r"model\.safetensors: tensor score\.weight is no part of the model",
        ),
        (
            lambda folder: with_tensors(folder, model__norm__weight=np.ones(3, "f")),
            r"tensor model\.norm\.weight has shape \[3\], but config\.json describes \[16\]",
        ),
        (
            lambda folder: with_tensors(folder, lm_head__weight=np.ones((67, 16), "f")),
            r"lm_head\.weight differs from model\.embed_tokens\.weight.*set tie_word_embeddings",
        ),
        (cut, r"model\.safetensors is damaged"),
        (
            as_bin,
            r"pytorch_model\.bin has the format of PyTorch, which is not read; give a folder with",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is damaged"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json cannot be read"),
    ],
)
def test_damage_is_named(damage, message, tmp_path):
    folder = changed("llama2", tmp_path / "a")
    damage(folder)
    with pytest.raises(UserError, match=message):
        from_pretrained(folder)


def test_damaged_shards_are_named(tmp_path):
    folder = changed("llama3", tmp_path / "a")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"00001-of-00002\.safetensors has no tensor model\.norm"):
        from_pretrained(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        from_pretrained(folder)


def test_files_of_earlier_versions_are_read(tmp_path):
    """The names of OpenAI's gpt2 have no prefix; masks and tied readouts may be in the file."""
    folder = changed("gpt2", tmp_path / "a", n_ctx=40)
    path = folder / "model.safetensors"
    held = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    held |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), bool), "lm_head.weight": held["wte.weight"]}
    save_file(held, path)
    models = from_pretrained(folder)[0], from_pretrained(FOLDER / "gpt2")[0]
    assert_same(*(flatten_with_names(nnx.state(x, nnx.Param)) for x in models))


@pytest.mark.parametrize(
    ("name", "earlier"),
    [
        ("llama2", {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen2", {"rope_theta": 1e6, "torch_dtype": "bfloat16", "layer_types": ...}),
        ("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5}),
        ("gpt_neox", {"rope_theta": 10000, "partial_rotary_factor": 0.5}),
        (
            "gpt_neox",
            {"rotary_emb_base": 10000, "rope_theta": 10000.0}
            | {"rotary_pct": 0.5, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_fields_of_earlier_versions_are_read(name, earlier, tmp_path):
    folder = changed(name, tmp_path / "a", rope_parameters=..., **earlier)
    assert meaning(folder) == meaning(FOLDER / name)


@pytest.mark.parametrize("is_low_rank", [False, True])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama3", "gqa"),
        pytest.param("qwen3", "gqa", marks=pytest.mark.nightly),
        pytest.param("gpt2", "softmax", marks=pytest.mark.nightly),
        ("gpt_neox", "softmax"),
    ],
)
def test_layers_of_constant_cost_have_the_positions_of_the_model(name, kept, is_low_rank):
    """A window over the whole sequence makes them exact softmax attention; grouped or normalized
    keys, learned positions, rotary ones of a part of each head and parallel branches stay. Low-rank
    additions are 0 at first."""
    teacher, _ = from_pretrained(FOLDER / name)
    config = linear_layers(teacher.config, "log_window:window_size=32", keep=["0"])
    assert config.layer_pattern == (kept, "log_window")
    config = with_lora(config, 2) if is_low_rank else config
    start = LanguageModel(config, rngs=nnx.Rngs(0)) if is_low_rank else random_model(config)
    graph, state = nnx.split(start)
    arrays = flatten_with_names(state) | shared_weights(config, teacher)
    model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), [*arrays.values()]))
    with np.load(FOLDER / name / "expected.npz") as want:
        np.testing.assert_allclose(apply(model, want["tokens"]), want["logits"], rtol=0, atol=1e-4)


def test_a_repository_is_downloaded(monkeypatch, tmp_path):
    requested = []

    def download(name, *, revision, allow_patterns):
        requested.append((name, revision))
        if name != "them/tiny":
            raise LocalEntryNotFoundError("offline")
        return str(FOLDER / "qwen3")

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert from_pretrained("them/tiny", revision="main")[0].config.vocab_size == 67
    assert requested == [("them/tiny", "main")]
    with pytest.raises(UserError, match="them/none is not a local folder, and could not be downl"):
        from_pretrained("them/none")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"^them/tiny-GGUF holds no model .* download a .gguf"):
        from_pretrained("them/tiny-GGUF")


@pytest.mark.nightly
def test_texts_begin_with_the_tokens_that_the_model_expects(tmp_path):
    """In continuations and in tasks, as in transformers: <|begin|>, which `encode` does not add."""
    model, tokenizer = from_pretrained(FOLDER / "qwen2")
    assert tokenizer is not None
    prompt = [*tokenizer.start_ids, *tokenizer.encode("exact")]
    new = generate(model, jnp.array(prompt), 4, top_k=1, num_tokens=268).tolist()
    ((text,),) = complete(model, tokenizer, ["exact"], 4, top_k=1)
    assert text == tokenizer.decode(new)
    assert sample(model, tokenizer, "exact", 4, temperature=1e-6) == f"exact{text}"
    adapter = HarnessModel(str(import_model(str(FOLDER / "qwen2"), tmp_path / "run")))
    assert adapter.tok_encode("exact") == prompt
    assert adapter.tok_encode("exact", add_special_tokens=False) == prompt[1:]
    assert adapter.prefix_token_id == prompt[0]
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=("exact",), idx=0)
    (value,) = adapter.loglikelihood_rolling([request])
    chat = [{"role": "user", "content": "hi"}]
    text = adapter.apply_chat_template(chat)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert adapter.tok_encode(text, add_special_tokens=False) == ids
    ids = [*tokenizer.start_ids, *ids]
    assert adapter.tok_encode(text) == adapter.tok_encode(f"<|begin|>{text}") == ids
    asked = (text, {"max_gen_toks": 4, "until": []})
    (said,) = adapter.generate_until(
        [Instance(request_type="generate_until", doc={}, arguments=asked, idx=0)]
    )
    assert [[said]] == complete(model, tokenizer, [ids], 4, top_k=1)
    assert adapter.chat_template(True) == tokenizer.templates["default"]
    with pytest.raises(UserError, match="--apply_chat_template tools: templates cannot"):
        adapter.chat_template("tools")
    logits = apply(model, np.array([adapter.prefix_token_id, *prompt[:-1]]))
    want = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.array(prompt)[:, None], -1)
    assert value == pytest.approx(float(want.sum()), abs=1e-4)


def test_cards_say_where_weights_are_from(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(FOLDER / "qwen2"))
    monkeypatch.chdir(tmp_path)
    teacher = import_model("them/tiny", tmp_path / "import")
    said = (hub.save_pretrained(teacher, tmp_path / "a") / "README.md").read_text()
    assert "The weights of them/tiny, converted by heinsen_jax and not trained further." in said
    assert ModelCard(said).data.base_model == "them/tiny"
    assert not re.search("A model trained|steps|learning rate|data |model://", said)
    values = fields(teacher)
    values["data"]["corpus"] = "shakespeare"
    values |= {"distillation": {"teacher": str(teacher)}, "training": {"steps": 9}}
    (tmp_path / "linear").mkdir()
    for path in teacher.iterdir():
        shutil.copy(path, tmp_path / "linear" / path.name)
    (tmp_path / "linear/config.json").write_text(json.dumps(values))
    said = (hub.save_pretrained(tmp_path / "linear", tmp_path / "b") / "README.md").read_text()
    assert "trained with heinsen_jax to imitate them/tiny, from whose weights it starts." in said
    assert "| data | shakespeare |" in said
    assert ModelCard(said).data.base_model == "them/tiny"
    shutil.rmtree(teacher)
    said = (hub.save_pretrained(tmp_path / "linear", tmp_path / "c") / "README.md").read_text()
    assert "to imitate import, from" in said
    assert str(tmp_path) not in said


def test_generation_ends_with_any_of_the_tokens_of_the_model(tmp_path):
    model, tokenizer = from_pretrained(FOLDER / "qwen2")
    assert tokenizer is not None
    prompt = jnp.array([*tokenizer.start_ids, *tokenizer.encode("exact")])
    new = generate(model, prompt, 6, top_k=1, num_tokens=268).tolist()
    last = next(i for i, token in enumerate(new) if i and token not in new[:i])
    folder = changed("qwen2", tmp_path / "a")
    values = {"eos_token_id": [new[last], 2], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(values))
    _, tokenizer, _ = load_run(import_model(str(folder), tmp_path / "run"))
    expected = tokenizer.decode(new[:last])
    assert complete(model, tokenizer, ["exact"], 6, top_k=1) == [[expected]]
    assert sample(model, tokenizer, "exact", 6, temperature=1e-6) == f"exact{expected}"
    ends = {"eos_token_id": [2, new[last]]}
    place = to_pretrained(model, tmp_path / "b", tokenizer=tokenizer)
    assert json.loads((place / "generation_config.json").read_text()) == ends
    assert fields(place)["eos_token_id"] == ends["eos_token_id"]
    place = to_pretrained(model, tmp_path / "c", tokenizer=tokenizer, like=folder)
    assert json.loads((place / "generation_config.json").read_text()) == values | ends


@pytest.mark.nightly
def test_an_import_has_its_own_tokenizer_wherever_it_is(monkeypatch, capsys, tmp_path):
    import_model(str(FOLDER / "qwen2"), tmp_path / "import")
    moved = (tmp_path / "import").rename(tmp_path / "moved")
    assert str(tmp_path) not in (moved / "config.json").read_text()
    (tmp_path / "a.txt").write_text("attention of constant cost\n" * 100)

    def evaluated(workdir: Path, *options: str) -> str:
        arguments = ["evaluate", "--workdir", str(workdir), "--max-batches", "1", *options]
        monkeypatch.setattr("sys.argv", arguments)
        code, said = evaluate.main(), capsys.readouterr()
        assert code == (2 if said.err else 0), said.err
        return said.err or said.out

    monkeypatch.chdir(tmp_path)  # with the folder of prepared data
    text = ["--data", str(tmp_path / "a.txt")]
    assert "loss: " in evaluated(moved, *text)
    said = "data.corpus=model://qwen2: the training text of an imported model is unknown"
    assert said in evaluated(moved)
    with pytest.raises(UserError, match=r"model://qwen2: .* --data\.corpus of heinsen_jax\.train"):
        data.load(load_config(moved / "config.json").data)
    options = linearize.Options(model=str(moved), workdir=str(tmp_path / "linear"), data=text[1])
    options = replace(options, transfer_steps=1, steps=1, attention=("log:features=hedgehog",))
    few = "--data.sequence-length 16 --data.batch-size 2 --training.evaluation-batches 1"
    assert linearize.linearize(options, few.split()) == 0
    capsys.readouterr()
    saved = hub.save_pretrained(options.workdir, tmp_path / "saved")
    for name in ("config.json", "README.md"):
        assert str(tmp_path) not in (saved / name).read_text()
    shutil.rmtree(moved)
    for folder in (saved, Path(options.workdir)):
        assert "loss: " in evaluated(folder, *text)
    assert "loss: " in evaluated(Path(options.workdir))


def test_commands_import_and_export(monkeypatch, capsys, tmp_path):
    workdir, output = str(tmp_path / "run"), tmp_path / "out"

    def call(program, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["program", *arguments])
        assert program() == 0
        return capsys.readouterr().out

    original = str(FOLDER / "qwen2")
    assert f"imported into {workdir}" in call(main, "import", original, "--workdir", workdir)
    model, tokenizer, step = load_run(workdir)
    ours, theirs = from_pretrained(original)
    assert (model.config, step) == (ours.config, 0)
    assert tokenizer.config() == theirs.config()
    said = call(generate_main, "--workdir", workdir, "--prompt", "att", "--max-new-tokens", "2")
    assert said.startswith("att")
    call(main, "export", "--workdir", workdir, "--output", str(output), "--like", original)
    assert_same(tensors(output), tensors(FOLDER / "qwen2"))
    monkeypatch.setattr("sys.argv", ["program", "import", str(FOLDER / "gpt2"), "--workdir", "x"])
    assert main() == 2
    assert "gpt2 has no tokenizer.json" in capsys.readouterr().err
