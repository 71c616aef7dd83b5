"""A run that is killed repeatedly, at any moment, gives the same result."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from heinsen_jax.runs.metrics_file import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS, KILLS = 1500, 20
CONFIG = f"""
from heinsen_jax.config import *

def get_config():
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=264, model_dim=8, num_layers=1, num_heads=2,
            attention=Layers("log", options={{"implementation": "scan"}}),
        ),
        data=DataConfig(corpus="words.txt", sequence_length=16, batch_size=4),
        optimizer=OptimizerConfig(warmup_steps=5),
        training=TrainingConfig(
            steps={STEPS}, log_every=1, evaluate_every={STEPS}, checkpoint_every=5,
            evaluation_batches=1, sample_tokens=0,
        ),
    )
"""


def run(place: Path, seed: int, kills: int, workdir: str) -> dict:
    arguments = str(seed), str(kills), "--config", "tiny.py", "--workdir", workdir
    process = subprocess.run(
        [sys.executable, str(HERE / "kill_run.py"), *arguments],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def last_state(workdir: Path) -> dict[str, np.ndarray]:
    """Return all arrays of the last checkpoint by name."""
    folder = workdir.resolve() / "checkpoints" / str(STEPS) / "default"
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = checkpointer.metadata(folder).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(folder, ocp.args.PyTreeRestore(restore_args=as_numpy))


@pytest.mark.nightly
def test_killed_at_twenty_moments(tmp_path):
    (tmp_path / "words.txt").write_text("attention at constant cost per token " * 500)
    (tmp_path / "tiny.py").write_text(CONFIG)
    seed = random.randrange(1 << 30)
    assert run(tmp_path, seed, 0, "whole")["code"] == 0
    killed = run(tmp_path, seed, KILLS, "killed")
    assert killed["code"] == 0, seed
    assert killed["in_saves"] >= 3, (seed, killed)
    losses = [read_metrics(tmp_path / name) for name in ("killed", "whole")]
    for ours, theirs in zip(*losses, strict=True):  # the loss of each step: the data's order
        assert ours.get("train/loss") == theirs.get("train/loss"), (seed, ours["step"])
    states = [last_state(tmp_path / name) for name in ("killed", "whole")]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        np.testing.assert_array_equal(x, states[1][name], err_msg=f"{name}, seed {seed}")
