"""Environment of a result: hardware, versions and commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

import jax

CHECKOUT = Path(__file__).resolve().parents[2]


class Environment(TypedDict):
    """Hardware, versions, commit, date."""

    date: str
    commit: str
    uncommitted_changes: bool
    python: str
    jax: str
    backend: str
    device: str
    num_devices: int
    cpu: str
    cpu_cores: int | None


def environment() -> Environment:
    """Hardware, versions, commit, date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
        ),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _git(*arguments: str) -> str:
    """Output of git for the checkout of this package; empty outside a checkout."""
    if not (CHECKOUT / ".git").exists():
        return ""
    try:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
