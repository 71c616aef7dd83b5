"""A chat keeps its conversation through every failure, and /save replaces no file of others."""

import io
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax import chat
from heinsen_jax.chat import Chat
from heinsen_jax.data import get_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import Engine, tokens
from heinsen_jax.generate.options import TextOptions
from heinsen_jax.generate.text import decode_stream
from heinsen_jax.interop.transformers import from_pretrained
from tests.conftest import GOLDEN_FOLDER
from tests.models.mechanisms_test import build
from tests.models.small import apply


class PanicException(BaseException):
    """Stands for the exception of libraries in Rust, which is no Exception."""


@pytest.fixture(scope="module")
def model():
    return build("linear", vocab_size=264, num_layers=1)


@pytest.fixture
def new(model):
    return lambda: Chat(Engine(model, get_tokenizer("bytes")), 3, temperature=0.7, top_k=1, seed=0)


@pytest.fixture
def talk(model, monkeypatch, capfd):
    """Return a function that runs the command on bytes of input, and returns what it printed."""

    def run(content: bytes, *arguments: str) -> str:
        monkeypatch.setattr(TextOptions, "load", lambda _: Engine(model, get_tokenizer("bytes")))
        monkeypatch.setattr("sys.argv", ["chat", "--workdir", "x", "--top-k", "1", *arguments])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        assert chat.main() == 0
        return capfd.readouterr().out

    return run


def broken(monkeypatch, error: BaseException, after: int = 0) -> None:
    """Let generation fail, once, after a number of tokens."""
    draw, calls = tokens.draw, iter(range(100))

    def fail(*args):
        if next(calls) == after:
            raise error
        return draw(*args)

    monkeypatch.setattr(tokens, "draw", fail)


def test_a_byte_that_is_not_utf8_keeps_the_conversation(talk, tmp_path):
    file = tmp_path / "state"
    out = talk(b"one\n\xfftwo\n\xc3\n/save %b\n" % os.fsencode(file), "--max-new-tokens", "3")
    assert "error: message: byte 0xff at character 1 is not UTF-8; leave it out" in out
    assert "error: message: byte 0xc3 at character 1" in out
    assert f"saved in {file}" in out, "the first line was lost"


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_a_surrogate_is_refused(new, text):
    one = new()
    with pytest.raises(UserError, match=r"message: .* is not UTF-8; leave it out"):
        "".join(one.answer(text))
    assert one.state is None


def test_an_answer_ends_with_the_positions_of_the_model():
    fields = {"positions": "learned", "max_length": 10}
    small = build("softmax", vocab_size=264, num_layers=1, **fields)
    one = Chat(Engine(small, get_tokenizer("bytes")), 256, temperature=0.7, top_k=1, seed=0)
    for length, number in ((4, 6), (9, 1), (8, 2)):  # and a line break; the last is not fed
        one.reset()
        new = one._tokens([97] * (length + 1))
        assert len([*new]) == number
    one.reset()
    with pytest.raises(UserError, match=r"13 tokens precede .* 10 positions left .*/reset"):
        "".join(one.answer("a" * 12))


