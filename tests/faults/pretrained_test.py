"""Files of pretrained models that contradict each other, are damaged, or are made to do harm."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from heinsen_jax.data import chat_template
from heinsen_jax.data.tokenizer_pretrained import pretrained_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import generate
from heinsen_jax.interop.transformers import from_pretrained, import_model, to_pretrained
from heinsen_jax.runs.load import load_run
from tests.conftest import GOLDEN_FOLDER

FOLDER = GOLDEN_FOLDER / "transformers"
LETTERS = {x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
USER, NEW = 257, 259
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
PLAIN = {"content": "<|user|>", **FLAGS, "special": True}
A, B, X, Y, Z, SPACE = (LETTERS[x] for x in ("a", "b", "x", "y", "z", "\u0120"))


def tokenizer_in(folder: Path, config=None, *, post=False, prefix=False, **files):
    tokenizer = Tokenizer(models.BPE(LETTERS, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>", "<s>"])
    if post:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 258)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "TokenizersBackend"} | (config or {})
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = pretrained_tokenizer(folder, "x")
    assert found is not None
    return found


def decoder(**flags):
    return {"added_tokens_decoder": {str(USER): PLAIN | flags}}


# Expected ids are those of transformers 5.24.
@pytest.mark.parametrize(
    ("config", "files", "text", "ids"),
    [
        ({}, {}, "a <|user|> b", [A, SPACE, USER, SPACE, B]),
        (decoder(rstrip=True), {}, "a <|user|> b", [A, SPACE, USER, B]),
        (decoder(lstrip=True), {}, "a <|user|> b", [A, USER, SPACE, B]),
        ({"pad_token": "<new>"}, {}, "x<new>y", [X, NEW, Y]),
        ({"additional_special_tokens": ["<new>"]}, {}, "x<new>y", [X, NEW, Y]),
        ({"extra_special_tokens": {"image_token": "<new>"}}, {}, "x<new>y", [X, NEW, Y]),
        ({}, {"added_tokens": {"<new>": NEW}}, "x<new>y", [X, NEW, Y]),
        ({}, {"special_tokens_map": {"pad_token": "<new>"}}, "x<new>y", [X, NEW, Y]),
        ({"add_prefix_space": True}, {}, "a", [A]),
        *(
            ({"add_prefix_space": True, "tokenizer_class": name}, {}, "a", [SPACE, A])
            for name in ("GPT2TokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizerFast")
        ),
    ],
)
def test_texts_are_encoded_as_the_merged_files_say(config, files, text, ids, tmp_path):
    assert tokenizer_in(tmp_path, config, **files).encode_with_special_tokens(text) == ids


def test_words_hide_tokens_that_are_single_words(tmp_path):
    found = tokenizer_in(tmp_path, decoder(single_word=True))
    assert USER not in found.encode_with_special_tokens("y<|user|>z")


def test_names_of_special_tokens_follow_transformers(tmp_path):
    names = {"eos_token": "<|user|>", "bos_token": "<s>"}
    assert tokenizer_in(tmp_path, special_tokens_map=names).end_of_text_id == USER
    assert tokenizer_in(tmp_path, decoder(), special_tokens_map=names).end_of_text_id == 256
    config = {"add_bos_token": False, "add_eos_token": True, "bos_token": "<s>"}
    assert tokenizer_in(tmp_path, config, post=True).start_ids == (258,)
    assert tokenizer_in(tmp_path, {"add_bos_token": True, "bos_token": "<s>"}).start_ids == ()


@pytest.mark.parametrize(
    "tokens",
    [5, [5], [{}], [{"id": 0}], [{"id": "0", "content": "a"}], [{"id": 256, "content": "a"}] * 2],
)
def test_malformed_added_tokens_are_refused(tokens, tmp_path):
    tokenizer_in(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": tokens}))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        pretrained_tokenizer(tmp_path, "x")


def test_a_single_file_precedes_shards_and_copies_must_be_equal(tmp_path):
    folder = shutil.copytree(FOLDER / "llama3", tmp_path / "a")
    shards = sorted(folder.glob("model-*.safetensors"))
    every = {k: x for path in shards for k, x in load_file(path).items()}
    name = "model.norm.weight"
    save_file(every | {name: every[name] * 2}, folder / "model.safetensors")
    want = np.float32(every[name]) * 2
    for _ in range(2):
        model, _ = from_pretrained(folder, on_host=True)
        np.testing.assert_array_equal(model.norm.scale[...], want)
        for path in shards:
            path.unlink(missing_ok=True)
    folder = shutil.copytree(FOLDER / "llama3", tmp_path / "b")
    first, last = sorted(folder.glob("model-*.safetensors"))
    name = min(load_file(first))
    save_file(load_file(last) | {name: every[name]}, last)
    from_pretrained(folder, on_host=True)
    save_file(load_file(last) | {name: every[name] * 2}, last)
    with pytest.raises(UserError, match=f"tensor {name} differs from the one in"):
        from_pretrained(folder, on_host=True)


@pytest.mark.parametrize("value", [10**9, 10**30, -1, 0, 1.0, "2", 1e9, True])
@pytest.mark.parametrize(
    "name",
    [
        *("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    ],
)
def test_absurd_sizes_are_refused(name, value, tmp_path):
    folder = shutil.copytree(FOLDER / "llama2", tmp_path / "a")
    fields = json.loads((folder / "config.json").read_text()) | {name: value}
    (folder / "config.json").write_text(json.dumps(fields))
    start = time.monotonic()
    with pytest.raises(UserError, match=r"config\.json"):
        from_pretrained(folder)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", ["smollm3", "olmo_hybrid", "qwen3_5"])
def test_absurd_numbers_of_layers_of_several_kinds_are_refused(name, tmp_path):
    folder = shutil.copytree(FOLDER / name, tmp_path / "a")
    fields = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    fields = {k: v for k, v in fields.items() if k not in ("layer_types", "no_rope_layers")}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="num_hidden_layers=1000000000 is unsupported"):
        from_pretrained(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(value, tmp_path):
    folder = shutil.copytree(FOLDER / "qwen2", tmp_path / "a")
    arrays = load_file(folder / "model.safetensors")
    arrays["model.norm.weight"][1] = value
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight has NaN or infinite"):
        from_pretrained(folder)
    path = import_model(folder, tmp_path / "b", allow_nonfinite=True)
    assert not np.isfinite(load_run(path)[0].norm.scale[...]).all()


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/x.jinja"])
def test_templates_that_are_no_files_are_refused_unread(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(UserError, match=rf"{path.name} is a pipe or a device, not a file"):
        tokenizer_in(tmp_path)


def test_gguf_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"has a file of llama\.cpp; give its path, .*model\.gguf"):
        from_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.gguf is damaged or of an unsupported kind"):
        from_pretrained(path)


def test_the_trained_length_is_kept_and_warned_about(tmp_path):
    folder = shutil.copytree(FOLDER / "llama2", tmp_path / "a")
    fields = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 6}
    (folder / "config.json").write_text(json.dumps(fields))
    model, _ = from_pretrained(folder)
    prompt = np.array([1, 2, 3])
    generate(model, prompt, 4, top_k=1)
    with pytest.warns(UserWarning, match=r"model\.trained_length=6: a sequence is longer"):
        generate(model, prompt, 5, top_k=1)
    _, state = model(prompt, return_state=True)
    with pytest.warns(UserWarning, match=r"model\.trained_length=6: a sequence is longer"):
        generate(model, np.array([4]), 4, top_k=1, state=state)
    exported = to_pretrained(model, tmp_path / "b")
    assert json.loads((exported / "config.json").read_text())["max_position_embeddings"] == 6


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}a{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 'a'|center(10**10) }}",
        "{{ [[]] * 10**10 }}",
        "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_are_limited(template, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(UserError, match="chat template: "):
        chat_template.render(template, {})
    assert time.monotonic() - start < 5
    assert chat_template.render("{{ x }}", {"x": "after"}) == "after"
