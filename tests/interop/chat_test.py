"""Chat: the state covers the whole conversation and can be saved."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax import chat
from heinsen_jax.chat import Chat
from heinsen_jax.data import get_tokenizer
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer, pretrained_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import Engine
from heinsen_jax.generate.compiled import step
from heinsen_jax.generate.text import _until_stop
from heinsen_jax.interop.transformers import from_pretrained
from heinsen_jax.runs.load import load_run
from tests.conftest import GOLDEN_FOLDER
from tests.data.tokenizer_json_test import byte_fallback
from tests.models.mechanisms_test import build
from tests.models.small import apply


@pytest.fixture(scope="module")
def new(run):
    model, tokenizer, _ = load_run(run)
    engine = Engine(model, tokenizer)
    return lambda: Chat(engine, max_new_tokens=3, temperature=0.7, top_k=1, seed=1)


@pytest.mark.nightly
def test_the_state_covers_the_conversation_and_can_be_saved(run, new, tmp_path):
    one, other, said = new(), new(), ""
    for line in ("exact", "cost"):
        said += f"{line}\n" + "".join(one.answer(line))
    assert one.turns == 2
    assert one.command(f"/save {tmp_path / 'state'}") == f"saved in {tmp_path / 'state'}"
    tokens = jnp.asarray(one.tokenizer.encode(said))
    state = apply(load_run(run)[0], tokens, return_state=True)[1]
    leaves = jax.tree.leaves(one.state), jax.tree.leaves(state)
    for have, want in zip(*leaves, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4)
    other.command(f"/load {tmp_path / 'state'}")
    other.turns = one.turns
    assert "".join(one.answer("where")) == "".join(other.answer("where")) != ""


@pytest.mark.nightly
def test_capacity_for_a_turn_is_allocated_once(tmp_path):
    model = build("softmax", vocab_size=264, num_layers=1)
    chat = Chat(Engine(model, get_tokenizer("bytes")), 4, 0.7, 1, 0)
    rooms = set()
    for _ in chat.answer("where"):
        rooms.add(chat.state.blocks[0].attention.capacity)
    assert len(rooms) == 1
    read = chat.state.blocks[0].attention.length
    chat.command(f"/save {tmp_path / 'state'}")
    chat.command(f"/load {tmp_path / 'state'}")
    np.testing.assert_array_equal(chat.state.blocks[0].attention.length, read + 1)


def test_lines_of_any_length_share_compiled_functions(new):
    chat = new()
    "".join(chat.answer("a line"))
    count = step._cache_size()
    for line in ("b", "a longer line", "the longest line of all"):
        "".join(chat.answer(line))
    assert step._cache_size() == count


def test_a_model_that_cannot_generate_is_refused():
    model = build("softmax", vocab_size=264, num_layers=1, is_causal=False)
    with pytest.raises(UserError, match="predicts masked tokens and cannot generate"):
        Chat(Engine(model, get_tokenizer("bytes")), 4, 0.7, 1, 0)


@pytest.fixture
def pretrained() -> Chat:
    """A conversation with a pretrained model that has a chat template."""
    model, tokenizer = from_pretrained(GOLDEN_FOLDER / "transformers" / "qwen2")
    return Chat(Engine(model, tokenizer), max_new_tokens=3, temperature=0.7, top_k=1, seed=1)


def test_lines_are_messages_of_a_chat_template(pretrained):
    tokenizer = pretrained.tokenizer
    first = "".join(pretrained.answer("exact"))
    messages = [{"role": "user", "content": "exact"}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert pretrained.read[: len(asked)] == asked
    assert len(pretrained.read) == len(asked) + 2  # of three new tokens, the last is unread
    said = tokenizer.decode([*pretrained.read[len(asked) :], *pretrained.unread])
    assert said == first
    "".join(pretrained.answer("cost"))
    assert [x["role"] for x in pretrained.messages] == ["user", "assistant"] * 2
    model, _ = from_pretrained(GOLDEN_FOLDER / "transformers" / "qwen2")
    state = apply(model, jnp.asarray(pretrained.read), return_state=True)[1]
    length = len(pretrained.read)
    have, want = (x.blocks[0].attention.arrays[0] for x in (pretrained.state, state))
    np.testing.assert_allclose(have[..., :length, :], want[..., :length, :], atol=1e-4)
    with pytest.raises(UserError, match="/save: a conversation in a chat template cannot be saved"):
        pretrained.command("/save file")


def test_an_interrupted_answer_stays_in_the_conversation(pretrained):
    answer = pretrained.answer("exact")
    said = next(answer) + next(answer)
    answer.close()
    "".join(pretrained.answer("cost"))
    assert [x["role"] for x in pretrained.messages] == ["user", "assistant"] * 2
    assert pretrained.messages[1]["content"] == said


def test_a_line_without_an_answer_is_not_in_the_conversation(pretrained, monkeypatch):
    monkeypatch.setattr(Engine, "remaining", lambda *_: 0)
    with pytest.raises(UserError, match=r"model has 0 positions left .*: /reset starts over"):
        "".join(pretrained.answer("exact"))
    assert pretrained.messages == []


def test_a_template_may_change_earlier_messages(pretrained):
    pretrained.tokenizer.templates["default"] = "{{ messages | length }}{{ messages[-1].content }}"
    "".join(pretrained.answer("exact"))
    "".join(pretrained.answer("cost"))
    want = pretrained.tokenizer.encode("3cost")
    assert pretrained.read[: len(want)] == want
    assert pretrained.state.blocks[0].attention.length == len(pretrained.read)
    pretrained.command("/reset")
    assert (pretrained.read, pretrained.messages) == ([], [])


def test_the_command_line(run, monkeypatch, capsys):
    lines = iter(["constant", "/reset", "/dance", "/save", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.argv", ["chat", "--workdir", str(run), "--max-new-tokens", "5"])
    assert chat.main() == 0
    out = capsys.readouterr().out
    assert "the state is reset" in out
    assert "error: '/dance': unknown command; choose from /save FILE" in out


def test_end_of_input_ends_it(run, monkeypatch):
    def no_more(_):
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    monkeypatch.setattr("sys.argv", ["chat", "--workdir", str(run)])
    assert chat.main() == 0


@pytest.fixture
def sentencepiece(tmp_path) -> PretrainedTokenizer:
    """A tokenizer like Mistral's, with its template."""
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'the ' + m.content }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template})
    )
    tokenizer = pretrained_tokenizer(tmp_path, "tiny")
    assert tokenizer is not None
    return tokenizer


