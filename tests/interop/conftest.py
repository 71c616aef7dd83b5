"""A small trained run."""

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
    dataset = data.load(small.data)
    record(folder, small, dataset)
    train(folder, dataset, small)
    return folder
