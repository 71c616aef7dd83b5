"""The faults of `mutations.py` still fit the code; the program itself takes half an hour."""

import pytest

from tests.mutations import FAULTS, ROOT


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_occurs_once(name):
    fault = FAULTS[name]
    assert (ROOT / fault.file).read_text().count(fault.right) == 1
    assert (ROOT / fault.tests).exists()
