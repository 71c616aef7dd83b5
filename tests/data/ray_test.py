"""Preparation on a Ray cluster of two nodes, made of processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from heinsen_jax.data import units
from heinsen_jax.data.prepare import prepare
from heinsen_jax.errors import UserError

units.UNIT_BYTES = 2000
inputs, here, there = map(Path, sys.argv[1:])


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
assert len(ray.nodes()) == 2

options = {"validation_fraction": 0.2}
prepare([str(inputs)], "bytes", here, **options)
prepare([str(inputs)], "bytes", there, executor="ray", **options)
assert contents(there) == contents(here)
count = len(list(there.glob("unit-*.json")))
assert count > 5, count

# A resumed preparation processes only missing units, also with one node less.
cluster.remove_node(second)
kept = there / "unit-00001.json"
before = kept.stat().st_mtime_ns
(there / "manifest.json").unlink()
(there / "unit-00003.json").unlink()
(there / "train-00004.bin").unlink()
prepare([str(inputs)], "bytes", there, executor="ray", **options)
assert contents(there) == contents(here)
assert kept.stat().st_mtime_ns == before

# Errors in the text are reported as without a cluster.
(inputs / "040.txt").write_bytes(b"\\xff\\xfe not text")
said = []
for executor in ("local", "ray"):
    try:
        prepare([str(inputs)], "bytes", there.with_name(executor), executor=executor, **options)
    except UserError as error:
        said.append(str(error))
assert len(said) == 2 and said[0] == said[1], said
print("all is well")
"""


def test_two_nodes_give_the_same_bytes_and_resume(tmp_path):
    inputs = tmp_path / "in"
    inputs.mkdir()
    for index in range(40):
        (inputs / f"{index:03d}.txt").write_text(f"document {index} says é\n" * (index + 1))
    table = pa.table({"text": [f"row {row}" for row in range(100)]})
    pq.write_table(table, inputs / "table.parquet")
    arguments = map(str, (inputs, tmp_path / "here", tmp_path / "there"))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("all is well\n")
