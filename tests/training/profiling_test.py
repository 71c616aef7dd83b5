"""Traces of a few steps, and the rate of steps."""

from types import SimpleNamespace

import jax
import pytest

from heinsen_jax.training.profiling import Clock, Tracer


@pytest.mark.parametrize(
    ("is_wanted", "last", "expected"),
    [
        (True, 20, ["5", "start", "10", "stop"]),
        (True, 7, ["5", "start", "7", "stop"]),
        (True, 3, []),
        (False, 20, []),
    ],
)
def test_a_trace_is_of_a_few_steps_after_the_first_ones(
    tmp_path, monkeypatch, is_wanted, last, expected
):
    """The run resumes after step 100, and ends `last` steps later."""
    events, steps = [], []

    def append(event: str) -> None:
        events.extend([str(steps[-1] - 100), event])

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: append("stop"))
    tracer = Tracer(tmp_path, 100, is_wanted)
    for step in range(101, 101 + last):
        steps.append(step)
        tracer(step)
    tracer(100 + last, last=True)
    assert events == expected


def test_a_rate_is_of_the_steps_since_the_last_one(monkeypatch):
    time = SimpleNamespace(now=0.0)
    time.monotonic = lambda: time.now
    monkeypatch.setattr("heinsen_jax.training.profiling.time", time)
    clock = Clock(10)
    time.now = 2.0
    assert clock.steps_per_second(20) == 5
    time.now = 3.0
    assert clock.steps_per_second(22) == 2
    time.now = 8.0
    clock.restart(22)  # after an evaluation
    time.now = 9.0
    assert clock.steps_per_second(25) == 3
