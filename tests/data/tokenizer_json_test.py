"""Tokenizers of the library `tokenizers`: small ones of every supported kind, trained here."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as RustTokenizer

from heinsen_jax.data.tokenizers import (
    Tokenizer,
    get_tokenizer,
    load_tokenizer,
    save_tokenizer,
    saved_name,
)
from heinsen_jax.errors import UserError
from heinsen_jax.generate.text import decode_stream

WORDS = "the theory of these other words, é日本 🙂🙃 and  two   spaces\n\n\tin lines "
SPECIAL = ("<|endoftext|>", "</s>", "<s>", "<unk>")
TEXTS = st.text(st.sampled_from([*WORDS, "ÿ", "ß", "x", "<", "0", ">"])) | st.sampled_from(
    [f"{WORDS}{token} {token}" for token in SPECIAL]
)


def byte_level() -> RustTokenizer:
    """A tokenizer like GPT-2's, with runs of spaces as in GPT-NeoX."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[SPECIAL[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens([AddedToken("   ", normalized=False), AddedToken("日", normalized=False)])
    return tokenizer


def byte_fallback() -> RustTokenizer:
    """A tokenizer like that of Llama 2: SentencePiece's BPE with a token for each byte."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", *"theoryswd", "th", "the", "▁the", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    model = models.BPE(
        {token: number for number, token in enumerate(vocabulary)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = RustTokenizer(model)
    spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([*spaces])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram() -> RustTokenizer:
    """A tokenizer like that of T5, in whose model special tokens are words."""
    tokenizer = RustTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=[*"</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 9, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "unigram": unigram()}
LOSSLESS = ("byte_level", "byte_fallback")


def write(folder: Path, document: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizers = {}
    for kind, tokenizer in KINDS.items():
        shortened = RustTokenizer.from_str(tokenizer.to_str())
        shortened.enable_truncation(2)  # which must have no effect
        shortened.enable_padding(length=9)
        document = json.loads(shortened.to_str())
        tokenizers[kind] = get_tokenizer(str(write(folder / kind, document)))
    return tokenizers


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_ids_are_those_of_the_library_without_special_tokens(kind, found, text):
    theirs, ours = KINDS[kind], found[kind]
    ids = ours.encode(text)
    assert ours.encode_to_numpy(text).tolist() == ids
    assert not {ours.end_of_text_id} & {*ids}
    if kind in LOSSLESS:
        assert ours.decode(ids) == text
    if not any(token in text for token in SPECIAL):
        assert ids == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_decoded_text_is_that_of_the_library(kind, found, text):
    ids = found[kind].encode(text)
    ids = ids[0 if kind == "byte_level" else 1 :]  # the decoder of Metaspace removes a first ▁▁
    if "日" not in text:  # an added token, which the library decodes as if it were bytes
        assert found[kind].decode(ids) == KINDS[kind].decode(ids, skip_special_tokens=False)


def test_a_text_may_contain_special_tokens_literally(found):
    """They are the words of Unigram models."""
    for text in ("a </s> b", "</s>", "<|endoftext|></s>"):
        for kind, tokenizer in found.items():
            ids = tokenizer.encode(text)
            assert tokenizer.end_of_text_id not in ids
            assert kind == "unigram" or tokenizer.decode(ids) == text
    assert found["unigram"].decode(found["unigram"].encode("of </s>")) == "of </s>"
    assert found["unigram"].end_of_text_id in KINDS["unigram"].encode("of </s>").ids


@pytest.mark.parametrize("kind", KINDS)
@given(sampled=st.lists(st.integers(0, 300)), text=TEXTS)
def test_streamed_text_continues_the_text_before_it(kind, found, sampled, text):
    """Also for ids that a model may sample, such as parts of characters."""
    tokenizer = found[kind]
    ids = [*sampled, *tokenizer.encode(text)]
    before = tokenizer.encode("the")
    streamed = "".join(decode_stream(tokenizer, iter(ids)))
    assert tokenizer.decode(before) + streamed == tokenizer.decode([*before, *ids])


def test_characters_are_streamed_whole_and_with_their_spaces(found):
    for kind in LOSSLESS:
        ids = found[kind].encode("the 🙂 日ÿ")
        chunks = [*decode_stream(found[kind], iter(ids))]
        assert "".join(chunks).removeprefix(" ") == "the 🙂 日ÿ"
        assert "�" not in "".join(chunks)
    first, *further = found["byte_fallback"].encode("the the")
    assert [*decode_stream(found["byte_fallback"], iter(further))] == [" the", ""]
    assert found["byte_fallback"].decode([first]) == "the"


def test_unpaired_surrogates_are_replaced(found):
    assert found["byte_level"].decode(found["byte_level"].encode("a\ud800b")) == "a�b"


def test_ids_above_the_vocabulary_and_gaps_are_replacement_characters(found):
    assert found["byte_level"].token_bytes(found["byte_level"].vocab_size).decode() == "�"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tokenizer_is_loaded(kind, found, tmp_path):
    save_tokenizer(found[kind], tmp_path)
    for again in (load_tokenizer(tmp_path), get_tokenizer(str(tmp_path))):
        assert again.fingerprint == found[kind].fingerprint
        assert again.encode(WORDS) == found[kind].encode(WORDS)
        assert (again.end_of_text_id, again.vocab_size) == (
            found[kind].end_of_text_id,
            found[kind].vocab_size,
        )
    assert saved_name(tmp_path) == kind
    assert RustTokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() > 0


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", ("日", "本"), "not the one that was saved"),
        ("tokenizer.json", ("}", ""), r"tokenizer\.json is damaged"),
        ("tokenizer.json", ('"BPE"', '"BBB"'), "cannot be read as a tokenizer"),
        ("tokenizer_config.json", ('"name"', '"nam"'), r"tokenizer_config\.json is damaged"),
        ("tokenizer_config.json", ("<|endoftext|>", "日"), "not the one that was saved"),
    ],
)
def test_changed_saved_tokenizer_is_detected(found, tmp_path, file, change, message):
    save_tokenizer(found["byte_level"], tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_fingerprint_is_of_the_content(tmp_path):
    document = json.loads(KINDS["byte_level"].to_str())
    one = get_tokenizer(str(write(tmp_path / "one", document)))
    same = get_tokenizer(str(write(tmp_path / "same", dict(reversed(document.items())))))
    assert (one.name, same.name) == ("one", "same")
    assert same.fingerprint == one.fingerprint
    document["model"]["merges"].pop()
    other = get_tokenizer(str(write(tmp_path / "other", document) / "tokenizer.json"))
    assert other.fingerprint != same.fingerprint


def with_special(*tokens: str) -> dict[str, Any]:
    tokenizer = byte_level()
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][1:]
    tokenizer = RustTokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens([*tokens])
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize("special", [("<eos>", "<pad>"), ("<|end_of_text|>", "<|eot_id|>")])
def test_end_of_text_is_found_by_its_name(special, tmp_path):
    tokenizer = get_tokenizer(str(write(tmp_path, with_special(*special))))
    assert tokenizer.token_bytes(tokenizer.end_of_text_id).decode() == special[0]


@pytest.mark.parametrize(("special", "named"), [(("<eos>", "</s>"), "</s>, <eos>"), ((), "none")])
def test_end_of_text_that_cannot_be_found_is_given_in_a_file(special, named, tmp_path):
    write(tmp_path, with_special(*special))
    message = rf"tokenizer\.json: exactly one .* has {named}.*tokenizer_config\.json"
    with pytest.raises(UserError, match=message):
        get_tokenizer(str(tmp_path))
    config = tmp_path / "tokenizer_config.json"
    for end in ("日", {"content": "日", "special": True}):
        config.write_text(json.dumps({"eos_token": end}))
        tokenizer = get_tokenizer(str(tmp_path))
        assert tokenizer.token_bytes(tokenizer.end_of_text_id).decode() == "日"
        assert tokenizer.end_of_text_id not in tokenizer.encode("日 日")
    config.write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(UserError, match="no token <none>"):
        get_tokenizer(str(tmp_path))


def test_unsupported_files_are_named(tmp_path):
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    words = json.loads(KINDS["byte_level"].to_str()) | {"decoder": decoder}
    for document, message in (
        (words, "decoder WordPiece is unsupported"),
        (words | {"decoder": None}, "decoder null is unsupported"),
        ({"a": 1}, "defines no tokenizer"),
    ):
        with pytest.raises(UserError, match=rf"other.tokenizer\.json.*{message}"):
            get_tokenizer(str(write(tmp_path / "other", document) / "tokenizer.json"))
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        get_tokenizer(str(tmp_path / "none.json"))
