"""The benchmarks of the GPU suite, on a small model without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, output: Path, *arguments: str) -> dict:
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--output", str(output)]
    command += ["--config", str(ROOT / "configs/quickstart.py"), "--repeats", "1", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(output.read_text())


@pytest.mark.nightly
def test_training_steps(tmp_path):
    record = run(
        "gpu_training.py", tmp_path / "record.json", "--rows", "2", "--remat-policies", "all"
    )
    chunked, fused = record["steps"]
    assert chunked["tokens_per_second"] > 0
    assert "Hopper" in fused["refused"] or fused["tokens_per_second"] > 0
    assert sum(record["profile"]["share_of_time"].values()) == pytest.approx(1)


@pytest.mark.nightly
def test_generation(tmp_path):
    sizes = ["--batches", "1", "--contexts", "10", "3000", "--tokens", "4", "--memory", "1e7"]
    record = run("gpu_decoding.py", tmp_path / "record.json", *sizes)
    rows = {(row["model"], row["context"]): row for row in record["rows"]}
    assert rows["log, scan", 10]["bytes"] == rows["log, scan", 3000]["bytes"]
    assert rows["log, scan", 3000]["seconds"] > 0
    assert rows["softmax", 10]["seconds"] > 0
    assert "GB of states" in rows["softmax", 3000]["refused"]


def test_unknown_parts_are_named():
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--parts", "nonsense"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "attention, training, decoding" in result.stdout
