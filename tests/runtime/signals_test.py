"""Signals: a stopped run has limited time to save."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from heinsen_jax.runtime.signals import TOO_LATE, Signals

HANGS = """
import os, signal, sys, time
from heinsen_jax.runtime.signals import Signals

with Signals(deadline=float(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(sys.argv[2]))
time.sleep(0.5)
"""


def run(deadline: float, busy: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", HANGS, str(deadline), str(busy)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_that_hangs_is_ended_with_an_error():
    ended = run(0.3, 60)
    assert ended.returncode == TOO_LATE
    assert (
        "stopped by SIGTERM, and the update under way could not be saved in the 0.3 s"
        in ended.stderr
    )


def test_a_process_in_time_is_not_ended():
    assert run(0.4, 0.1).returncode == 0


@pytest.fixture
def _obeys_interrupts() -> Iterator[None]:
    """Reset SIGINT, which shells ignore in background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_obeys_interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_recorded_and_repetitions_do_not_count(number):
    before = signal.getsignal(number)
    with Signals(deadline=60) as signals:
        assert signals.first == 0
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert signals.first == number
        signal.raise_signal(signal.SIGINT)  # as a wrapper forwards it
        assert signals.first == number
    assert signal.getsignal(number) is before
