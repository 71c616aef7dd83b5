"""SIGTERM and Ctrl-C: a run is asked to stop, and has a while to save what it has."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeAlias

TOO_LATE = 124
"""The exit code of a run that could not save in time."""


Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class Signals:
    """A context in which SIGTERM and SIGINT are collected instead of obeyed.

    A second SIGINT interrupts at once. A process that is still in this context `deadline` seconds
    after the first signal ends there and then, with the exit code `TOO_LATE`.
    """

    def __init__(self, deadline: float):
        self._deadline = deadline
        self._timer: threading.Timer | None = None
        self._previous: dict[signal.Signals, Handler] = {}
        self.first = 0
        """The number of the signal that came first; 0 while none has."""

    def __enter__(self) -> "Signals":
        numbers = signal.SIGTERM, signal.SIGINT
        self._previous = {number: signal.signal(number, self._catch) for number in numbers}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()

    def _catch(self, number: int, _: FrameType | None) -> None:
        if self.first and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.first:
            self.first = number
            self._timer = threading.Timer(self._deadline, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self) -> None:
        print(
            f"error: stopped by {signal.Signals(self.first).name}, and nothing could be saved in "
            f"the {self._deadline:g} s of training.stop_within: the last saved step stands. Give "
            "more time, or checkpoint_every fewer steps",
            file=sys.stderr,
            flush=True,
        )
        os._exit(TOO_LATE)
