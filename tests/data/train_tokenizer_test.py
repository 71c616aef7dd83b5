"""A trained tokenizer: deterministic, of all bytes, accepted by `get_tokenizer`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinsen_jax.data.tokenizers import Tokenizer, get_tokenizer
from heinsen_jax.data.train_tokenizer import train_tokenizer
from heinsen_jax.errors import UserError

TEXT = "the theory of these other words, é日本 🙂 and   spaces\n\n\t<|endoftext|> in lines 1234\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT * 3)
    return path


@pytest.fixture(scope="module")
def trained(text) -> Tokenizer:
    return train_tokenizer([str(text)], 300, text.parent / "mine")


def test_it_is_accepted_and_has_the_size(trained, text):
    again = get_tokenizer(str(text.parent / "mine"))
    assert (again.name, again.vocab_size) == ("mine", 300)
    assert again.fingerprint == trained.fingerprint
    ids = again.encode(TEXT)
    assert again.decode(ids) == TEXT
    assert again.end_of_text_id not in ids
    assert len(ids) < 0.6 * len(TEXT.encode())


@given(any_text=st.text())
def test_every_text_is_representable(trained, any_text):
    assert trained.decode(trained.encode(any_text)) == any_text


def test_every_byte_is_a_token(trained):
    assert {bytes([byte]) for byte in range(256)} <= {trained.token_bytes(i) for i in range(300)}


def test_it_does_not_depend_on_the_process(trained, text, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "heinsen_jax.data.train_tokenizer", str(text)]
    command += ["--vocab-size", "300", "--output", str(tmp_path / "other.json")]
    done = subprocess.run(
        command,
        env=os.environ | {"RAYON_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "merging the most frequent pairs\n")
    assert done.stdout.startswith(f"300 tokens in {tmp_path / 'other.json'}")
    assert get_tokenizer(str(tmp_path / "other.json")).fingerprint == trained.fingerprint


def test_published_validation_documents_are_left_out(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"body": "aaaa bbbb"}\n' * 9)
    (folder / "validation.jsonl").write_text('{"body": "xyxyxyxy"}\n' * 99)
    tokenizer = train_tokenizer([str(folder)], 270, tmp_path / "out", text_column="body")
    assert len(tokenizer.encode("xyxy")) == 4
    assert len(tokenizer.encode("aaaa bbbb")) == 2
    assert tokenizer.vocab_size < 270


def test_mistakes_are_named_and_nothing_is_written(trained, text, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{")
    good, out = str(text), tmp_path / "out"
    for inputs, size, output, message in (
        ([good], 256, out, "vocab_size=256 must be at least 257"),
        ([good], 300, text.parent / "mine", r"mine.tokenizer\.json exists"),
        ([str(tmp_path / "none.txt")], 300, out, "does not exist"),
        ([str(tmp_path / "bad.jsonl")], 300, out, r"bad\.jsonl:1 is not JSON"),
        ([good], 300, text / "out", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            train_tokenizer(inputs, size, output)
    assert not out.exists() or not [*out.iterdir()]
