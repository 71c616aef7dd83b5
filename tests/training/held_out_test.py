"""The test split of a run's data, by `heinsen_jax.evaluate`."""

import sys
from dataclasses import replace

import pytest

from heinsen_jax import data
from heinsen_jax.evaluate import main
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.runs.load import load_model
from heinsen_jax.training import prepare_run, train


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
