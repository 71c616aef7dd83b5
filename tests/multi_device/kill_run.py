"""Train in children that are killed repeatedly, then to the end; print a JSON summary.

python kill_run.py SEED KILLS train.py's arguments ... --workdir WORKDIR
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import train  # imported once, before JAX starts threads: children start immediately


def child(arguments: list[str]) -> int:
    """Start a process that trains; return its id."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    sys.argv = ["train.py", *arguments]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os._exit(train.main())


def saving(checkpoints: Path) -> set[str]:
    """Return the folders of steps that are being written."""
    return {path.name for path in checkpoints.glob("*tmp*")}


def main() -> None:
    seed, kills, *arguments = sys.argv[1:]
    draw, checkpoints = random.Random(int(seed)), Path(arguments[-1]) / "checkpoints"
    in_saves = 0
    for _ in range(int(kills)):
        before, number = saving(checkpoints), child(arguments)
        if draw.random() < 0.5:  # during a save
            while not saving(checkpoints) - before:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))
        else:  # at any moment, from before the first step on
            time.sleep(draw.uniform(0.3, 3))
        os.kill(number, signal.SIGKILL)
        in_saves += bool(saving(checkpoints))
        _, status = os.waitpid(number, 0)
        assert os.WIFSIGNALED(status), "it ended before it could be killed"
    _, status = os.waitpid(child(arguments), 0)
    print(json.dumps({"in_saves": in_saves, "code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
