"""SIGTERM, SIGHUP and Ctrl-C: a run exits immediately, or has time to save its state.

Python runs signal handlers in the main thread, and not while XLA compiles or a collective waits for
peers that have exited. So a second thread, woken by the signal (`signal.set_wakeup_fd`), measures
the time.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TOO_LATE = 124
"""Exit code of a run that did not save in time."""


@contextlib.contextmanager
def exit_immediately() -> Iterator[None]:
    """Context manager in which a signal exits the process immediately, with code 128 plus its
    number: before the first and after the last update, nothing has to be saved. The stack is not
    unwound, since an exception raised in a callback of another library would be lost."""

    def end(number: int) -> None:
        name = signal.Signals(number).name
        _end(f"\nstopped by {name}: nothing to save", 128 + number)

    with _caught(lambda number: None, end):
        yield


def unwind_on_signals() -> contextlib.AbstractContextManager[None]:
    """Context manager in which a signal raises `SystemExit` with 128 plus its number."""
    return _caught(_unwind, lambda number: None)


def _unwind(number: int) -> None:
    raise SystemExit(128 + number)


class Signals:
    """Context manager that records SIGTERM, SIGHUP and SIGINT instead of obeying them, and says so
    immediately, except for SIGHUP.

    A further SIGINT or SIGTERM ends the process immediately with 128 plus its number, like
    `exit_immediately`. It does not count within `REPEATED` seconds of the first signal, since a
    wrapper may forward what the terminal has sent already. A process that is still in the context
    `deadline` seconds after the first signal exits with the code `TOO_LATE`.
    """

    REPEATED = 0.5

    def __init__(self, deadline: float):
        self._deadline = deadline
        self._timer: threading.Timer | None = None
        self._received_at = 0.0
        self._caught = contextlib.ExitStack()
        self.first = 0
        """Number of the first signal; 0 before any."""

    def __enter__(self) -> "Signals":
        self._caught.enter_context(_caught(self._record, self._receive))
        return self

    def __exit__(self, *error: object) -> None:
        self._caught.close()
        if self._timer is not None:
            self._timer.cancel()

    def _record(self, number: int) -> None:
        self.first = self.first or number

    def _receive(self, number: int) -> None:
        self._record(number)
        now = time.monotonic()
        if self._timer is None:
            self._received_at = now
            self._timer = threading.Timer(self._deadline, self._give_up)
            self._timer.daemon = True
            self._timer.start()
            if number in (signal.SIGINT, signal.SIGTERM):  # SIGHUP: the terminal is closed
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping after this update; once more to exit now\n")
        elif number in (signal.SIGINT, signal.SIGTERM) and now - self._received_at > self.REPEATED:
            name = signal.Signals(number).name
            _end(f"\nstopped by {name}: the last checkpoint is kept", 128 + number)

    def _give_up(self) -> None:
        _end(
            f"error: stopped by {signal.Signals(self.first).name}, and the update under way could "
            f"not be saved in the {self._deadline:g} s of training.shutdown_timeout: the last "
            "checkpoint is kept. Give more time, or save more often by training.checkpoint_minutes",
            TOO_LATE,
        )


@contextlib.contextmanager
def _caught(
    in_main_thread: Callable[[int], None], in_watcher: Callable[[int], None]
) -> Iterator[None]:
    """Context manager in which a signal calls `in_watcher(number)` immediately, in another thread,
    and `in_main_thread(number)` as soon as Python can. SIGHUP and SIGINT that are ignored (by
    nohup, by a shell's `&`) stay so. Outside the main thread, where Python has no handlers, none is
    caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", None)  # missing on Windows
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
                    in_watcher(number[0])

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
        thread.join()  # signals that it has received are handled within this context


def _disconnect(terminals: list[int]) -> None:
    """Redirect the streams of a closed terminal, whose writes would fail, to /dev/null."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in terminals:
            if not os.isatty(number):  # any more
                os.dup2(nowhere, number)
        os.close(nowhere)


def _end(text: str, code: int) -> None:
    """Exit the process with a last line on stderr, whatever the state of its streams."""
    try:
        os.write(2, f"{text}\n".encode())
    finally:
        os._exit(code)
