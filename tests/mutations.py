"""Mutation testing: nineteen faults are inserted into copies of the package, one by one.

    python tests/mutations.py [NAME ...]

Each fault is one replacement in one file. The tests of the named parts run until one fails; a fault
that none detects is an error. This is not a test, since it needs minutes: run it when tests are
merged, shortened or deleted.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOG_ATTENTION = "heinsen_jax/ops/log_attention"


class Fault(NamedTuple):
    file: str
    right: str
    wrong: str
    tests: str


FAULTS = {
    "a mask off by one": Fault(
        f"{LOG_ATTENTION}/single_level.py",
        "jnp.tri(size, dtype=bool)",
        "jnp.tri(size, k=-1, dtype=bool)",
        "tests/ops/log_attention",
    ),
    "a dropped decay": Fault(
        f"{LOG_ATTENTION}/single_level.py", "key - so_far", "key", "tests/ops/log_attention"
    ),
    "a segment that starts a token late": Fault(
        "heinsen_jax/ops/arguments.py",
        "[(1, 0)]\n    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]",
        "[(2, 0)]\n    return jnp.pad(starts, padding)[..., : segment_ids.shape[-1]]",
        "tests/ops",
    ),
    "a stale state": Fault(
        f"{LOG_ATTENTION}/chunked.py",
        "return (after, _write(outputs, of_block, index)), saved",
        "return (before, _write(outputs, of_block, index)), saved",
        "tests/ops/log_attention",
    ),
    "a swapped axis": Fault(
        "heinsen_jax/ops/layout.py",
        "x.reshape(chunks, folds // groups, groups, heads, rows // heads, features)",
        "x.reshape(chunks, folds // groups, groups, rows // heads, heads, features).swapaxes(3, 4)",
        "tests/ops/log_attention",
    ),
    "a tier beyond its range": Fault(
        f"{LOG_ATTENTION}/chunked.py",
        "first_safe((used - plan.budget)[None])",
        "first_safe((used - 2 * plan.budget)[None])",
        "tests/ops/log_attention",
    ),
    "a cotangent left out": Fault(
        "heinsen_jax/ops/numerics.py",
        "d_log_weights = dx - d_log_z",
        "d_log_weights = dx",
        "tests/ops/log_attention",
    ),
    "a decay without its cotangent": Fault(
        f"{LOG_ATTENTION}/exact.py",
        "jnp.zeros_like(decay), d_from_start",
        "jnp.zeros_like(decay), jnp.zeros_like(d_from_start)",
        "tests/ops/log_attention",
    ),
    "a window off by one": Fault(
        f"{LOG_ATTENTION}/variants.py",
        "_moved(before.query, 1 - window)",
        "_moved(before.query, -window)",
        "tests/ops/log_attention",
    ),
    "states merged without decay": Fault(
        f"{LOG_ATTENTION}/state.py",
        "earlier = _decayed(self, other.log_decay)\n        merged = merge_averages",
        "earlier = self\n        merged = merge_averages",
        "tests/ops/log_attention",
    ),
    "a causal mask of softmax off by one": Fault(
        "heinsen_jax/ops/masks.py", "return key <= query", "return key < query", "tests/ops"
    ),
    "a value that is not erased": Fault(
        "heinsen_jax/ops/matrix_state.py",
        "value = value - matmul(erase, state)",
        "value = value - 0 * matmul(erase, state)",
        "tests/ops/gated_delta_rule_test.py",
    ),
    "a decay of features one token late": Fault(
        "heinsen_jax/ops/matrix_state.py",
        "summed = ((boundary <= s) & (s <= t)) | ((t < s) & (s < boundary))",
        "summed = ((boundary < s) & (s <= t)) | ((t < s) & (s < boundary))",
        "tests/ops/gated_delta_rule_test.py",
    ),
    "a stabilizer with a cotangent": Fault(
        "heinsen_jax/ops/mlstm.py",
        "first, second = lax.stop_gradient((self.m, other.m))",
        "first, second = self.m, other.m",
        "tests/ops/mlstm_test.py",
    ),
    "a second stage without the first": Fault(
        "heinsen_jax/linearize.py",
        "settings = replace(settings, start=folder)",
        "settings = replace(settings, start=None)",
        "tests/linearize_test.py",
    ),
    "a teacher that may change": Fault(
        "heinsen_jax/training/distillation.py",
        "path.read_text() != self.weights_hash",
        "not path.read_text()",
        "tests/training/distillation_test.py",
    ),
    "results with another text": Fault(
        "heinsen_jax/study/runs.py",
        "if then[name] != now.get(name)",
        "if name not in now",
        "tests/study/runner_test.py",
    ),
    "positions that ignore the state": Fault(
        "heinsen_jax/models/position.py",
        "initial=initial_state.h)",
        "initial=jnp.zeros_like(initial_state.h))",
        "tests/models",
    ),
    "positions that continue from one document to the next": Fault(
        "heinsen_jax/models/position.py",
        "jnp.where(starts, -jnp.inf, log_coefficients)",
        "jnp.where(starts, log_coefficients, log_coefficients)",
        "tests/models",
    ),
    "a prediction across two documents": Fault(
        "heinsen_jax/data/packing.py",
        "is_token & (ids[1:] == ids[:-1])",
        "is_token",
        "tests/data/packing_test.py",
    ),
    "data that resume a step early": Fault(
        "heinsen_jax/training/loop.py",
        "start_step=start,\n            process_index",
        "start_step=max(start - 1, 0),\n            process_index",
        "tests/training",
    ),
}


def caught(fault: Fault, *, is_applied: bool = True) -> str | None:
    """Return the first test that fails; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", ".pytest_cache", "__pycache__", "runs")
        shutil.copytree(ROOT, copy, ignore=ignored)
        file = copy / fault.file
        text = file.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(
                f"{fault.file}: {fault.right!r} occurs {text.count(fault.right)} times"
            )
        if is_applied:
            file.write_text(text.replace(fault.right, fault.wrong))
        command = [sys.executable, "-m", "pytest", "-x", "-n", "2", fault.tests]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else None


def main(names: list[str]) -> None:
    for fault in {FAULTS[name].tests: FAULTS[name] for name in names or FAULTS}.values():
        if failed := caught(fault, is_applied=False):
            raise SystemExit(f"{failed} fails without a fault")
    missed = []
    for name in names or FAULTS:
        start = time.monotonic()
        found = caught(FAULTS[name])
        print(f"{name}: {found or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)", flush=True)
        missed += [] if found else [name]
    if missed:
        raise SystemExit(f"{len(missed)} of {len(names or FAULTS)} faults are not caught: {missed}")


if __name__ == "__main__":
    main(sys.argv[1:])
