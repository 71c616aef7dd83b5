"""Calls on a simulated Ray cluster; tests/data/ray_test.py and tests/studies/ray_test.py have real
ones."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from heinsen_jax.runtime.on_ray import RETRIES, calls


class TaskError(Exception):
    """Stands for the exception of a call that failed on another node."""

    def __init__(self, cause: Exception):
        super().__init__()
        self.cause = cause


class Cluster:
    """A cluster whose calls finish in reverse order."""

    exceptions = SimpleNamespace(RayTaskError=TaskError)

    def __init__(self):
        self.options, self.canceled = {}, []

    def is_initialized(self) -> bool:
        return True

    def remote(self, **options: Any):
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *given: (function, *given))

    def wait(self, tasks, num_returns: int):
        assert num_returns == 1
        return tasks[-1:], tasks[:-1]

    def get(self, task):
        function, *given = task
        try:
            return function(*given)
        except Exception as error:
            raise TaskError(error) from error

    def cancel(self, task) -> None:
        self.canceled.append(task[1:])


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    found = Cluster()
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


def test_results_have_the_keys_of_their_calls(cluster):
    found = calls(divmod, {"a": (7, 2), "b": (9, 4)}, num_cpus=2)
    assert [*found] == [("b", (2, 1)), ("a", (3, 1))]
    assert cluster.options == {"max_retries": RETRIES, "num_cpus": 2}
    assert not cluster.canceled


def test_the_first_error_ends_the_other_calls(cluster):
    arguments = {"a": (1, 1), "b": (2, 2), "c": (3, 0), "d": (4, 2)}
    found = calls(divmod, arguments)
    assert next(found) == ("d", (2, 0))
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert cluster.canceled == [(1, 1), (2, 2)]
