"""Fixtures of a small run that tests damage."""

import contextlib
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heinsen_jax.config import load_config
from heinsen_jax.runtime import distributed
from heinsen_jax.training import prepare_run, train
from tests.multi_device.apart import kill_all

CONFIG = """
from heinsen_jax.config import *

def get_config():
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=264, model_dim=16, num_layers=1, num_heads=2, attention="linear",
        ),
        data=DataConfig(corpus="words.txt", sequence_length=16, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        training=TrainingConfig(
            steps=40, log_every=1, evaluate_every=20, checkpoint_every=5, evaluation_batches=2,
            sample_tokens=5,
        ),
    )
"""
ENDLESS = "--training.steps", "1000000", "--training.evaluate_every", "1000000"


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """Return a folder with a text, its prepared form, a configuration, and a finished run of it."""
    folder = tmp_path_factory.mktemp("faults")
    draw = random.Random(0)
    words = " ".join(draw.choice(["abc", "de", "f"]) for _ in range(5000))
    (folder / "words.txt").write_text(words)
    (folder / "tiny.py").write_text(CONFIG)
    with contextlib.chdir(folder):
        train(prepare_run(load_config("tiny.py"), "finished"))
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture
def run(place, tmp_path) -> Path:
    """Return a copy of the finished run, to be damaged."""
    return shutil.copytree(place / "finished", tmp_path / "run")


def wait_until(happens: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def has_checkpoint(workdir: Path) -> bool:
    return any(path.name.isdecimal() for path in workdir.glob("checkpoints/*"))


def assert_one_line(err: str, *words: str) -> None:
    """Assert that the only output is an error in one line, with these words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err


def said(main, monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and errors."""
    monkeypatch.setattr(distributed, "initialize", lambda *_, **__: None)  # only at the start
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*: step [0-9]+ is used")
        code = main()
    return code, capsys.readouterr().err
