"""A synthetic task, from a configuration to a model that solves it, and further commands."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from heinsen_jax import evaluate
from heinsen_jax.config import load_config
from heinsen_jax.data import Copying, Recall
from heinsen_jax.errors import UserError
from heinsen_jax.generate import __main__ as generate
from heinsen_jax.training import prepare_run, train

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BASE = load_config(CONFIGS / "recall.py")
SOFTMAX = {"attention": "softmax", "convolution_size": 2}
RECALL = replace(
    BASE,
    model=replace(BASE.model, vocab_size=16, model_dim=32, num_layers=1, **SOFTMAX),
    data=Recall(
        vocab_size=16,
        num_pairs=2,
        sequence_length=12,
        batch_size=32,
        validation_examples=256,
        test_lengths=(24,),
        test_pairs=(1,),
    ),
    optimizer=replace(BASE.optimizer, warmup_steps=20),
    training=replace(BASE.training, steps=120, evaluate_every=120),
)
FEW = replace(RECALL, training=replace(RECALL.training, steps=5))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of few updates."""
    workdir = tmp_path_factory.mktemp("recall")
    return workdir, train(prepare_run(FEW, workdir))


@pytest.mark.nightly
def test_softmax_solves_recall_also_at_twice_the_length(tmp_path):
    metrics = train(prepare_run(RECALL, tmp_path)).metrics
    assert metrics["accuracy"] > 0.95  # guessing one of the two values is correct half of the time
    assert metrics["accuracy_24"] > 0.9
    assert metrics["loss"] < metrics["loss_24"] < 1
    assert metrics["accuracy_1_pairs"] > 0.9
    assert "bits_per_byte" not in metrics


def said_by(main, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    return main(), capsys.readouterr()


def test_evaluate_measures_it_again(run, monkeypatch, capsys):
    workdir, result = run
    code, said = said_by(evaluate.main, monkeypatch, capsys, "--workdir", workdir)
    assert code == 0
    assert f"{workdir}, step 5, on recall:" in said.out
    for name, value in result.metrics.items():
        assert f"  {name.replace('_', ' ')}: {value:.4f}" in said.out


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (generate.main, ("--prompt", "a"), "the model is trained on a synthetic task"),
        (evaluate.main, ("--sequence-length", "24"), "leave out --data and --sequence-length"),
    ],
)
def test_commands_for_text_are_refused(run, monkeypatch, capsys, main, arguments, message):
    code, said = said_by(main, monkeypatch, capsys, "--workdir", run[0], *arguments)
    assert code == 2
    assert message in said.err


def test_a_folder_cannot_change_its_task(run):
    config = replace(RECALL, data=Copying())
    with pytest.raises(UserError, match="contains a run trained on recall, not copying"):
        prepare_run(config, run[0])


def test_a_task_has_nothing_to_sample(tmp_path):
    config = replace(RECALL, training=replace(RECALL.training, sample_tokens=9))
    with pytest.raises(UserError, match=r"recall has no text .* training\.sample_tokens=0"):
        train(prepare_run(config, tmp_path))


PARITY = load_config(CONFIGS / "state_tracking.py")
PARITY = replace(
    PARITY,
    model=replace(PARITY.model, model_dim=32, num_layers=1),
    data=replace(PARITY.data, test_lengths=(64,), validation_examples=128),
    optimizer=replace(PARITY.optimizer, warmup_steps=20),
    training=replace(PARITY.training, steps=100, evaluate_every=100, accumulation_steps=2),
)


@pytest.mark.nightly
def test_negative_eigenvalues_track_parity_also_at_twice_the_length(tmp_path):
    metrics = train(prepare_run(PARITY, tmp_path)).metrics
    assert metrics["accuracy"] > 0.99
    assert metrics["accuracy_64"] > 0.95


def test_labels_are_refused_with_masked_tokens(tmp_path):
    model = replace(PARITY.model, attention="gqa", convolution_size=None, is_causal=False)
    config = replace(PARITY, model=model)
    with pytest.raises(UserError, match=r"model\.is_causal=False: state_tracking has labels"):
        train(prepare_run(config, tmp_path))
