"""A cache of compiled functions on disk."""

import contextlib
import hashlib
import os
import platform
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from heinsen_jax.errors import extra_module

MAX_BYTES = 2 << 30
LOCK_FILE = ".lockfile"  # JAX's, for caches of limited size
MIN_SECONDS = 0.2  # faster compilations are not worth a file


def cache_compilations(folder: str | Path | None = None) -> None:
    """Use JAX's persistent compilation cache, so that programs start fast when they are repeated.

    Args:
      folder: folder of the cache, of unlimited size. By default, a folder that is set in JAX, as by
        the environment variable JAX_COMPILATION_CACHE_DIR; or, in programs of one process,
        `heinsen_jax/<kind of processor>` in the user's cache folder, with up to 2 GiB, from which
        the least recently used functions are removed.

    Warns:
      UserWarning: the folder cannot be written, so that nothing is cached.
    """
    is_default = folder is None
    if is_default:
        if jax.config.values["jax_compilation_cache_dir"] is not None or jax.process_count() > 1:
            return
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(root) / "heinsen_jax" / _processor()
    try:
        if "://" not in str(folder):  # JAX writes to buckets, too
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be written ({error.strerror}): compiled functions are not cached; "
            "set JAX_COMPILATION_CACHE_DIR to another folder",
            stacklevel=2,
        )
        return
    if is_default:
        _remove_incomplete(Path(folder))
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES if is_default else -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    compilation_cache.reset_cache()  # otherwise ignored after the first compilation


def _remove_incomplete(folder: Path) -> None:
    """Remove entries that a killed process has not completed: JAX writes the time of access last,
    and without it would warn at every further entry, instead of writing it."""
    filelock = extra_module("filelock")
    with (
        contextlib.suppress(filelock.Timeout, OSError),  # some file systems have no locks
        filelock.FileLock(folder / LOCK_FILE, timeout=10),
    ):
        for entry in folder.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("cache") + "atime").exists():
                entry.unlink()


def _processor() -> str:
    """Name for processors that can run the same compiled functions."""
    described = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        described += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]
