import base64
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import Tokenizer as RustTokenizer

from heinsen_jax.data import tokenizer_tiktoken, tokenizers
from heinsen_jax.data.tokenizer_tiktoken import TiktokenTokenizer
from heinsen_jax.data.tokenizers import END_OF_TEXT, get_tokenizer
from heinsen_jax.errors import UserError

BYTES = get_tokenizer("bytes")


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path


def single_bytes() -> list[bytes]:
    return [bytes([byte]) for byte in range(256)]


@given(st.text())
def test_bytes_are_the_utf8_of_any_text(text: str) -> None:
    ids = BYTES.encode_to_numpy(text)
    assert ids.tolist() == list(text.encode()) == BYTES.encode(text)
    assert BYTES.decode(ids.tolist()) == text


def test_bytes_end_of_text_is_a_token_that_no_text_contains() -> None:
    assert BYTES.end_of_text_id == 256
    assert BYTES.vocab_size == 257
    assert 256 not in BYTES.encode(END_OF_TEXT)


def test_file_is_a_tokenizer_with_end_of_text_last(tmp_path: Path) -> None:
    encoding = get_tokenizer(str(write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"ab"])))
    assert encoding.name == "mine"
    assert encoding.encode_to_numpy("cab").tolist() == [99, 256]
    assert encoding.end_of_text_id == 257


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"ab"])
    before = get_tokenizer(str(path))
    write_ranks(path, [*single_bytes(), b"cd"])
    assert before.encode("ab") == [256]
    assert get_tokenizer(str(path)).encode("ab") == [97, 98]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [15496, 11, 995, 0]),
        ("  two  spaces\n\n", [220, 734, 220, 9029, 628]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_gpt2_file_gives_the_published_ids(published_data: Path, text: str, ids: list[int]) -> None:
    encoding = get_tokenizer(str(published_data / "gpt2.tiktoken"))
    assert encoding.encode_to_numpy(text).tolist() == ids
    assert (encoding.end_of_text_id, encoding.vocab_size) == (50256, 50257)


def test_file_named_after_another_encoding_is_refused(published_data: Path, tmp_path: Path) -> None:
    path = shutil.copy(published_data / "gpt2.tiktoken", tmp_path / "cl100k_base.tiktoken")
    with pytest.raises(UserError, match="not the published cl100k_base"):
        get_tokenizer(str(path))


@pytest.mark.parametrize("name", sorted(openai_public.ENCODING_CONSTRUCTORS))
def test_published_encoding_is_read_from_a_local_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ranks(tmp_path / f"{name}.tiktoken", [*single_bytes(), b"ab"])
    with pytest.raises(UserError, match=f"not the published {name}; download it again"):
        get_tokenizer(str(path))
    ranks, _ = tokenizer_tiktoken._read_ranks(path)
    digests: list[str] = []

    def load(*_: str, expected_hash: str) -> dict[bytes, int]:
        digests.append(expected_hash)
        return ranks

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", load)
    constructor = "r50k_base" if name == "gpt2" else name  # equal, and in the format of ranks
    definition = openai_public.ENCODING_CONSTRUCTORS[constructor]()
    monkeypatch.setattr(tokenizer_tiktoken, "_read_ranks", lambda path: (ranks, digests[0]))
    local = get_tokenizer(str(path))
    assert local.name == name
    assert (
        local.fingerprint
        == TiktokenTokenizer(
            name, definition["pat_str"], ranks, definition["special_tokens"]
        ).fingerprint
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("gpt2", "gpt2"),
        ("some/llama", "llama"),
        ("some/llama/tokenizer.json", "llama"),
        ("some/mine.json", "mine"),
        ("some/mine.tiktoken", "mine"),
    ],
)
def test_names_do_not_need_the_files(path: str, name: str) -> None:
    assert tokenizers.tokenizer_name(path) == name


def test_unknown_name_lists_the_names_and_the_closest() -> None:
    with pytest.raises(UserError, match=r"did you mean gpt2\?.*bytes, .*cl100k_base") as caught:
        get_tokenizer("gpt-2")
    assert "\n" not in str(caught.value)


def test_failed_download_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"gpt2 could not be downloaded.*gpt2\.tiktoken"):
        get_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"!!! 0\n", r":1 is damaged"),
        (b"YQ==\n", r":1 is damaged"),
        (b"YQ== 0\n", "255 of the 256 single bytes are missing"),
        (b"YQ== 0\nYQ== 1\n", "twice"),
    ],
)
def test_damaged_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        get_tokenizer(str(path))


def test_file_without_one_of_its_lines_is_damaged(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"ab", b"cd"])
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:256] + lines[257:]))
    with pytest.raises(UserError, match="not 0 to 256"):
        get_tokenizer(str(path))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        get_tokenizer(str(tmp_path / "none.tiktoken"))


def test_fingerprint_covers_everything_but_the_name() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}

    def variant(name="a", pattern="(?s:.)", ranks=ranks, end=256) -> str:
        return TiktokenTokenizer(name, pattern, ranks, {END_OF_TEXT: end}).fingerprint

    assert variant() == variant(name="b") == BYTES.fingerprint
    others = {variant(pattern="(?s:..)"), variant(ranks={**ranks, b"ab": 256}), variant(end=300)}
    assert len(others | {variant()}) == 4


