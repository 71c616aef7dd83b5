"""The StableHLO of log-attention stays small: every user compiles it at every new shape."""

import sys

import pytest

from tests.conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from compile_cases import CASES, lower

MOST_BYTES = {
    "heinsen_attention": 115_000,
    "heinsen_attention, decay": 150_000,
    "heinsen_attention, segments": 155_000,
    "log_attention": 160_000,
    "log_attention, decay by head": 195_000,
    "log_attention, decay by feature": 215_000,
    "log_attention, segments": 200_000,
    "log_attention, scan": 115_000,
}


@pytest.mark.parametrize("name", MOST_BYTES)
def test_programs_stay_small(name):
    assert len(lower(CASES[name]).as_text()) <= MOST_BYTES[name]
