"""The StableHLO of log-attention stays small: every user compiles it at every new shape."""

import sys

import pytest

from tests.conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from compile_cases import CASES, lower

LIMITED = {name: case for name, case in CASES.items() if case.max_bytes is not None}


@pytest.mark.parametrize("name", LIMITED)
def test_programs_stay_small(name):
    assert len(lower(CASES[name]).as_text()) <= LIMITED[name].max_bytes
