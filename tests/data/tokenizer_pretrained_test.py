"""Tokenizers of pretrained models: special tokens and chat templates as in transformers."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from heinsen_jax.data import (
    get_tokenizer,
    load_tokenizer,
    save_tokenizer,
    start_ids,
    stop_ids,
)
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer, pretrained_tokenizer
from heinsen_jax.errors import UserError
from tests.conftest import GOLDEN_FOLDER

FOLDER = GOLDEN_FOLDER / "transformers" / "qwen2"
GOLDEN = json.loads((FOLDER / "chats.json").read_text())
USER = {"role": "user", "content": "hi"}


def load(folder: Path) -> PretrainedTokenizer:
    found = pretrained_tokenizer(folder, "tiny")
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    return tmp_path


def configure(folder: Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.mark.parametrize("number", range(len(GOLDEN["chats"])))
def test_chats_are_rendered_and_encoded_as_in_transformers(number):
    chat = dict(GOLDEN["chats"][number])
    text, ids = chat.pop("text"), chat.pop("ids")
    assert load(FOLDER).render_chat_template(**chat) == text
    assert load(FOLDER).apply_chat_template(**chat) == ids


@pytest.mark.parametrize("number", range(len(GOLDEN["texts"])))
def test_texts_are_encoded_as_in_transformers(number):
    tokenizer, one = load(FOLDER), GOLDEN["texts"][number]
    ids = [*tokenizer.start_ids, *tokenizer.encode_with_special_tokens(one["text"])]
    assert ids == one["ids"]
    assert tokenizer.decode(tokenizer.encode(one["text"])) == one["text"]
    assert tokenizer.end_of_text_id not in tokenizer.encode(one["text"])


def test_half_a_surrogate_pair_is_replaced():
    tokenizer = load(FOLDER)
    text = "a\ud83d b"
    assert tokenizer.encode_with_special_tokens(text) == tokenizer.encode(text)


def test_it_is_saved_and_loaded(folder, tmp_path):
    tokenizer = load(folder)
    (tmp_path / "saved").mkdir()
    save_tokenizer(tokenizer, tmp_path / "saved")
    for again in (load_tokenizer(tmp_path / "saved"), get_tokenizer(str(tmp_path / "saved"))):
        assert isinstance(again, PretrainedTokenizer)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.config() == tokenizer.config()
        assert start_ids(again) == (3,)
        assert again.apply_chat_template([USER]) == tokenizer.apply_chat_template([USER])
    assert start_ids(get_tokenizer("bytes")) == ()


def test_the_file_of_sentencepiece_is_kept(folder, tmp_path):
    (folder / "tokenizer.model").write_bytes(b"model")
    tokenizer = load(folder)
    for name in ("run", "export"):
        (tmp_path / name).mkdir()
        save_tokenizer(tokenizer, tmp_path / name)
        assert (tmp_path / name / "tokenizer.model").read_bytes() == b"model"
        tokenizer = load_tokenizer(tmp_path / name)


def test_templates_may_be_several(folder):
    (folder / "chat_template.jinja").unlink()
    several = {"default": "{{ bos_token }}{{ messages[0].content }}", "tool_use": "tools"}
    pairs = [{"name": name, "template": template} for name, template in several.items()]
    configure(folder, chat_template=pairs)
    tokenizer = load(folder)
    assert tokenizer.render_chat_template([USER]) == "<|begin|>hi"
    assert tokenizer.render_chat_template([USER], tools=[{}]) == "tools"
    assert tokenizer.config()["chat_template"] == pairs
    configure(folder, chat_template=several["default"])
    assert load(folder).render_chat_template([USER], tools=[{}]) == "<|begin|>hi"
    configure(folder, chat_template=5)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template must be a text"):
        load(folder)


def test_templates_may_be_files(folder):
    several = {"default": "replaced", "tool_use": "tools", "rag": "replaced, too"}
    pairs = [{"name": name, "template": template} for name, template in several.items()]
    configure(folder, chat_template=pairs)
    (folder / "chat_template.jinja").write_text("of a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("another")
    assert load(folder).templates == {"default": "of a file", "rag": "another"}


def test_added_tokens_may_be_in_the_configuration_only(folder):
    before = load(folder)
    number = before.vocab_size
    tokens = {str(number): {"content": "<|tool|>", "special": True, "lstrip": False}}
    configure(folder, added_tokens_decoder=tokens)
    tokenizer = load(folder)
    assert tokenizer.encode_with_special_tokens("a<|tool|>")[-1] == number
    assert number not in tokenizer.encode("a<|tool|>")
    assert tokenizer.vocab_size == number + 1
    (folder / "saved").mkdir()
    save_tokenizer(tokenizer, folder / "saved")
    assert load_tokenizer(folder / "saved").encode_with_special_tokens("<|tool|>") == [number]
    configure(folder, added_tokens_decoder={"1": {"content": "<|im_start|>"}})
    assert load(folder).fingerprint == before.fingerprint
    configure(folder, added_tokens_decoder={"1": {"content": "<|tool|>"}})
    with pytest.raises(UserError, match=r"token 1 is <\|im_start\|>, but <\|tool\|> in"):
        load(folder)
    configure(folder, added_tokens_decoder={str(number + 5): {"content": "<|tool|>"}})
    with pytest.raises(UserError, match=rf"<\|tool\|> cannot have the id {number + 5}"):
        load(folder)
    for token in ({"x": {"content": "<|tool|>"}}, {str(number): "<|tool|>"}):
        configure(folder, added_tokens_decoder=token)
        with pytest.raises(UserError, match=r"config\.json: added_tokens_decoder\['.*correct it"):
            load(folder)
    configure(folder, added_tokens_decoder=["<|tool|>"])
    with pytest.raises(UserError, match=r"config\.json: added_tokens_decoder must map ids"):
        load(folder)


def test_the_start_is_found_without_the_letter_a(tmp_path):
    tokenizer = RustTokenizer(BPE({"<s>": 0, "</s>": 1, "C": 2, "G": 3}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load(tmp_path).start_ids == (0,)


def test_the_start_follows_the_post_processor(folder):
    configure(folder, add_bos_token=False, add_eos_token=True)
    assert load(folder).start_ids == (3,)
    document = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    configure(folder, add_bos_token=True, bos_token={"content": "<|im_start|>"})
    assert load(folder).start_ids == ()


def test_the_end_of_text_follows_the_configuration(folder):
    assert load(folder).end_of_text_id == 2
    configure(folder, eos_token=...)
    assert load(folder).end_of_text_id == 0
    (folder / "tokenizer.json").unlink()
    assert pretrained_tokenizer(folder, "tiny") is None


def test_tokens_that_end_generation_follow_the_files_of_the_model(folder, tmp_path):
    assert stop_ids(load(folder)) == (2,)
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    assert stop_ids(load(folder)) == (2, 1)
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": null}')
    assert stop_ids(load(folder)) == (2, 1)
    path.write_text('{"eos_token_id": [0, 2]}')
    assert stop_ids(load(folder)) == (2, 0)
    (tmp_path / "saved").mkdir()
    save_tokenizer(load(folder), tmp_path / "saved")
    assert stop_ids(load_tokenizer(tmp_path / "saved")) == (2, 0)
    assert stop_ids(get_tokenizer("bytes")) == (256,)
    path.write_text('{"eos_token_id": "<eos>"}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id='<eos>' must be"):
        load(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "tiny: the tokenizer has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "template: roles must alternate"),
        ("{% for %}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "chat template: access to attribute 'append'"),
    ],
)
def test_templates_may_refuse(template, message, folder):
    (folder / "chat_template.jinja").unlink()
    configure(folder, chat_template=template)
    with pytest.raises(UserError, match=message):
        load(folder).apply_chat_template([USER])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": None}, "<assistant>"),
        ({"content": "hi", "tool_calls": None}, "<assistant>hi"),
        ({"content": "hi", "reasoning": "because"}, "<assistant>hi[because, because]"),
        ({"content": "hi", "thinking": "because"}, "<assistant>hi[because, because]"),
    ],
)
def test_fields_of_messages_are_as_in_transformers(folder, fields, expected):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call }}{% endfor %}"
        "{% endif %}{{ m.content }}"
        "{% if m.reasoning_content %}[{{ m.reasoning_content }}, {{ m.thinking }}]{% endif %}"
        "{% endfor %}"
    )
    assert load(folder).render_chat_template([{"role": "assistant", **fields}]) == expected


def test_templates_may_use_the_date(folder):
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    assert int(load(folder).render_chat_template([USER])) > 2000


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "heinsen_jax.data.chat_template", raising=False)
    with pytest.raises(UserError, match=r"jinja2.*heinsen_jax\[transformers\]"):
        load(FOLDER).apply_chat_template([USER])


@pytest.mark.parametrize("is_named", [False, True])
def test_added_tokens_that_a_model_lacks_are_left_out(folder, is_named):
    """Gemma 3's tokenizer has a token of images, whose id its models of text lack."""
    number = load(folder).vocab_size
    image = {"content": "<image_soft_token>", "special": True}
    configure(folder, added_tokens_decoder={str(number): image})
    if is_named:
        configure(folder, image_token="<image_soft_token>")
    assert load(folder).vocab_size == number + 1
    with pytest.warns(UserWarning, match=r"lacks <image_soft_token>; left out of the tokenizer"):
        tokenizer = pretrained_tokenizer(folder, "tiny", number)
    assert tokenizer is not None
    assert tokenizer.vocab_size == number
    assert "image_token" not in tokenizer.special_tokens


@pytest.mark.parametrize("name", ["eos_token", "bos_token"])
def test_ends_that_a_model_lacks_stay(folder, name):
    """So that the model is refused."""
    number = load(folder).vocab_size
    configure(folder, added_tokens_decoder={str(number): {"content": "<end>", "special": True}})
    configure(folder, **{name: "<end>"})
    tokenizer = pretrained_tokenizer(folder, "tiny", number)
    assert tokenizer is not None
    assert tokenizer.vocab_size == number + 1
