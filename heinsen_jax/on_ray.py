"""The same function many times, on a Ray cluster. Needs the extra `ray`."""

import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from heinsen_jax.errors import UserError

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
RETRIES = 3  # of a call whose node is lost


def calls(
    function: Callable[..., Result],
    arguments: Mapping[Key, tuple],
    **needs: float,
) -> Iterator[tuple[Key, Result]]:
    """Each key with `function(*arguments[key])`, as they end; when one raises, so does this.

    `ray.init` finds the cluster as ever: by RAY_ADDRESS, by `ray job submit`, or it starts one on
    this machine.

    Args:
      function: what is called, on any node and in any order.
      arguments: of each call.
      needs: `ray.remote`'s, such as the num_cpus and num_gpus of a call.

    Raises:
      UserError: Ray is not installed.
    """
    try:
        ray = importlib.import_module("ray")  # here, for nothing else is to wait for it
    except ModuleNotFoundError:
        raise UserError(
            "executor ray: Ray is not installed; in a clone of this package, "
            "pip install -e '.[ray]'"
        ) from None
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
