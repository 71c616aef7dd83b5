"""Log-attention inside `jax.shard_map`, in a process of its own with eight virtual devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_sharded_by_batch_and_by_tokens():
    """Output and gradients equal those on one device; by tokens, only states are exchanged."""
    process = subprocess.run(
        [sys.executable, str(HERE / "log_attention_run.py"), "scan", "chunked"],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["devices"] == 8
    assert len(result["errors"]) == 4
    for name, errors in result["errors"].items():
        assert len(errors) == 5, name
        assert max(errors) < 1e-5, (name, errors)
