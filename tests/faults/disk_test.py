"""Runs end with an error if they cannot write."""

import subprocess
import sys
from pathlib import Path

import pytest

from heinsen_jax.runs.metrics_file import read_metrics
from tests.faults.conftest import ENDLESS, assert_one_line
from tests.multi_device.apart import ROOT

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from heinsen_jax.train import main
sys.argv = ["train.py", *sys.argv[2:]]
raise SystemExit(main())
"""

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "PYTHONDONTWRITEBYTECODE": "1",  # a truncated file would break later imports
}


def limited(place: Path, size: int, *arguments: str) -> subprocess.CompletedProcess:
    command = sys.executable, "-c", LIMITED, str(size), "--config", "tiny.py", *arguments
    return subprocess.run(
        command,
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "size",
    [
        0,  # nothing at all
        20_000,  # the logs, as of a disk that fills while training
        60_000,  # checkpoints, too
    ],
)
def test_a_run_that_cannot_write_ends_immediately_with_an_error(place, tmp_path, size):
    few = "--training.checkpoint_every", "1000" if size == 20_000 else "5"
    ended = limited(place, size, "--workdir", str(tmp_path / "run"), *ENDLESS, *few)
    assert ended.returncode == 2, ended.stderr
    assert_one_line(ended.stderr, "cannot be written", "free space")
    if size:
        steps = [row["step"] for row in read_metrics(tmp_path / "run")]
        assert steps == [*range(1, len(steps) + 1)]
        assert len(steps) > 10


@pytest.mark.nightly
def test_on_a_full_file_system(place, tmp_path):
    """On a real file system with 100 kB left, if tests may mount one."""
    endless = " ".join(ENDLESS)
    script = f"""
    set -e
    mount -t tmpfs -o size=3m tmpfs {tmp_path}
    head -c $((3 * 1024 * 1024 - 100 * 1024)) /dev/zero > {tmp_path}/fill
    cd {place}
    exec {sys.executable} {ROOT}/train.py --config tiny.py --workdir {tmp_path}/run {endless}
    """
    ended = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ended.stderr.startswith(("mount:", "unshare:")):
        pytest.skip("this system forbids mounting")
    assert ended.returncode == 2, ended.stderr
    assert_one_line(ended.stderr, "cannot be written", "No space left on device")
