"""Runs of a study on a Ray cluster. Needs the extra `ray`; `ray.init` finds the cluster as ever."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayTaskError

from heinsen_jax.config import as_json
from heinsen_jax.study.grid import Run
from heinsen_jax.study.runs import Row, perform


def in_tasks(
    runs: Sequence[Run], folder: Callable[[Run], Path], *, cpus: float, gpus: float
) -> Iterator[tuple[Run, Row]]:
    """Each run with its row, as they end. All nodes see the folders under their names.

    Args:
      runs: what is to be done.
      folder: that of a run.
      cpus, gpus: of one run.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3, max_calls=1)(perform)
    waiting = {task.remote(as_json(run.config), folder(run).resolve()): run for run in runs}
    try:
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    except RayTaskError as error:
        raise error.cause from error
    finally:
        for left in waiting:
            ray.cancel(left)
