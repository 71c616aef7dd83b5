"""Several processes as one run: connecting, synchronizing and agreeing."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from heinsen_jax.errors import UserError, failure
from heinsen_jax.storage.buckets import AnyPath
from heinsen_jax.typing import Array


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = 100,
) -> None:
    """Connect the processes of a run. Call it before any other function of JAX.

    Without arguments JAX detects the cluster (Slurm, Open MPI, Cloud TPU, GKE); without a cluster,
    this process is the complete run. Under Slurm and Open MPI each process has one device, by its
    index on the host; otherwise all devices of the host.

    Args:
      coordinator: host:port of process 0, with a free port.
      num_processes: number of processes.
      process_id: index of this process, from 0.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as dead and the
        others exit.

    Raises:
      UserError: some of the arguments are missing or inconsistent.
    """
    given = coordinator, num_processes, process_id
    if None in given and any(x is not None for x in given):
        raise UserError(
            "--coordinator, --num-processes and --process-id go together; give all three, or none "
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
def together() -> Iterator[None]:
    """Context manager for a block that all processes run: if it fails in one, it fails in all.

    Raises:
      UserError: the block failed in another process; the message has its index and its error.
    """
    try:
        yield
    except SystemExit as ended:
        gather(f"exit code {ended.code}; see what it printed")
        raise
    except BaseException as error:  # after Ctrl-C the others may never answer
        if isinstance(error, Exception) or failure(error) is not None:
            gather(str(error) if isinstance(error, UserError) else repr(error))
        raise
    _raise_first(gather(""))


@contextlib.contextmanager
def process_0_first() -> Iterator[bool]:
    """Context manager for a block that process 0 runs before the others; yields whether this is
    process 0.

    Raises:
      UserError: as `together`; where process 0 fails, the others do not run the block.
    """
    is_first = jax.process_index() == 0
    if not is_first:
        _raise_first(gather(""))
    with together():
        yield is_first
    if is_first:
        _raise_first(gather(""))


def check_alike(values: Mapping[str, object]) -> None:
    """Compare named values, such as settings, between all processes.

    Raises:
      UserError: a process differs from process 0; the message names the values.
    """
    gathered = [json.loads(text) for text in gather(json.dumps(values, default=str))]
    ours = gathered[0]
    for number, theirs in enumerate(gathered):
        differing = [
            f"{name} ({theirs.get(name)!r}, not {ours.get(name)!r})"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if differing:
            raise UserError(
                f"process {number} differs from process 0 in {', '.join(differing)}; give all "
                "processes the same command, data and versions"
            )


def check_shared(folder: AnyPath) -> None:
    """Check that all processes share the folder of this name.

    Raises:
      UserError: they do not share it, or it cannot be written.
    """
    if jax.process_count() == 1:
        return
    path = folder / f".shared-{gather(uuid.uuid4().hex)[0]}"
    with together():
        if jax.process_index() == 0:
            path.write_text("")
    missing = [i for i, exists in enumerate(gather(str(path.exists()))) if exists != "True"]
    if jax.process_index() == 0:
        path.unlink()
    if missing:
        raise UserError(
            f"--workdir {folder} is not shared by all processes: process {missing[0]} cannot read "
            "what process 0 writes there; choose a folder on a file system that all hosts share"
        )


def gather(text: str) -> list[str]:
    """Strings of all processes, by their indices. A collective: all processes must call it."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([content.size], np.int32)))
    padded = np.pad(content, (0, int(sizes.max()) + 1 - content.size))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [
        bytes(row[:size]).decode() for row, size in zip(rows, sizes.ravel().tolist(), strict=True)
    ]


def _raise_first(failures: Sequence[str]) -> None:
    for number, reason in enumerate(failures):
        if reason:
            raise UserError(f"process {number} ended with: {reason}")


class DelayedMax:
    """Maximum over the processes of a value, delayed by one call so that no process waits: it is a
    reduction on the devices between the steps of training.
    """

    def __init__(self, mesh: Mesh):
        self._parts = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        whole = NamedSharding(mesh, PartitionSpec())
        self._largest = jax.jit(jnp.max, out_shardings=whole)
        self._previous: Array | None = None

    def __call__(self, value: int) -> int:
        """Submit a value >= 0; return the maximum of the previous call, 0 at first. A single
        process gets its own value immediately."""
        if jax.process_count() == 1:
            return value
        shape = (self._parts.mesh.size,)
        values = jax.make_array_from_callback(
            shape, self._parts, lambda _: np.array([value], np.int32)
        )
        before, self._previous = self._previous, self._largest(values)
        return 0 if before is None else int(before)
