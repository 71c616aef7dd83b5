"""Runs programs in processes of their own, which have as many virtual devices as they ask for."""

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
"""Processes that have not been waited for, perhaps."""
OBEYING = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT):  # ignored where tests run under nohup
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_apart(program: str, *arguments: str, cwd: Path | None = None) -> dict:
    """The JSON object that a program of this folder prints last."""
    process = start(str(HERE / program), *arguments, cwd=cwd)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def start(*arguments: str, cwd: Path | None = None, **environment: Any) -> subprocess.Popen:
    """A Python process that can import this project; keywords are variables of its environment."""
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
    """Ends what a test has started and not waited for, for it failed before."""
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
    """Processes that train together, on so many virtual devices each; the last one with further
    arguments."""
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
    """Exit code, output and errors of each."""
    ends = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *end) for process, end in zip(processes, ends, strict=True)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
