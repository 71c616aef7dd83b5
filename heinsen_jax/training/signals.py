"""SIGTERM, SIGHUP and Ctrl-C: a run ends at once, or has a while to save its state.

Python calls the handler of a signal in the main thread, when that is back in Python: not while XLA
compiles, nor in a collective operation whose peers are gone. So a second thread, woken by the
signal itself (`signal.set_wakeup_fd`), keeps the time.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

TOO_LATE = 124
"""The exit code of a run that could not save in time."""


@contextlib.contextmanager
def exit_at_once() -> Iterator[None]:
    """A context in which a signal ends the process at once, with 128 plus the signal's number: for
    the time before the first update, and after the last, without anything to save. Nothing is
    unwound, for an exception that a handler raises in a callback of another library is lost."""

    def end(number: int) -> None:
        name = signal.Signals(number).name
        _end(f"\nstopped by {name}: there was nothing to save", 128 + number)

    with _caught(lambda number: None, end):
        yield


def unwind_on_signals() -> contextlib.AbstractContextManager[None]:
    """A context in which a signal raises `SystemExit` of 128 plus its number."""
    return _caught(_unwind, lambda number: None)


def _unwind(number: int) -> None:
    raise SystemExit(128 + number)


class Signals:
    """A context in which SIGTERM, SIGHUP and SIGINT are collected instead of obeyed.

    A second SIGINT interrupts at once. A process that is still in this context `deadline` seconds
    after the first signal ends there and then, with the exit code `TOO_LATE`.
    """

    def __init__(self, deadline: float):
        self._deadline = deadline
        self._timer: threading.Timer | None = None
        self._is_interrupted = False
        self._caught = contextlib.ExitStack()
        self.first = 0
        """The number of the signal that came first; 0 while none has."""

    def __enter__(self) -> "Signals":
        self._caught.enter_context(_caught(self._interrupt, self._start_timer))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._caught.close()
        if self._timer is not None:
            self._timer.cancel()

    def _interrupt(self, number: int) -> None:
        self.first = self.first or number
        if number == signal.SIGINT and self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True

    def _start_timer(self, number: int) -> None:
        if self._timer is None:
            self.first = self.first or number
            self._timer = threading.Timer(self._deadline, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self) -> None:
        _end(
            f"error: stopped by {signal.Signals(self.first).name}, and nothing could be saved in "
            f"the {self._deadline:g} s of training.shutdown_timeout: the last saved step stands. "
            "Give more time, or checkpoint_every fewer steps",
            TOO_LATE,
        )


@contextlib.contextmanager
def _caught(
    in_main_thread: Callable[[int], None], at_once: Callable[[int], None]
) -> Iterator[None]:
    """A context in which a signal calls `at_once(number)` in a thread of its own, right away, and
    `in_main_thread(number)` as soon as Python can. SIGHUP and SIGINT that are ignored (by nohup,
    by a shell's `&`) stay so. Outside the main thread, where Python has no handlers,
    none is caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", None)  # there is none on Windows
    numbers = {signal.SIGTERM}
    for number in (signal.SIGINT, hangup):
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            numbers.add(number)
    terminals = [number for number in (1, 2) if os.isatty(number)]
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        with reader:
            while number := reader.recv(1):
                if number[0] == hangup:
                    _disconnect(terminals)
                if number[0] in numbers:
                    at_once(number[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    previous: dict[int, Any] = {}
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        for number in numbers:
            previous[number] = signal.signal(number, lambda n, _: in_main_thread(n))
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        writer.close()
        thread.join()  # what it was told already is done within this context


def _disconnect(terminals: list[int]) -> None:
    """Sends what would be written to a terminal that was closed, which is an error, nowhere."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in terminals:
            if not os.isatty(number):  # any more
                os.dup2(nowhere, number)
        os.close(nowhere)


def _end(text: str, code: int) -> None:
    """Ends the process with a last line, whatever state its streams are in."""
    try:
        os.write(2, f"{text}\n".encode())
    finally:
        os._exit(code)
