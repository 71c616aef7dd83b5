"""A smaller quickstart with every mechanism: from text to a trained model."""

import shutil
from pathlib import Path

import pytest

from heinsen_jax import attention
from heinsen_jax.config import load_config, override
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train

ROOT = Path(__file__).resolve().parents[1]
CAUSAL = [name for name in attention.names() if attention.mechanism(name).capabilities.causal]
MARGIN = 1.5
"""Minimum decrease of the loss, initially 5.6 nats, by 30 updates."""


@pytest.fixture(scope="module")
def corpus(published_data: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    return Path(shutil.copy(published_data / "tinyshakespeare.txt", folder / "text.txt"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", CAUSAL)
def test_quickstart(name, corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)
    words = f"""
        --model.attention {name} --data.corpus {corpus} --data.cache {corpus.parent}
        --model.num_layers 2 --data.sequence_length 64 --data.batch_size 4 --training.steps 30
        --training.log_every 1
        --training.evaluation_batches 4 --training.sample_tokens 0 --optimizer.warmup_steps 5
    """
    config = override(load_config(ROOT / "configs/quickstart.py"), words.split())
    result = train(prepare_run(config, folder))
    rows = read_metrics(folder)
    first = rows[0]["train/loss"]
    assert 5 < first < 7
    assert result.metrics["loss"] < first - MARGIN
