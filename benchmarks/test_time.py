"""Time of the tests and of `.ci/run`, in a fresh clone and environment.

    python benchmarks/test_time.py

Run it alone on a machine. Clones the commit that is checked out, runs its `.ci/run`, and replaces
"now" in the JSON record. The README's test command is the set-up and the short tests.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import ROOT

from heinsen_jax.runtime.environment import environment

STEPS = {
    "set-up": r"python3 -m venv .*pip install",
    "style": "ruff check",
    "types": "pyright",
    "tests": r".* -m pytest -n 2$",
    "repository": "the tests of the repository",
    "newer": "a fast part",
}
"""Parts of `.ci/run`, and patterns of the lines that announce them."""


@dataclass(frozen=True)
class Options:
    """Measure the time of the tests.

    Attributes:
      output: path of the JSON record.
    """

    output: Path = ROOT / "benchmarks/results/tests.json"


def main(options: Options) -> int:
    commit = environment()["commit"]
    seconds, counts, part = dict.fromkeys(STEPS, 0.0), {}, None
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        started = changed = time.monotonic()
        command = [str(clone / ".ci/run")]
        outdated = "tests/benchmarks_test.py::test_the_recorded_time_of_tests_is_recent"
        environ = {**os.environ, "PYTEST_ADDOPTS": f"--deselect {outdated}"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if match := re.match(r"(\d+) passed", line):
                    counts[part] = int(match[1])
                if not line.startswith("== "):
                    continue
                title, now = line.removeprefix("== ").strip(), time.monotonic()
                if part is not None:
                    seconds[part] += now - changed
                new = [name for name, pattern in STEPS.items() if re.match(pattern, title)]
                part, changed = (new or [part])[-1], now
        ended = time.monotonic()
    if process.returncode:
        raise SystemExit(f".ci/run ended with {process.returncode}")
    assert seconds["set-up"]
    assert seconds["tests"]
    measured = {
        "commit": commit,
        "readme_command": round(seconds["set-up"] + seconds["tests"]),
        "ci": round(ended - started),
        "parts": {name: round(x) for name, x in seconds.items()},
        "passed": {name: count for name, count in counts.items() if name},
    }
    record = json.loads(options.output.read_text())
    record["environment"] = environment() | {"commit": commit, "uncommitted_changes": False}
    record["now"] = measured
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(measured, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
