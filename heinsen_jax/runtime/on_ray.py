"""Calls of a function as tasks of a Ray cluster. Needs the extra `ray`."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from heinsen_jax.errors import MissingExtra, UserError, extra_module, installation

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
RETRIES = 3  # repetitions of a call whose node is lost


def calls(
    function: Callable[..., Result],
    arguments: Mapping[Key, tuple],
    **needs: float,
) -> Iterator[tuple[Key, Result]]:
    """Yield each key with `function(*arguments[key])` as calls finish; raise their first error.

    `ray.init` finds the cluster by RAY_ADDRESS or `ray job submit`, or starts one on this machine.

    Args:
      function: the function, called on any node in any order.
      arguments: arguments of each call.
      needs: options of `ray.remote`, such as num_cpus and num_gpus per call.

    Raises:
      UserError: Ray is not installed.
    """
    try:
        ray = extra_module("ray")  # here, since Ray is slow to import, and optional
    except MissingExtra:
        raise UserError(f"executor ray: Ray is not installed; {installation('ray')}") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    task = ray.remote(max_retries=RETRIES, **needs)(function)
    waiting = {task.remote(*given): key for key, given in arguments.items()}
    try:
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    finally:
        for left in waiting:
            ray.cancel(left)
