"""The faults of `mutations.py` match the code; the program itself needs half an hour."""

import pytest

from tests.mutations import FAULTS, ROOT


@pytest.mark.parametrize("name", FAULTS)
def test_faults_match_the_code_once(name):
    fault = FAULTS[name]
    assert (ROOT / fault.file).read_text().count(fault.right) == 1
    assert (ROOT / fault.tests).exists()
