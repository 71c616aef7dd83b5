"""Memory that an update needs, compared with the memory that devices and this host have."""

import ctypes
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from heinsen_jax.errors import UserError
from heinsen_jax.runtime.distributed import gather
from heinsen_jax.typing import PyTree

UNLIMITED = 1 << 60
"""A cgroup limit at or above this counts as no limit."""
PEAK_MARGIN = 1.15
"""Measured peaks of processes are at most this many times the estimate."""


class Memory(NamedTuple):
    """Bytes of an update on one device.

    Attributes:
      arguments: the state, the parameters of a teacher, and a batch.
      workspace: activations, gradients, and outputs that do not replace arguments.
    """

    arguments: int
    workspace: int

    @property
    def total(self) -> int:
        return self.arguments + self.workspace

    def __str__(self) -> str:
        parts = f"{bytes_text(self.arguments)} state, {bytes_text(self.workspace)} workspace"
        return f"{bytes_text(self.total)} ({parts})"


class Setting(NamedTuple):
    """Settings on which the memory of an update depends, besides the model.

    Attributes:
      batch_size: sequences per update.
      accumulation_steps: microbatches per update.
      parts: devices that share the sequences of a microbatch.
      remat: whether activations are recomputed.
    """

    batch_size: int
    accumulation_steps: int
    parts: int
    remat: bool

    @property
    def rows(self) -> int:
        """Sequences of a microbatch on one device."""
        return self.batch_size // (self.accumulation_steps * self.parts)


def memory_of(compiled: jax.stages.Compiled) -> Memory | None:
    """Memory of a compiled update; None if the compiler does not report it."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    outputs = max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)
    return Memory(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes + outputs)


class Limits:
    """The memory that a run may allocate, before it has allocated its state.

    On CPUs the devices share the memory of the host. A checkpoint is copied there while training
    continues, and initial weights are read there.

    Args:
      state: shapes, dtypes and shardings of the state.
    """

    def __init__(self, state: PyTree) -> None:
        self._on_cpu = jax.local_devices()[0].platform == "cpu"
        self._copies = sum(map(_local_bytes, jax.tree.leaves(state)))
        return_freed_memory()
        self.used = resident_memory()
        self.host = _smallest(available_host_memory())
        self.device = None if self._on_cpu else _smallest(available_device_memory())

    def host_bytes(self, memory: Memory) -> int:
        """Bytes of this host that the run will allocate, at least."""
        return self._copies + (len(jax.local_devices()) * memory.total if self._on_cpu else 0)

    def peak_bytes(self, memory: Memory) -> int:
        """Bytes of this host at the peak, which is an estimate.

        On CPUs the workspace counts twice. While a checkpoint is written, the state is in newly
        allocated memory, some of it in the freed workspace, and the next workspace needs further
        memory.
        """
        again = len(jax.local_devices()) * memory.workspace if self._on_cpu else 0
        return self.host_bytes(memory) + again

    def allow(self, memory: Memory) -> bool:
        """Whether an update may fit."""
        return self._has(self.host_bytes(memory), memory)

    def allow_peak(self, memory: Memory) -> bool:
        """Whether the estimated peak fits as well, with a margin for its error."""
        return self._has(PEAK_MARGIN * self.peak_bytes(memory), memory)

    def _has(self, host_bytes: float, memory: Memory) -> bool:
        is_low = self.host is not None and host_bytes > self.host
        return not is_low and (self.device is None or memory.total <= self.device)

    def describe(self, memory: Memory) -> str:
        """Describe the peak and the available memory of this host; a warning if it may not
        suffice."""
        peak = self.peak_bytes(memory)
        text = f"about {bytes_text(self.used + peak)} of this host's memory at the peak"
        if self.host is None:
            return f"{text}, {bytes_text(self.used)} now"
        text = f"{text}, {bytes_text(self.used)} now, {bytes_text(self.host)} available"
        may_fail = "; it may not suffice: use more training.accumulation_steps or model.remat"
        return f"warning: {text}{may_fail}" if peak > self.host else text

    def shortage(self, memory: Memory) -> str:
        if self.device is not None and memory.total > self.device:
            need, have, owner = memory.total, self.device, "each device"
        else:
            need, have, owner = self.host_bytes(memory), self.host or 0, "this host"
        return (
            f"training needs another {bytes_text(need)} of the memory of {owner}, which has "
            f"{bytes_text(have)} available"
        )


def settings_that_fit(
    allow: Callable[[Memory], bool],
    memory: Memory,
    setting: Setting,
    measure: Callable[[int, bool], Memory | None],
) -> list[Setting]:
    """Settings with which an update should fit into the memory: the given one alone, if it fits;
    else the same batch in more microbatches, as it is and with rematerialization.

    Args:
      allow: whether the available memory is enough.
      memory: the memory of the update.
      setting: its batch size, accumulation and rematerialization.
      measure: the memory of an update with other `accumulation_steps` and `remat`.
    """
    if allow(memory):
        return [setting]
    most, choices = setting.batch_size // setting.parts, []
    for remat in dict.fromkeys((setting.remat, True)):
        smallest = memory if (remat, setting.rows) == (setting.remat, 1) else measure(most, remat)
        if smallest is None or not allow(smallest):
            continue
        slope = smallest.workspace  # an upper bound, since a part of it does not grow with rows
        if remat == setting.remat and setting.rows > 1:
            slope = (memory.workspace - smallest.workspace) / (setting.rows - 1)
        fitting = (
            rows
            for rows in range(most, 0, -1)
            if most % rows == 0 and allow(_with_rows(smallest, slope, rows))
        )
        steps = most // next(fitting, 1)
        choices.append(setting._replace(accumulation_steps=steps, remat=remat))
    return choices


def check_memory(
    limits: Limits,
    memory: Memory,
    setting: Setting,
    measure: Callable[[int, bool], Memory | None],
    *,
    may_change: bool = False,
) -> Setting:
    """Check that an update fits into the memory, before it is allocated.

    Args:
      limits: the memory that is available.
      memory, setting, measure: as for `settings_that_fit`.
      may_change: whether another setting of the same batch may be chosen, so that the estimated
        peak fits, too, if possible.

    Returns:
      The setting, or the chosen one.

    Raises:
      UserError: it does not fit; the message names settings that should.
    """
    choices = settings_that_fit(limits.allow, memory, setting, measure)
    if choices and may_change:
        choices = settings_that_fit(limits.allow_peak, memory, setting, measure) or choices
    if choices == [setting] or (choices and may_change):
        return choices[0]
    remedies = []
    for choice in choices:
        also = "" if choice.remat == setting.remat else "model.remat=True and "
        small = f"data.batch_size={choice.rows * choice.parts} with training.accumulation_steps=1"
        steps = f"training.accumulation_steps={choice.accumulation_steps}"
        remedies.append(f"{also}{steps}, or {also}{small}")
    remedy = (
        f"set {'; or '.join(remedies)}"
        if remedies
        else "one sequence at a time with model.remat=True does not fit either: set a smaller "
        "data.sequence_length, or use a smaller model, or more memory"
    )
    raise UserError(
        f"data.batch_size={setting.batch_size} with "
        f"training.accumulation_steps={setting.accumulation_steps}: {limits.shortage(memory)}; "
        f"{remedy}"
    )


def _with_rows(smallest: Memory, slope: float, rows: int) -> Memory:
    return smallest._replace(workspace=math.ceil(smallest.workspace + slope * (rows - 1)))


def available_host_memory() -> int | None:
    """Bytes that this host, and the control groups of this process, can still give; None if the
    system does not report it."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    fields = dict(line.split(":") for line in text.splitlines())
    available = [1024 * int(fields["MemAvailable"].split()[0])] if "MemAvailable" in fields else []
    return min([*available, *cgroup_memory()], default=None)