def test_answers_begin_without_the_space_of_a_word(sentencepiece, monkeypatch):
    """The next turn then extends the state, instead of beginning again with another text."""
    new = [*sentencepiece.encode("the the"), sentencepiece.end_of_text_id]
    monkeypatch.setattr(chat, "continued", lambda *args, **_: iter([(x, None) for x in new]))
    model = build("linear", vocab_size=sentencepiece.vocab_size, num_layers=1)
    conversation = Chat(Engine(model, sentencepiece), 4, 0.7, 1, 0)
    assert "".join(conversation.answer("the")) == "the the"
    assert conversation.messages[-1]["content"] == "the the"
    read = conversation.read
    messages = [*conversation.messages, {"role": "user", "content": "the"}]
    assert sentencepiece.apply_chat_template(messages)[: len(read)] == read


def test_stop_strings_are_sought_in_texts_without_the_space_of_a_word(sentencepiece):
    row = np.array(sentencepiece.encode("the the"))
    assert _until_stop(sentencepiece, [" "], True, "replace", row) == ("the", True)
    assert _until_stop(sentencepiece, [" "], False, "replace", row) == ("", True)
    assert _until_stop(sentencepiece, ["x"], True, "replace", row) == ("the the", False)


def test_special_tokens_are_left_out_but_not_texts_that_look_like_them(sentencepiece):
    special = sentencepiece._tokenizer.token_to_id("<s>")
    row = np.array([special, *sentencepiece.encode("the <s>"), special])
    hidden = sentencepiece.special_ids
    assert _until_stop(sentencepiece, [], True, "replace", row, hidden) == ("the <s>", False)
    assert _until_stop(sentencepiece, [" <"], True, "replace", row, hidden) == ("the", True)
