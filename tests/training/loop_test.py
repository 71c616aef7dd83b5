"""Whole runs: the loss decreases, and interrupted runs resume exactly."""

import math
import os
import re
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import data
from heinsen_jax.config import override
from heinsen_jax.errors import UserError
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.sharding import make_mesh, shard_batch
from heinsen_jax.training import TrainingResult, prepare_run, train
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.optimizer import make_optimizer
from heinsen_jax.training.state import abstract_state, initializer


def run(workdir, config, **options) -> TrainingResult:
    workdir.mkdir(exist_ok=True)
    return train(prepare_run(config, workdir, **options))


def final_bytes(workdir, config) -> list[bytes]:
    """Return the last checkpoint: step, parameters and optimizer state."""
    optimizer, has_average = make_optimizer(config.optimizer), bool(config.optimizer.ema_decay)
    init = initializer(config.model, optimizer, config.seed, has_average=has_average)
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.latest_step() == config.training.steps
        abstract = abstract_state(init, make_mesh(config.mesh))
        state = checkpoints.restore(config.training.steps, abstract)
    return [leaf.tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "a whole run"
    return workdir, run(workdir, small)


@pytest.mark.nightly
def test_averaged_weights_are_resumed_and_loaded(small, tmp_path):
    """With Muon and a z-loss, too."""
    chosen = "--optimizer.ema_decay 0.5 --optimizer.name muon --optimizer.schedule constant"
    chosen += " --training.z_loss 1e-4 --training.evaluate_every 10 --training.steps"
    few, more = (override(small, [*chosen.split(), steps]) for steps in ("10", "20"))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    result = run(whole, more)
    run(resumed, few)
    assert run(resumed, more).metrics == result.metrics
    assert final_bytes(whole, more) == final_bytes(resumed, more)
    with Checkpoints(whole) as checkpoints:
        init = initializer(more.model, make_optimizer(more.optimizer), 0, has_average=True)
        state = checkpoints.restore(20, abstract_state(init, make_mesh(more.mesh)))
    loaded = nnx.state(load_run(whole, best=False)[0], nnx.Param)
    differ = False
    for have, average, last in zip(
        *map(jax.tree.leaves, (loaded, state.average, state.parameters)), strict=True
    ):
        np.testing.assert_array_equal(have, average)
        differ |= bool(jnp.any(average != last))
    assert differ


def test_the_loss_falls_from_chance_to_below_two_nats(uninterrupted):
    workdir, result = uninterrupted
    losses = [row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row]
    assert losses[0] > 2.6
    assert result.metrics["loss"] < 2.0
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["loss"]))
    assert result.metrics["bits_per_byte"] == pytest.approx(
        result.metrics["loss"] / math.log(2), rel=1e-6
    )


def test_a_run_writes_its_files(uninterrupted):
    workdir, _ = uninterrupted
    assert {"checkpoints", "loss.png", "metrics.jsonl", "samples", "tensorboard"} <= {
        path.name for path in workdir.iterdir()
    }
    assert len(list((workdir / "samples").iterdir())) == 2
    steps = [row["step"] for row in read_metrics(workdir) if "validation/loss" in row]
    assert steps == [30, 60]


def test_a_dry_run_reports_costs_and_writes_nothing(small, tmp_path, capsys):
    assert run(tmp_path / "run", small, dry_run=True).step == 0
    said = capsys.readouterr().out
    assert "1 cpu device(s) in 1 process(es): data 1 x fsdp 1 x tensor 1 x context 1" in said
    assert re.search(r"[\d.]+ [kM]B \([\d.]+ [kM]B state, [\d.]+ [kM]B workspace\)", said)
    assert "8 x 32 = 256 tokens an update, 15,360 in all" in said
    assert " epochs of the data: " not in said
    assert re.search(r"an update needs [\d.e-]+ s: [\d.e-]+ seconds for 60 updates", said)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("corpora", [("a",), ("a", "b")])
