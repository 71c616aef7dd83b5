"""The test split of a run's data, by `heinsen_jax.evaluate`."""

import sys
from dataclasses import replace

import pytest

from heinsen_jax import data
from heinsen_jax.errors import UserError
from heinsen_jax.evaluate import main
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.runs.load import load_model
from heinsen_jax.training import prepare_run, resolve_settings, train
from heinsen_jax.training.program import Program


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_named_split_is_evaluated(split, small, tmp_path, monkeypatch, capsys):
    config = replace(small, data=replace(small.data, test_fraction=0.2))
    train(prepare_run(config, tmp_path))
    arguments = "--workdir", str(tmp_path), "--split", split
    monkeypatch.setattr(sys, "argv", ["heinsen_jax.evaluate", *arguments])
    assert main() == 0
    said = capsys.readouterr().out
    model, _ = load_model(tmp_path)
    dataset = data.load(config.data)
    tokens = dataset.manifest.splits[split].tokens
    assert f"on the {split} text of {config.data.corpus}, {tokens:,} tokens" in said
    measured = evaluate_model(model, dataset, config.data, masked_fraction=0.15, split=split)
    assert f"loss: {measured['loss']:.4f}" in said
    assert f"bits per byte: {measured['bits_per_byte']:.4f}" in said
    monkeypatch.setattr(sys, "argv", ["heinsen_jax.evaluate", *arguments, "--batch-size", "3"])
    assert main() == 0
    assert f"loss: {measured['loss']:.4f}" in capsys.readouterr().out


def test_data_that_changed_after_training_is_refused(small, tmp_path, monkeypatch, capsys):
    """Text of training may be in its validation split."""
    path, folder = tmp_path / "numbers.txt", str(tmp_path / "run")
    path.write_text("".join(f"{number:07d}\n" for number in range(600)))
    data_config = replace(small.data, corpus=str(path))
    training = replace(small.training, steps=1, sample_tokens=0)
    train(prepare_run(replace(small, data=data_config, training=training), tmp_path / "run"))
    path.write_text("".join(f"{number:07d}\n" for number in reversed(range(600))))
    for more in ((), ("--data", str(path))):
        monkeypatch.setattr(sys, "argv", ["heinsen_jax.evaluate", "--workdir", folder, *more])
        assert main() == 2
        assert "the content of its data has changed since training" in capsys.readouterr().err


def test_sequences_beyond_max_length_are_refused(small, tmp_path, monkeypatch, capsys):
    length = small.data.sequence_length
    model = replace(small.model, max_length=length, positions="learned")
    training = replace(small.training, steps=1, sample_tokens=0)
    config = replace(small, model=model, training=training)
    train(prepare_run(config, tmp_path))
    arguments = "--workdir", str(tmp_path), "--sequence-length", str(length + 1)
    monkeypatch.setattr(sys, "argv", ["heinsen_jax.evaluate", *arguments])
    assert main() == 2
    message = f"sequences of {length + 1} tokens exceed model.max_length={length}"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("place", ["training.start", "distillation.teacher"])
def test_a_restart_refuses_to_move_its_start_aside(small, tmp_path, place):
    training = replace(small.training, steps=1, sample_tokens=0)
    config = replace(small, training=training)
    train(prepare_run(config, tmp_path / "run"))
    (tmp_path / "other").mkdir()
    same = str(tmp_path / "other" / ".." / "run")
    if place == "training.start":
        config = replace(config, training=replace(training, start=same))
    else:
        config = replace(config, distillation=replace(config.distillation, teacher=same))
    with pytest.raises(UserError, match=rf"{place}=.* --restart moves aside"):
        prepare_run(config, tmp_path / "run", restart=True)
    load_model(tmp_path / "run")


@pytest.mark.parametrize("is_causal", [True, False])
def test_evaluations_need_no_more_rows_than_microbatches(small, is_causal):
    """They measure the same rows, and fit into the memory of an update. Masks of bidirectional
    models depend on the batch, which is therefore not divided."""
    vocabulary = small.model.vocab_size + (not is_causal)
    model = replace(small.model, is_causal=is_causal, vocab_size=vocabulary)
    small = replace(small, model=model)
    dataset, measured, rows = data.load(small.data), [], set()
    for parts in (1, 4):
        training = replace(small.training, accumulation_steps=parts, sample_tokens=0)
        program = Program(resolve_settings(replace(small, training=training), dataset))
        step = program.evaluation_step

        def recorded(parameters, batch, index, step=step, parts=parts):
            rows.add((parts, len(batch.tokens)))
            return step(parameters, batch, index)

        program.evaluation_step = recorded
        measured.append(program.evaluate(program.initial_state()))
    assert rows == {(1, 8), (4, 2 if is_causal else 8)}
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
