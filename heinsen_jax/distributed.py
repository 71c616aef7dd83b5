"""Several processes as one run: how they find one another, take turns, and agree."""

import contextlib
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = 100,
) -> None:
    """Connects the processes of a run. To be called before anything else of JAX.

    Without arguments JAX looks for a cluster that it knows (Slurm, Open MPI, Cloud TPU, GKE); where
    there is none, this process is the whole run. Under Slurm and Open MPI a process has one device,
    that of its number on the host; else all of the host's.

    Args:
      coordinator: address of process 0, as host:port, with a port that is free there.
      num_processes: how many processes there are.
      process_id: which of them this is, from 0.
      heartbeat_timeout: seconds without a sign of life after which a process counts as dead, and
        the others end.

    Raises:
      UserError: some of these are missing, or do not fit one another.
    """
    given = coordinator, num_processes, process_id
    if None in given and any(x is not None for x in given):
        raise UserError(
            "--coordinator, --num-processes and --process-id go together: give all three, or none "
            "on a cluster that JAX knows"
        )
    if coordinator is not None and ":" not in coordinator:
        raise UserError(f"--coordinator {coordinator} must be host:port")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise UserError(
            f"--process-id {process_id} must be in 0 .. {num_processes - 1}, the number of "
            "processes less one"
        )
    try:
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=heartbeat_timeout)
    except ValueError:
        if coordinator is not None or "JAX_COORDINATOR_ADDRESS" in os.environ:
            raise


@contextlib.contextmanager
def process_0_first(what: str) -> Iterator[bool]:
    """Process 0 goes through a block while the others wait, then they. Gives whether this is 0.

    Should the block fail in process 0, the others are told of it by its end.
    """
    is_first = jax.process_index() == 0
    if not is_first:
        barrier(what)
    yield is_first
    if is_first:
        barrier(what)


def barrier(what: str) -> None:
    """Waits until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


class Agreement:
    """The largest of what the processes say, which all hear the next time they ask.

    Nobody waits: an answer is a reduction on the devices, run between the steps of training.
    """

    def __init__(self, mesh: Mesh):
        self._parts = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        whole = NamedSharding(mesh, PartitionSpec())
        self._largest = jax.jit(jnp.max, out_shardings=whole)
        self._asked: Array | None = None

    def __call__(self, value: int) -> int:
        """Says a value >= 0, and hears the largest of those said the time before; 0 at first. A
        process that is alone hears its own at once."""
        if jax.process_count() == 1:
            return value
        shape = (self._parts.mesh.size,)
        said = jax.make_array_from_callback(
            shape, self._parts, lambda _: np.array([value], np.int32)
        )
        before, self._asked = self._asked, self._largest(said)
        return 0 if before is None else int(before)
