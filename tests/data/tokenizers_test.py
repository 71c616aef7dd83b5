import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from heinsen_jax.data import tokenizers
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
    ids = tokenizers.encoder(BYTES)(text)
    assert ids.tolist() == list(text.encode()) == BYTES.encode_ordinary(text)
    assert BYTES.decode(ids.tolist()) == text


def test_bytes_end_of_text_is_a_token_that_no_text_contains() -> None:
    assert tokenizers.end_of_text_id(BYTES) == 256
    assert BYTES.n_vocab == 257
    assert 256 not in tokenizers.encoder(BYTES)(END_OF_TEXT)


def test_file_is_a_tokenizer_with_end_of_text_last(tmp_path: Path) -> None:
    encoding = get_tokenizer(str(write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"ab"])))
    assert encoding.name == "mine"
    assert tokenizers.encoder(encoding)("cab").tolist() == [99, 256]
    assert tokenizers.end_of_text_id(encoding) == 257


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "mine.tiktoken", [*single_bytes(), b"ab"])
    before = get_tokenizer(str(path))
    write_ranks(path, [*single_bytes(), b"cd"])
    assert before.encode_ordinary("ab") == [256]
    assert get_tokenizer(str(path)).encode_ordinary("ab") == [97, 98]


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
    assert tokenizers.encoder(encoding)(text).tolist() == ids
    assert (tokenizers.end_of_text_id(encoding), encoding.n_vocab) == (50256, 50257)


def test_file_named_after_another_encoding_is_refused(published_data: Path, tmp_path: Path) -> None:
    path = shutil.copy(published_data / "gpt2.tiktoken", tmp_path / "cl100k_base.tiktoken")
    with pytest.raises(UserError, match="not the published cl100k_base"):
        get_tokenizer(str(path))


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base", "o200k_harmony", "p50k_edit"])
def test_definition_of_a_published_encoding_needs_no_download(name: str) -> None:
    published = {
        "cl100k_base": ("223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7", 100257),
        "o200k_base": ("446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d", 199999),
        "o200k_harmony": (
            "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
            199999,
        ),
        "p50k_edit": ("94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069", 50256),
    }
    digest, end_of_text = published[name]
    definition = tokenizers._published_definition(name, {b"a": 0}, digest)
    assert definition is not None
    assert definition["mergeable_ranks"] == {b"a": 0}
    assert definition["special_tokens"][END_OF_TEXT] == end_of_text
    assert tokenizers._published_definition(name, {b"a": 0}, "0" * 64) is None


def test_unknown_name_lists_the_names_and_the_closest() -> None:
    with pytest.raises(UserError, match=r"did you mean gpt2\?.*bytes, .*cl100k_base") as caught:
        get_tokenizer("gpt-2")
    assert "\n" not in str(caught.value)


def test_failed_download_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
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
        return tokenizers.fingerprint(
            tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end}
            )
        )

    assert variant() == variant(name="b") == tokenizers.fingerprint(BYTES)
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
    assert tokenizers.fingerprint(loaded) == tokenizers.fingerprint(encoding)
    assert loaded.encode_ordinary("cab é") == encoding.encode_ordinary("cab é")
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


def test_tokenizer_without_end_of_text() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("x", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={})
    with pytest.raises(UserError, match=r"x has no <\|endoftext\|>"):
        tokenizers.end_of_text_id(encoding)


def test_panic_of_the_tokenizer_is_a_clear_error() -> None:
    class PanicException(BaseException):
        pass

    class Panicking(tiktoken.Encoding):
        def encode_ordinary(self, text: str) -> list[int]:
            raise PanicException("StackOverflow")

    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = Panicking(
        "x", pat_str="(?s:..)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
    )
    with pytest.raises(UserError, match="x cannot encode a document of 3 characters"):
        tokenizers.encoder(encoding)("abc")


def test_gpt2_encodes_real_text_without_loss(published_data: Path) -> None:
    text = (published_data / "tinyshakespeare.txt").read_bytes().decode()[:50_000]
    encoding = get_tokenizer(str(published_data / "gpt2.tiktoken"))
    ids = tokenizers.encoder(encoding)(text)
    assert ids.dtype == np.uint32
    assert encoding.decode(ids.tolist()) == text
    assert len(ids) < len(text) / 3
