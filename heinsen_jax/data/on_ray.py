"""Units of a data set, done on a Ray cluster: the same function of each, anywhere, in any order.

Needs the extra `ray`. `ray.init` finds the cluster as ever: by RAY_ADDRESS, by `ray job submit`, or
it starts one on this machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayTaskError

from heinsen_jax.data.units import Unit, process_unit, read_record
from heinsen_jax.errors import UserError


def process_units(units: Sequence[Unit], output: Path, advance: Callable[[int], None]) -> None:
    """As `process_unit` of each.

    Args:
      units: what is to be done.
      output: the folder of the data set, which all nodes see under this name.
      advance: called with a number of bytes that are done.

    Raises:
      UserError: a unit cannot be done, or was done where its results are not seen.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    output = output.resolve()
    task = ray.remote(num_cpus=1, max_retries=3)(process_unit)
    waiting = {task.remote(_anywhere(unit), output): unit for unit in units}
    try:
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            unit = waiting.pop(done)
            ray.get(done)
            if read_record(unit, output) is None:
                raise UserError(
                    f"{output} is not one folder for all nodes: {unit.record_file} was written on "
                    "another machine; choose an output on a shared file system"
                )
            advance(unit.size)
    except RayTaskError as error:
        raise error.cause from error
    finally:
        for left in waiting:
            ray.cancel(left)


def _anywhere(unit: Unit) -> Unit:
    """The unit, with paths that do not depend on the folder a process runs in."""
    sources = (replace(source, path=source.path.resolve()) for source in unit.sources)
    return replace(unit, sources=tuple(sources))
