"""A linearized model, of an imported teacher, serves as any other run does."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_eval.api.instance import Instance

from heinsen_jax import data, evaluate, linearize
from heinsen_jax.chat import Chat
from heinsen_jax.config import load_config
from heinsen_jax.generate import Engine, complete, generate
from heinsen_jax.generate.__main__ import main as generate_main
from heinsen_jax.interop.harness import HarnessModel
from heinsen_jax.interop.hub import from_pretrained, save_pretrained
from heinsen_jax.interop.transformers import import_model
from heinsen_jax.linearize.comparison import Comparison, recall
from heinsen_jax.models import LanguageModel
from heinsen_jax.runs.load import load_run
from heinsen_jax.training.settings import resolve_settings
from tests.conftest import GOLDEN_FOLDER
from tests.models.small import apply

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def linearized(tmp_path_factory) -> Path:
    """A run with a window and log-attention, and a layer of the teacher, after two updates of each
    stage, with low-rank additions."""
    folder = tmp_path_factory.mktemp("linearized")
    text = folder / "text.txt"
    text.write_text("attention of constant cost\n" * 100)
    teacher = import_model(str(GOLDEN_FOLDER / "transformers/qwen2"), folder / "teacher")
    options = linearize.Options(
        model=str(teacher),
        workdir=str(folder / "linear"),
        data=str(text),
        attention=("log_window:window_size=4",),
        baselines=False,
        initialization_tokens=0,
        keep=("1",),
        transfer_steps=2,
        steps=2,
        lora_rank=2,
    )
    sizes = {"data.sequence-length": 16, "data.batch-size": 2, "data.cache": folder / "cache"}
    sizes |= {"data.validation-fraction": 0.2}
    overrides = [word for name, x in sizes.items() for word in (f"--{name}", str(x))]
    assert linearize.linearize(options, overrides) == 0
    return folder / "linear"


def test_generation_is_that_of_a_pass_over_all_tokens(linearized, monkeypatch, capsys):
    model, tokenizer, _ = load_run(linearized)
    assert model.config.layer_pattern == ("log_window", "gqa")
    prompt = [*tokenizer.start_ids, *tokenizer.encode("attention of")]
    ids = generate(model, jnp.array(prompt), 4, top_k=1, num_tokens=tokenizer.vocab_size)
    tokens = jnp.array([*prompt, *ids.tolist()])
    logits = apply(model, tokens)[len(prompt) - 1 : -1, : tokenizer.vocab_size]
    np.testing.assert_array_equal(ids, jnp.argmax(logits, -1))
    ((text,),) = complete(model, tokenizer, ["attention of"], 4, top_k=1)
    assert text == tokenizer.decode(ids.tolist())
    command = ["--workdir", str(linearized), "--prompt", "attention of", "--max-new-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["generate", *command, "--top-k", "1"])
    assert generate_main() == 0
    assert capsys.readouterr().out.strip() == f"attention of{text}".strip()


def test_chat_has_the_state_of_a_pass_over_all_tokens(linearized):
    model, tokenizer, _ = load_run(linearized)
    chat = Chat(Engine(model, tokenizer), 4, 0.7, 1, 0)
    for line in ("constant", "cost"):
        "".join(chat.answer(line))
    assert len(chat.read) > 4  # more than the window
    after, _ = apply(model, jnp.array(chat.unread), state=chat.state, return_state=True)
    whole = apply(model, jnp.array([*chat.read, *chat.unread]))
    np.testing.assert_allclose(after[-1], whole[-1], atol=1e-5)


def test_evaluation_repeats_the_loss_of_the_table(linearized, monkeypatch, capsys):
    rows = json.loads((linearized / linearize.RESULTS_FILE).read_text())["results"]
    arguments = ["evaluate", "--workdir", str(linearized)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert evaluate.main() == 0
    assert f"loss: {rows[-1]['loss']['16']:.4f}" in capsys.readouterr().out


def test_recall_starts_with_the_token_that_texts_start_with(linearized, monkeypatch):
    """The model predicts the copies after <|begin|>, and nothing without it."""
    model, tokenizer, _ = load_run(linearized)
    experiment = load_config(linearized / "config.json")
    length, size = 8, model.config.vocab_size

    def copies(self, tokens):
        is_started = tokens[:, :1, None] == tokenizer.start_ids[0]
        return is_started * jax.nn.one_hot(jnp.roll(tokens, length - 1, -1), size), None

    monkeypatch.setattr(LanguageModel, "features", copies)
    monkeypatch.setattr(LanguageModel, "readout", jax.tree_util.Partial(lambda x: x))
    settings = resolve_settings(experiment, data.load(experiment.data))
    comparison = Comparison(experiment.distillation.teacher, settings)
    assert recall(model, comparison.strings(length), length) == 1


def test_the_hub_has_the_same_model(linearized, tmp_path):
    model, tokenizer, _ = load_run(linearized)
    again, other = from_pretrained(save_pretrained(linearized, tmp_path / "model"))
    tokens = jnp.array(tokenizer.encode("attention of constant cost"))
    np.testing.assert_array_equal(apply(again, tokens), apply(model, tokens))
    assert other.fingerprint == tokenizer.fingerprint
    assert other.config() == tokenizer.config()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_harness_scores_continuations(linearized):
    adapter = HarnessModel(str(linearized))
    pair = "attention of", " constant cost"
    instance = Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0)
    ((value, _),) = adapter.loglikelihood([instance])
    prompt, tokens = adapter.tok_encode(pair[0]), jnp.array(adapter.tok_encode("".join(pair)))
    logits = apply(load_run(linearized)[0], tokens[:-1])
    values = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], -1)
    assert value == pytest.approx(float(values[len(prompt) - 1 :].sum()), abs=1e-3)
