"""A thread that makes calls in order."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """A thread that makes calls in order. Unlike a thread of `concurrent.futures`, it does not keep
    the process from exiting while a call blocks."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], partial[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function after all earlier calls."""
        result: Future[T] = Future()
        self._calls.put((result, partial(function, *arguments)))
        return result

    def end(self) -> None:
        """End the thread after all earlier calls."""
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (submitted := self._calls.get()) is not None:
            result, call = submitted
            try:
                result.set_result(call())
            except BaseException as error:  # any error is for the caller
                result.set_exception(error)
            del submitted, result, call  # while it waits, it keeps no result
