"""A small trained run."""

import dataclasses
from pathlib import Path

import pytest

from heinsen_jax.config import ExperimentConfig
from heinsen_jax.training import prepare_run, train
from tests.training.conftest import corpus
from tests.training.conftest import small as small_of_training

__all__ = ["corpus", "run", "small", "small_of_training"]


@pytest.fixture(scope="session")
def small(small_of_training) -> ExperimentConfig:
    training = {"steps": 60, "evaluate_every": 30, "sample_tokens": 0}
    return dataclasses.replace(
        small_of_training,
        training=dataclasses.replace(small_of_training.training, **training),
    )


@pytest.fixture(scope="session")
def run(small, tmp_path_factory) -> Path:
    """Return the folder of a run on bytes, trained for a few updates."""
    folder = tmp_path_factory.mktemp("runs") / "words"
    folder.mkdir()
    train(prepare_run(small, folder))
    return folder
