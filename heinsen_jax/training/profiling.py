"""Traces of a few steps, and the rate of steps."""

import time
from pathlib import Path

import jax


class Tracer:
    """Profiler trace of a few steps after the first ones."""

    STEPS = range(5, 10)

    def __init__(self, workdir: Path, start: int, is_wanted: bool):
        self._folder, self._start = workdir / "profile", start
        self._is_wanted, self._is_on = is_wanted, False

    def __call__(self, step: int, last: bool = False) -> None:
        """Call before each step, and after the last one."""
        is_on = self._is_wanted and step - self._start in self.STEPS and not last
        if is_on and not self._is_on:
            jax.profiler.start_trace(self._folder)
        if self._is_on and not is_on:
            jax.profiler.stop_trace()
        self._is_on = is_on


class Clock:
    """Steps per second since the previous call."""

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        self._step, self._time = step, time.monotonic()

    def steps_per_second(self, step: int) -> float:
        now = time.monotonic()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return rate
