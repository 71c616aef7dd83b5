"""Writing in turns: the state is that of all that was said, and can be kept."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import chat
from heinsen_jax.chat import Chat
from heinsen_jax.models import LanguageModel
from heinsen_jax.training.checkpoint import load_run

pytestmark = pytest.mark.xdist_group("interop")  # one worker trains the run


@pytest.fixture
def new(run):
    model, tokenizer, _ = load_run(run)
    return lambda: Chat(model, tokenizer, most=20, temperature=0.7, top_k=1, seed=1)


def test_what_was_said_is_remembered(new, tmp_path):
    chat, said = new(), ""
    for line in ("attention", "where"):
        said += f"{line}\n" + "".join(chat.answer(line))
    chat.command(f"/save {tmp_path / 'state'}")
    tokens = jnp.asarray(chat.tokenizer.encode_ordinary(said))
    _, state = chat.model(tokens, return_state=True)
    for have, want in zip(chat.state.blocks, state.blocks, strict=True):
        np.testing.assert_allclose(have.attention.log_z, want.attention.log_z, atol=1e-4)


def test_room_for_a_turn_is_made_once(run, tmp_path):
    model, tokenizer, _ = load_run(run)
    config = dataclasses.replace(model.config, attention="softmax", attention_options=())
    chat = Chat(LanguageModel(config, rngs=nnx.Rngs(0)), tokenizer, 12, 0.7, 1, 0)
    rooms = set()
    for _ in chat.answer("where"):
        rooms.add(chat.state.blocks[0].attention.capacity)
    assert len(rooms) == 1
    chat.command(f"/save {tmp_path / 'state'}")
    chat.command(f"/load {tmp_path / 'state'}")
    assert "".join(chat.answer("cost"))


def test_kept_in_a_file_and_gone_on_from(new, tmp_path):
    one, other = new(), new()
    "".join(one.answer("attention is"))
    assert one.command(f"/save {tmp_path / 'state'}") == f"saved in {tmp_path / 'state'}"
    other.command(f"/load {tmp_path / 'state'}")
    other.turns = one.turns
    assert "".join(one.answer("exact")) == "".join(other.answer("exact"))


def test_the_command_line(run, monkeypatch, capsys):
    lines = iter(["constant", "/forget", "/dance", "/save", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.argv", ["chat", "--workdir", str(run), "--max-new-tokens", "5"])
    assert chat.main() == 0
    out = capsys.readouterr().out
    assert "forgotten" in out
    assert "error: '/dance' is no command: there are /save FILE" in out


def test_end_of_input_ends_it(run, monkeypatch):
    def no_more(_):
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    monkeypatch.setattr("sys.argv", ["chat", "--workdir", str(run)])
    assert chat.main() == 0
