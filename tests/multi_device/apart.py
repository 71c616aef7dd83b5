"""Run programs in separate processes with any number of virtual devices."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STARTED: list[subprocess.Popen] = []
"""Processes that may still run."""
OBEYING = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT):  # ignored where tests run under nohup
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_apart(program: str, *arguments: str, cwd: Path | None = None) -> dict:
    """Run a program of this folder; return the JSON object that it prints last."""
    process = start(str(HERE / program), *arguments, cwd=cwd)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def start(*arguments: str, cwd: Path | None = None, **environment: Any) -> subprocess.Popen:
    """Start a Python process that can import this project; keywords are environment variables."""
    names = {name: str(value) for name, value in environment.items()}
    process = subprocess.Popen(
        [sys.executable, "-c", OBEYING, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | names,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def kill_all() -> None:
    """Kill processes that a failed test has left."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def train(
    place: Path,
    *arguments: str,
    devices: int = 1,
    processes: int = 1,
    only_last: Sequence[str] = (),
) -> list:
    """Start processes that train together, on several virtual devices each; the last one with
    further arguments."""
    command = str(ROOT / "train.py"), "--config", "tiny.py", *arguments
    if processes > 1:
        address = f"localhost:{free_port()}"
        command = *command, "--coordinator", address, "--num-processes", str(processes)
    return [
        start(
            *command,
            *(("--process-id", str(index)) if processes > 1 else ()),
            *(only_last if index == processes - 1 else ()),
            cwd=place,
            JAX_PLATFORMS="cpu",
            JAX_NUM_CPU_DEVICES=devices,
        )
        for index in range(processes)
    ]


def finish(processes: list, timeout: float = 300) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each process."""
    ends = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *end) for process, end in zip(processes, ends, strict=True)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
