"""Mutation testing: the faults of `fault_catalogue.py` are inserted into a copy, one by one.

    python tests/mutations.py [NAME ...]
    python tests/mutations.py --list

Each fault is one replacement in one file. The tests that it names run until one fails: that test
catches the fault if it passes without it. A fault that no test catches is an error, and so is one
that prevents tests from being collected. This is not a test, since it needs minutes: run it when
tests are merged, shortened or deleted.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fault_catalogue import FAULTS, Fault  # noqa: E402 - `tests` is beside this file

PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others mean that tests did not run."""
TIMEOUT = 600.0
"""Seconds after which a run of tests is an error."""


def stale() -> list[str]:
    """Describe the faults whose text does not occur exactly once, or whose tests do not exist."""
    problems = []
    for name, fault in FAULTS.items():
        path = ROOT / fault.file
        count = path.read_text().count(fault.right) if path.exists() else 0
        if count != 1:
            problems.append(f"{name}: {fault.right!r} occurs {count} times in {fault.file}")
        problems += [f"{name}: {x} does not exist" for x in fault.tests if not (ROOT / x).exists()]
    return problems


@contextlib.contextmanager
def working_copy() -> Iterator[Path]:
    """Yield a copy of the tracked files, which shares the checkout's cache of compilations."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "copy"
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        cache = ROOT / ".pytest_cache"
        cache.mkdir(exist_ok=True)
        (copy / cache.name).symlink_to(cache)
        yield copy


@contextlib.contextmanager
def applied(fault: Fault, copy: Path) -> Iterator[None]:
    """Insert a fault into the copy, and remove it at the end."""
    path = copy / fault.file
    right = path.read_text()
    try:
        write(path, right.replace(fault.right, fault.wrong))
        yield
    finally:
        write(path, right)


def write(path: Path, text: str) -> None:
    """Write a module. Python would reuse bytecode of the same second and size."""
    path.write_text(text)
    for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        bytecode.unlink()


def run_tests(tests: Sequence[str], copy: Path) -> str | None:
    """Return the first test that fails; None if all pass.

    Raises:
      RuntimeError: the tests did not run, or not in time.
    """
    options = "-x", "-p", "no:cacheprovider", "-n", "0", "--tb=no"
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        run = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result in {TIMEOUT:g} s") from None
    if run.returncode == PASSED:
        return None
    lines = [x for x in run.stdout.splitlines() if x.startswith(("FAILED ", "ERROR "))]
    if run.returncode != FAILED or not lines:
        raise RuntimeError(f"pytest ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr}")
    return lines[0].split(" ", 1)[1].split(" - ")[0]


def check(names: Sequence[str], copy: Path) -> list[str]:
    """Print a row for each fault; return the names of those that are not caught."""
    catching: dict[str, str] = {}
    for name in names:
        fault, start = FAULTS[name], time.monotonic()
        try:
            with applied(fault, copy):
                failed = run_tests(fault.tests, copy)
        except RuntimeError as error:
            failed, result = None, f"ERROR: {error}"
        else:
            result = failed or "NOT CAUGHT"
        if failed is not None:
            catching[name] = failed
        seconds = time.monotonic() - start
        print(f"{name:<52} {fault.file:<52} {result:<88} {seconds:4.0f} s", flush=True)
    broken = {*broken_tests({*catching.values()}, copy)}
    for test in sorted(broken):
        print(f"{test} fails without a fault")
    return [name for name in names if catching.get(name, "") in broken | {""}]


def broken_tests(tests: Iterable[str], copy: Path) -> Iterator[str]:
    """Yield the tests that fail without a fault; all of a file whose tests do not run."""
    for _, group in itertools.groupby(sorted(tests), key=lambda test: test.partition("::")[0]):
        left = [*group]
        try:
            while left and (failed := run_tests(left, copy)) is not None:
                yield failed
                left.remove(failed)
        except (RuntimeError, ValueError) as error:
            print(error)
            yield from left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all by default")
    parser.add_argument("--list", action="store_true", help="list the faults and their tests")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - FAULTS.keys():
        parser.error(f"{min(unknown)!r} is not a fault; --list lists them")
    names = arguments.names or [*FAULTS]
    if arguments.list:
        for name in names:
            print(f"{name:<52} {FAULTS[name].file:<52} {' '.join(FAULTS[name].tests)}")
        return 0
    if problems := stale():
        print("\n".join(problems), file=sys.stderr)
        return 1
    with working_copy() as copy:
        missed = check(names, copy)
    print(f"{len(names) - len(missed)} of {len(names)} faults caught")
    for name in missed:
        print(f"not caught: {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
