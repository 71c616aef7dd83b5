"""The catalogue of faults matches the code; `mutations.py` itself needs minutes."""

import ast
from pathlib import Path

from tests.fault_catalogue import FAULTS
from tests.mutations import ROOT, stale


def test_each_fault_occurs_once_in_its_file():
    assert stale() == []


def test_each_fault_is_a_change_to_valid_python():
    for name, fault in FAULTS.items():
        right = (ROOT / fault.file).read_text()
        wrong = right.replace(fault.right, fault.wrong)
        assert wrong != right, name
        compile(wrong, name, "exec")


def has_function(path: Path) -> bool:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return any(isinstance(node, kinds) for node in ast.walk(ast.parse(path.read_text())))


def test_every_module_with_a_function_has_a_fault():
    needing_a_gpu = ROOT / "heinsen_jax/ops/log_attention/mosaic"
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "heinsen_jax").rglob("*.py")
        if path.parent != needing_a_gpu and has_function(path)
    }
    assert modules <= {fault.file for fault in FAULTS.values()}
