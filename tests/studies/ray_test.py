"""A study on Ray: the same results as with local processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
OF_RAY = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}  # a separate cluster
FILE = """
from tests.studies.small import SMALLER

def get_study():
    return SMALLER
"""


def test_ray_gives_the_results_of_local_processes(tmp_path):
    (tmp_path / "study.py").write_text(FILE)
    command, measured = [sys.executable, "-m", "studies", "study.py"], []
    for executor in ("local", "ray"):
        ended = subprocess.run(
            [*command, "--executor", executor, "--output", executor],
            cwd=tmp_path,
            env=os.environ | OF_RAY | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        lines = (tmp_path / executor / "results.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        measured.append({row["labels"]["mechanism"]: row["metrics"]["loss"] for row in rows})
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    assert set(measured[0]) == {"linear", "softmax"}
