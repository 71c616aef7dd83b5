"""Timeouts of data: slow sources are reported, dead ones end the run, errors are raised."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.runtime.timeouts import with_timeout

SOURCE = Path("data/some-corpus")


def batches(*seconds: float):
    for index, wait in enumerate(seconds):
        time.sleep(wait)
        yield np.full(3, index)


def test_batches_are_the_same():
    said = []
    taken = list(with_timeout(batches(0, 0, 0), SOURCE, timeout=100, warn=said.append))
    np.testing.assert_array_equal(taken, [[0] * 3, [1] * 3, [2] * 3])
    assert not said


def test_a_slow_source_is_named():
    said = []
    taken = list(with_timeout(batches(0, 0.5, 0), SOURCE, timeout=2, warn=said.append))
    assert len(taken) == 3
    assert said == ["warning: no batch came from data/some-corpus in 0.2 s: still waiting"]


def test_a_dead_source_ends_the_run():
    waiting = with_timeout(batches(0, 3600), SOURCE, timeout=0.3, warn=lambda line: None)
    with pytest.raises(UserError, match=r"no batch arrived from data/some-corpus in 0\.3 s; check"):
        list(waiting)


def test_an_error_is_passed_on():
    def broken():
        yield np.zeros(3)
        raise UserError("train-00000.bin is damaged")

    taken = with_timeout(broken(), SOURCE, timeout=10, warn=print)
    next(taken)
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged"):
        next(taken)


def test_one_batch_is_read_ahead():
    counted = itertools.count()
    taken = with_timeout((np.full(1, i) for i in counted), SOURCE, timeout=10, warn=print)
    next(taken)
    next(taken)
    time.sleep(0.1)  # time to read too many
    assert next(counted) == 3


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.mark.parametrize("end", ["close", "error", "exhaustion"])
def test_one_thread_reads_all_batches_and_ends_with_the_iterator(end):
    for thread in readers():  # of other tests; a dead source blocks its reader
        thread.name = "earlier"
    read_by = set()

    def source():
        for index in range(100):
            read_by.add(threading.get_ident())
            yield np.full(1, index)
        if end == "error":
            raise UserError("train-00000.bin is damaged")

    taken = with_timeout(source(), SOURCE, timeout=10, warn=print)
    for _ in range(100):
        next(taken)
    (reader,) = readers()
    assert read_by == {reader.ident}
    if end == "close":
        taken.close()
    else:
        with pytest.raises(UserError if end == "error" else StopIteration):
            next(taken)
    reader.join(10)
    assert not reader.is_alive()
