"""Calls in another thread: their order, their results and their errors."""

import threading

import pytest

from heinsen_jax.runtime.worker import Worker


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_are_made_in_order_in_one_thread_and_errors_are_raised_by_their_results():
    worker, threads = Worker("calls"), []

    def fail(error):
        raise error

    worker.submit(lambda: threads.append(threading.current_thread()))
    failed = worker.submit(fail, SystemExit(3))
    last = worker.submit(lambda: [*threads, threading.current_thread()])
    worker.end()
    with pytest.raises(SystemExit):
        failed.result(10)
    first, same = last.result(10)
    assert first is same
    assert first.daemon
    assert worker.join(10)


def test_an_end_waits_for_earlier_calls():
    released, worker = threading.Event(), Worker("calls")
    call = worker.submit(released.wait)
    worker.end()
    assert not worker.join(0.05)
    released.set()
    assert worker.join(10)
    assert call.result(0)
