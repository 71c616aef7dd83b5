"""The catalogue of faults matches the code; `mutations.py` itself needs minutes."""

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


def test_every_part_of_the_package_has_faults():
    parts = {path.parent for path in (ROOT / "heinsen_jax").rglob("*.py")}
    needing_a_gpu = ROOT / "heinsen_jax/ops/log_attention/mosaic"
    assert {(ROOT / fault.file).parent for fault in FAULTS.values()} >= parts - {needing_a_gpu}
