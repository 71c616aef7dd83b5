"""Settings of the C library's memory allocator for training on CPUs."""

import ctypes
import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

# Parameters of mallopt, from malloc.h of the GNU C library, and their values.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
SETTINGS = {TRIM_THRESHOLD: 2**31 - 1, MMAP_MAX: 0, ARENA_MAX: 1}


def keep_freed_memory() -> bool:
    """Keep freed memory for the next allocation, instead of returning it to the operating system.

    On CPUs, XLA allocates and frees the temporaries of every computation. By default the GNU C
    library gets large blocks from the kernel and returns them when they are freed, so that the
    kernel clears the same pages in every update. With these settings the process holds the memory
    of its peak until it exits.

    Call it before the first computation, since threads keep the arena of their first allocation.

    Returns:
      Whether the settings are in effect. They are not with another C library, if environment
      variables configure malloc (`MALLOC_...`, `GLIBC_TUNABLES`, `LD_PRELOAD`), or if JAX has a
      plugin for other devices and JAX_PLATFORMS is not "cpu".
    """
    has_plugins = entry_points(group="jax_plugins") or find_spec("libtpu")
    if has_plugins and os.environ.get("JAX_PLATFORMS") != "cpu":
        return False
    chosen = any(x.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for x in os.environ)
    if chosen or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(name, x) == 1 for name, x in SETTINGS.items())
