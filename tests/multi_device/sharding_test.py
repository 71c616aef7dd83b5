"""Eight virtual devices, in processes of their own: every mesh trains the same model."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.multi_device.apart import run_apart

pytestmark = pytest.mark.xdist_group("sharding")  # one worker makes what tests share

CONFIG = """
from heinsen_jax.config import *

def get_config():
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=264, model_dim=16, num_layers=2, num_heads=2,
            attention_options=(("log.implementation", "scan"),),
        ),
        data=DataConfig(corpus="words.txt", sequence_length=16, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        training=TrainingConfig(
            steps=10, report_every=1, evaluate_every=5, evaluation_batches=2, sample_tokens=5
        ),
    )
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "words.txt").write_text("attention at constant cost per token " * 500)
    (folder / "tiny.py").write_text(CONFIG)
    return folder


def run(place: Path, workdir: str, mesh: dict[str, int]) -> dict:
    return run_apart("run.py", workdir, json.dumps(mesh), "tiny.py", cwd=place)


@pytest.fixture(scope="module")
def replicated(place) -> dict:
    return run(place, "replicated", {"data": 8, "fsdp": 1})


@pytest.fixture(scope="module")
def split(place) -> dict:
    return run(place, "split", {"data": 1, "fsdp": 8})


def losses(result: dict) -> list[float]:
    return [row[name] for row in result["rows"] for name in row if name.endswith("/loss")]


def test_every_mesh_computes_the_same_losses_and_parameters(place, replicated, split):
    for result in (split, run(place, "both", {"data": 2, "fsdp": -1})):
        assert len(losses(result)) == 12
        np.testing.assert_allclose(losses(result), losses(replicated), rtol=2e-4)
        np.testing.assert_allclose(result["norms"], replicated["norms"], rtol=2e-3)


def test_fsdp_splits_the_optimizer_state_and_data_does_not(replicated, split):
    assert replicated["moment_shard_shape"] == replicated["moment_shape"] == [2, 16, 48]
    assert split["moment_shard_shape"] == [2, 2, 48]


def test_a_run_goes_on_upon_another_mesh(place, replicated):
    moved = run(place, "replicated", {"data": 4, "fsdp": 2})
    assert moved["norms"] == pytest.approx(replicated["norms"], rel=1e-6)
    assert moved["moment_shard_shape"] == [2, 8, 48]