def cgroup_memory(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Bytes below the limit of each control group of this process, version 2 or 1; its page cache
    counts as free."""
    if not groups.exists():
        return []
    available = []
    for line in groups.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root if not controllers else root / "memory"
        files = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        own = base / name.lstrip("/")
        for folder in {base, own, *(x for x in own.parents if x.is_relative_to(base))}:
            try:
                limit, used = (int((folder / file).read_text()) for file in files[:2])
                rows = (x.split() for x in (folder / "memory.stat").read_text().splitlines())
                cached = {key: int(value) for key, value in rows}.get(files[2], 0)
            except (OSError, ValueError):  # no such group, or "max"
                continue
            if limit < UNLIMITED:
                available.append(max(limit - used + cached, 0))
    return available


def available_device_memory() -> int | None:
    """Bytes that each local device can still allocate; None if one does not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not all(x and "bytes_limit" in x for x in stats):
        return None
    return min(x["bytes_limit"] - x.get("bytes_in_use", 0) for x in stats)


def resident_memory() -> int:
    """Resident bytes of this process; 0 if the system does not report them."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 0


def return_freed_memory() -> None:
    """Return freed memory of this process to the system, for example after an earlier run. Only
    the GNU C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _smallest(available: int | None) -> int | None:
    """The smallest number of all processes, so that they decide alike."""
    numbers = [int(x) for x in gather("" if available is None else str(available)) if x]
    return min(numbers, default=None)


def _local_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of the parts of an array on this host, each once."""
    if x.sharding is None:
        return math.prod(x.shape) * x.dtype.itemsize
    places = x.sharding.addressable_devices_indices_map(x.shape).values()
    count = len({str(place) for place in places})
    return count * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
