"""A small trained run."""

import dataclasses
from pathlib import Path

import pytest

from heinsen_jax import data
from heinsen_jax.config import record
from heinsen_jax.training.loop import train
from tests.training.conftest import corpus, small

__all__ = ["corpus", "run", "small"]


@pytest.fixture(scope="session")
def run(small, tmp_path_factory) -> Path:
    """The folder of a run of bytes, which has learned some of its words."""
    folder = tmp_path_factory.mktemp("runs") / "words"
    folder.mkdir()
    config = dataclasses.replace(small, training=dataclasses.replace(small.training, steps=40))
    dataset = data.load(config.data)
    record(folder, config, dataset)
    train(folder, dataset, config)
    return folder