def test_many_epochs_and_a_shorter_warm_up_are_reported(small, tmp_path, capsys, corpora):
    """The epochs of each source of a mixture."""
    for name in corpora:
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("some words " * 300)
    paths = [str(tmp_path / name) for name in corpora]
    weights = dict(zip(paths, (3.0, 1.0), strict=False)) if corpora[1:] else None
    settings = replace(small.data, corpus=paths[0], mixture=weights, cache=str(tmp_path / "cache"))
    optimizer = replace(small.optimizer, warmup_steps=400)
    training = replace(small.training, steps=240)
    chosen = replace(small, data=settings, optimizer=optimizer, training=training)
    run(tmp_path / "run", chosen, dry_run=True)
    out = capsys.readouterr().out
    assert "warm-up: 24 updates in place of optimizer.warmup_steps=400, which do not fit" in out
    tokens = 0.9 * 3300
    shares = {"a": 0.75, "b": 0.25} if corpora[1:] else {"the data": 1.0}
    for name, share in shares.items():
        (epochs,) = re.findall(rf"^([\d.]+) epochs of {name}: beyond 4, repeated", out, re.M)
        np.testing.assert_allclose(float(epochs), share * 240 * 256 / tokens, rtol=0.05)


@pytest.mark.nightly
def test_a_profile_is_a_trace_of_a_few_steps(small, tmp_path):
    short = override(small, ["--training.steps", "12", "--training.sample_tokens", "0"])
    run(tmp_path / "run", short, profile=True)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_run_whose_updates_are_all_skipped_ends_with_an_error(small, tmp_path, capsys):
    words = "--optimizer.learning_rate 1e38 --optimizer.clip_norm 1e38"
    words += " --training.max_consecutive_skips 8"  # not at the end of reported steps
    with pytest.raises(UserError, match=r"8 consecutive updates were skipped.*learning_rate"):
        run(tmp_path / "run", override(small, words.split()))
    assert "update(s) up to step 5 were skipped" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["train/skipped"] >= 3


@pytest.mark.parametrize(
    "stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_a_stopped_run_resumes_bit_for_bit(stop, small, uninterrupted, tmp_path, monkeypatch):
    """Stopped by a real signal during step 7, which is saved and resumed from."""
    starts, steps = [], []

    def batches(*args, **kwargs):
        starts.append(kwargs["start_step"])
        return data.train_batches(*args, **kwargs)

    def shard(*args):
        steps.append(args)
        if len(steps) == 7:
            os.kill(os.getpid(), stop)
        return shard_batch(*args)

    monkeypatch.setattr("heinsen_jax.training.program.train_batches", batches)
    monkeypatch.setattr("heinsen_jax.training.loop.shard_batch", shard)
    first = run(tmp_path / "run", small)
    assert (first.step, first.signal) == (7, stop)
    second = run(tmp_path / "run", small)
    assert (second.step, second.signal) == (60, None)
    assert starts == [0, 7]
    assert len(steps) == 60
    assert final_bytes(tmp_path / "run", small) == final_bytes(uninterrupted[0], small)
    assert second.metrics == uninterrupted[1].metrics


def test_a_finished_run_is_unchanged(small, uninterrupted, capsys):
    workdir, _ = uninterrupted
    before = final_bytes(workdir, small)
    again = run(workdir, small)
    command = f"python -m heinsen_jax.generate --workdir '{workdir}' --prompt"
    assert command in capsys.readouterr().out  # as in shells
    assert again.step == 60
    assert again.metrics == uninterrupted[1].metrics
    assert final_bytes(workdir, small) == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (("--model.vocab_size", "256"), r"model\.vocab_size=256 .* at least 257"),
        (("--training.accumulation_steps", "3"), r"data\.batch_size=8 must be a multiple"),
        (("--training.sample_prompt", ""), r"training\.sample_prompt is empty"),
    ],
)
def test_invalid_settings_are_named_before_training(small, tmp_path, argument, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", override(small, argument))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}
