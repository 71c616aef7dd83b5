"""The catalogue of faults matches the code; `mutations.py` itself needs minutes."""

import pytest

from tests.fault_catalogue import FAULTS
from tests.mutations import ROOT, stale


def test_each_fault_occurs_once_in_its_file():
    assert stale() == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_valid_python(name):
    fault = FAULTS[name]
    right = (ROOT / fault.file).read_text()
    wrong = right.replace(fault.right, fault.wrong)
    assert wrong != right
    compile(wrong, fault.file, "exec")


def test_every_part_of_the_package_has_faults():
    parts = {path.parent for path in (ROOT / "heinsen_jax").rglob("*.py")}
    needing_a_gpu = ROOT / "heinsen_jax/ops/log_attention/mosaic"
    assert {(ROOT / fault.file).parent for fault in FAULTS.values()} >= parts - {needing_a_gpu}