def test_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    file = write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"ab", "é".encode()])
    encoding = get_tokenizer(str(file))
    folder = tmp_path / "run"
    folder.mkdir()
    tokenizers.save_tokenizer(encoding, folder)
    file.unlink()
    loaded = tokenizers.load_tokenizer(folder)
    assert loaded.name == tokenizers.saved_name(folder) == "mine"
    assert loaded.fingerprint == encoding.fingerprint
    assert loaded.encode("cab é") == encoding.encode("cab é")
    assert sorted(path.name for path in folder.iterdir()) == [
        "tokenizer.json",
        "tokenizer.tiktoken",
    ]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", lambda content: content.replace(b"(?s:.)", b"(?s:..)")),
        ("tokenizer.json", lambda content: content[:20]),
        ("tokenizer.json", lambda content: json.dumps({"name": "bytes"}).encode()),
        ("tokenizer.tiktoken", lambda content: content.replace(b" 65\n", b" 300\n")),
    ],
)
def test_changed_saved_tokenizer_is_detected(tmp_path: Path, file: str, change) -> None:
    tokenizers.save_tokenizer(BYTES, tmp_path)
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match="restore"):
        tokenizers.load_tokenizer(tmp_path)


def test_files_of_earlier_versions_are_loaded(tmp_path: Path) -> None:
    write_ranks(tmp_path / "tokenizer.tiktoken", single_bytes())
    definition = {
        "name": "bytes",
        "pattern": "(?s:.)",
        "special_tokens": {"<|endoftext|>": 256},
        "fingerprint": "3b5107331b5e5a3fa52ed69bacd98be12c133effa46163882f3b0505f16287a7",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert tokenizers.load_tokenizer(tmp_path).fingerprint == BYTES.fingerprint
    named = get_tokenizer(str(tmp_path))
    assert (named.name, named.fingerprint) == ("bytes", BYTES.fingerprint)
    assert tokenizers.tokenizer_name(str(tmp_path)) == "bytes"


TEXTS = "It's 12345 é\n\n", "  A b\r\n \n漢字😀", "x \n", "<|endoftext|>", "WE'LL\u2028\t ''s ", ""


@pytest.mark.parametrize("name", ["bytes", *sorted(openai_public.ENCODING_CONSTRUCTORS)])
def test_an_encoding_as_tokenizer_json_gives_the_same_ids(name, published_data, tmp_path):
    """With the pattern and the special tokens of each encoding, and ranks of GPT-2."""
    encoding = BYTES
    if name != "bytes":
        published = tokenizers.tokenizer_of_ranks(published_data / "gpt2.tiktoken")
        definition = tokenizer_tiktoken._definition(name, lambda *_, **__: {})
        ranks = {token: rank for token, rank in published._ranks.items() if rank < 10_000}
        special = definition["special_tokens"]
        encoding = TiktokenTokenizer(name, definition["pat_str"], ranks, special)
    converted = encoding.to_json()
    converted.save(tmp_path)
    theirs = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = encoding.encode(text)
        assert converted.encode(text) == ids
        assert converted.decode(ids) == text
        if text != END_OF_TEXT:
            assert theirs.encode(text).ids == ids
    assert theirs.encode(END_OF_TEXT).ids == [encoding.end_of_text_id]
    assert (converted.vocab_size, converted.end_of_text_id) == (
        encoding.vocab_size,
        encoding.end_of_text_id,
    )
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_tokens_that_are_no_merge_have_no_tokenizer_json(tmp_path):
    path = write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"abc"])
    with pytest.raises(UserError, match="tokenizer mine: its token b'abc' is not the merge of two"):
        tokenizers.tokenizer_of_ranks(path).to_json()


def test_tokenizer_without_end_of_text() -> None:
    with pytest.raises(UserError, match=r"x has no <\|endoftext\|>"):
        TiktokenTokenizer("x", "(?s:.)", {b"a": 0}, {})


def test_panic_of_the_tokenizer_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_, **__) -> np.ndarray:
        raise PanicException("StackOverflow")

    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = TiktokenTokenizer("x", "(?s:..)", ranks, {END_OF_TEXT: 256})
    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", panic)
    with pytest.raises(UserError, match="x cannot encode a document of 3 characters"):
        tokenizer.encode_to_numpy("abc")


def test_gpt2_encodes_real_text_without_loss(published_data: Path) -> None:
    text = (published_data / "tinyshakespeare.txt").read_bytes().decode()[:50_000]
    encoding = get_tokenizer(str(published_data / "gpt2.tiktoken"))
    ids = encoding.encode_to_numpy(text)
    assert ids.dtype == np.uint32
    assert encoding.decode(ids.tolist()) == text
    assert len(ids) < len(text) / 3


@pytest.mark.parametrize("name", ["pipe.tiktoken", "tokenizer.json"])
def test_a_pipe_is_no_tokenizer(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is a pipe or a device"):
        get_tokenizer(str(tmp_path / name))


def test_a_panic_of_a_library_is_refused(monkeypatch):
    class PanicException(BaseException):  # as of libraries in Rust
        pass

    def encode(text: str) -> list[int]:
        raise PanicException("stack overflow\nbacktrace")

    tokenizer = get_tokenizer("bytes")
    monkeypatch.setattr(tokenizer, "_encoding", SimpleNamespace(encode_ordinary=encode))
    with pytest.raises(UserError, match=r"cannot encode .* \(stack overflow\); break up"):
        tokenizer.encode("text")