FAILURES = [
    PanicException("index out of bounds"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    ZeroDivisionError("division by zero"),
    KeyError("role"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize(
    ("error", "after"),
    [
        pytest.param(
            error,
            after,
            id=f"{type(error).__name__}-{after}",
            marks=[pytest.mark.nightly] * (after > 0 and type(error) is not MemoryError),
        )
        for error in FAILURES
        for after in (0, 2)
    ],
)
def test_a_failed_answer_keeps_the_conversation(new, model, monkeypatch, error, after):
    """Without the line if it has no answer; else with a part of the answer."""
    one = new()
    "".join(one.answer("a"))
    read, unread, messages = one.read, one.unread, one.messages
    with monkeypatch.context() as patch:
        broken(patch, error, after)
        with pytest.raises(type(error)):
            "".join(one.answer("b"))
    if after:
        assert one.read == [*read, *unread, *b"b\n", *one.read[-1:]]
        assert len(one.messages) == len(messages) + 2
    else:
        assert (one.read, one.unread, one.messages) == (read, unread, messages)
    state = apply(model, jnp.asarray(one.read), return_state=True)[1]
    for have, want in zip(*map(jax.tree.leaves, (one.state, state)), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4)


def test_a_token_that_is_not_a_character_yet_is_no_answer(new, monkeypatch):
    one = new()
    "".join(one.answer("a"))
    before = one.position

    def fail(tokenizer, tokens, errors):
        next(iter(tokens))
        raise ZeroDivisionError
        yield ""

    with monkeypatch.context() as patch:
        patch.setattr(chat, "decode_stream", fail)
        with pytest.raises(ZeroDivisionError):
            "".join(one.answer("b"))
    assert one.position is before


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_command_continues_after_a_failure(talk, monkeypatch, error):
    broken(monkeypatch, error)
    out = talk(b"one\ntwo\n/dance\n", "--max-new-tokens", "2")
    *_, last = (line for line in out.splitlines() if line.startswith("> error: "))
    assert "'/dance': unknown command" in last
    errors = out.count("error: ")
    assert errors == (1 if isinstance(error, KeyboardInterrupt) else 2)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        *(
            pytest.param(template, marks=pytest.mark.nightly)
            for template in ("{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{% if %}")
        ),
    ],
)
def test_a_template_error_keeps_the_conversation(template):
    model, tokenizer = from_pretrained(GOLDEN_FOLDER / "transformers" / "qwen2")
    assert tokenizer is not None
    one = Chat(Engine(model, tokenizer), max_new_tokens=2, temperature=0.7, top_k=1, seed=1)
    "".join(one.answer("exact"))
    position, messages, good = one.position, one.messages, tokenizer.templates["default"]
    tokenizer.templates["default"] = template
    with pytest.raises(BaseException):  # noqa: B017, PT011
        "".join(one.answer("cost"))
    assert one.position is position
    assert one.messages == messages
    tokenizer.templates["default"] = good
    "".join(one.answer("cost"))
    assert len(one.messages) == 4


def test_bytes_that_are_not_utf8_stay_out_of_messages(new, monkeypatch):
    """With --raw, too, since a chat template could not be encoded with them."""
    one = new()
    one.decoding_errors = "surrogateescape"
    monkeypatch.setattr(one, "_tokens", lambda _: iter(b"a\xff"))
    assert "".join(one.answer("b")) == "a\udcff"
    assert one.messages[-1]["content"] == "a\ufffd"


def test_save_replaces_only_files_of_the_conversation(new, tmp_path):
    one, file, foreign = new(), tmp_path / "state", tmp_path / "thesis.tex"
    foreign.write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    "".join(one.answer("a"))
    for path in (foreign, tmp_path, tmp_path / "link", "/dev/null"):
        with pytest.raises(UserError, match=r"/save: .* exists.*; give a new name"):
            one.command(f"/save {path}")
    assert foreign.read_text() == "mine"
    one.command(f"/save {file}")
    first = file.read_bytes()
    "".join(one.answer("b"))
    one.command(f"/save {file}")
    assert file.read_bytes() != first
    file.write_text("replaced by someone else")
    with pytest.raises(UserError, match="exists"):
        one.command(f"/save {file}")
    other = new()
    "".join(other.answer("a"))
    with pytest.raises(UserError, match="exists"):
        other.command(f"/save {file}")


def test_a_saved_state_is_that_of_all_tokens(new, model, tmp_path):
    one = new()
    "".join(one.answer("a"))
    read = [*one.read, *one.unread]
    one.command(f"/save {tmp_path / 'state'}")
    assert (one.read, one.unread) == (read, [])
    expected = model(jnp.asarray(read), return_state=True)[1]
    for have, want in zip(*map(jax.tree.leaves, (one.state, expected)), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4)


def test_a_failed_load_keeps_the_conversation(new, tmp_path):
    one = new()
    "".join(one.answer("a"))
    position = one.position
    (tmp_path / "text").write_text("no state")
    os.mkfifo(tmp_path / "fifo")
    for name in ("text", "missing", "fifo", "/dev/zero", ""):
        with pytest.raises(UserError):
            one.command(f"/load {tmp_path / name}")
        assert one.position is position


def test_only_a_second_ctrl_c_at_the_prompt_ends_the_chat(talk, monkeypatch):
    events = iter([KeyboardInterrupt, "/reset", KeyboardInterrupt, KeyboardInterrupt])

    def line(_):
        event = next(events)
        if event is KeyboardInterrupt:
            raise KeyboardInterrupt
        return event

    monkeypatch.setattr("builtins.input", line)
    out = talk(b"")
    assert out.count("ends the chat") == 3
    assert "the state is reset" in out


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), RuntimeError("lost"), EOFError()]
)
def test_a_lost_terminal_ends_the_chat(talk, monkeypatch, error):
    def line(_):
        raise error

    monkeypatch.setattr("builtins.input", line)
    talk(b"")


ESCAPES = b"\x1b[31m\xc2\x9b\xe2\x80\xae\t\n\xff"


@pytest.mark.parametrize(
    ("raw", "expected"), [(False, "\\x1b[31m\\x9b\\u202e\t\n\ufffd".encode()), (True, ESCAPES)]
)
def test_control_characters_of_a_model_are_escaped_unless_raw(capfdbinary, raw, expected):
    """Also when their bytes are in several tokens."""
    options = TextOptions(workdir="x", raw=raw)
    for text in decode_stream(get_tokenizer("bytes"), iter(ESCAPES), options.decoding_errors):
        options.print_part(text)
    assert capfdbinary.readouterr().out == expected
