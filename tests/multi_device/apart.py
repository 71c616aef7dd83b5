"""Runs a program of this folder in a process of its own, where it sets up eight virtual devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_apart(program: str, *arguments: str, cwd: Path | None = None) -> dict:
    """The JSON object that the program prints last; it must name 8 devices."""
    process = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["devices"] == 8
    return result
