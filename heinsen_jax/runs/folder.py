"""The folder of a run, `--workdir`: on a disk, or in a bucket.

A run appends to some of its files and replaces others, which objects in a bucket do not allow. A
process therefore keeps the files in a temporary folder: it downloads them at the start, and uploads
changed ones whole, before a checkpoint becomes final and at the end. So a checkpoint is never newer
than the metrics in the bucket. Checkpoints are read and written in the bucket itself.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etils import epath

from heinsen_jax.errors import UserError, check_regular, extra_module
from heinsen_jax.runs.record import CONFIG_FILE, SAVED_FILE, newest_saved, read_config
from heinsen_jax.runs.weights import has_weights
from heinsen_jax.storage import buckets
from heinsen_jax.storage.buckets import AnyPath, move
from heinsen_jax.storage.files import free_name, storage_errors

CHECKPOINT_FOLDER = "checkpoints"
SET_ASIDE = "before-restart"
RESTART_FILE = ".restart"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder.

    Attributes:
      files: local folder of all files but checkpoints.
      remote: the folder in a bucket; None for a run on a disk.
    """

    files: Path
    remote: epath.Path | None = None
    _published: dict[Path, tuple[int, int]] = field(default_factory=dict, compare=False)
    _lock: contextlib.AbstractContextManager[bool] = field(
        default_factory=threading.Lock, compare=False, repr=False
    )

    def __str__(self) -> str:
        return str(self.remote or self.files)

    @property
    def shared(self) -> AnyPath:
        """The folder that all processes of a run share."""
        return self.remote or self.files

    @property
    def checkpoints(self) -> AnyPath:
        """The folder of checkpoints."""
        return (self.remote or self.files.resolve()) / CHECKPOINT_FOLDER

    def fetch(self) -> None:
        """Download the files of the folder in the bucket, except hidden ones and subfolders.

        Raises:
          UserError: they cannot be read.
        """
        if self.remote is None:
            return
        with buckets.reading(self.remote, "--workdir"):
            paths = list(self.remote.iterdir()) if self.remote.is_dir() else []
            paths = [path for path in paths if not (path.name.startswith(".") or path.is_dir())]
        for path in paths:
            with buckets.reading(path, "--workdir"):
                content = path.read_bytes()
            file = self.files / path.name
            file.write_bytes(content)
            self._published[file] = _version(file)

    def publish(self) -> None:
        """Upload the files that this process has changed since the last call. The thread of
        checkpoints calls it, too.

        Raises:
          UserError: they cannot be uploaded.
        """
        if self.remote is None:
            return
        with self._lock:
            walk = os.walk(self.files)  # which ignores folders that vanish
            for path in (Path(folder, name) for folder, _, names in walk for name in names):
                if path.suffix == ".partial" or not path.is_file():
                    continue
                with contextlib.suppress(FileNotFoundError):  # a temporary file, removed meanwhile
                    version = _version(path)
                    if self._published.get(path) != version:
                        content = path.read_bytes()
                        target = self.remote / path.relative_to(self.files).as_posix()
                        buckets.upload(content, target)
                        self._published[path] = version

    @contextlib.contextmanager
    def published(self) -> Iterator[None]:
        """Context manager that publishes at the end, also after an error, which takes precedence
        over an error of the upload."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UserError):
                self.publish()
            raise
        self.publish()

    def check_writable(self) -> None:
        """Check that the folder can be written, before any work is done.

        Raises:
          UserError: it cannot be written.
        """
        if self.remote is not None:
            buckets.check_writable(self.remote, "--workdir")
            return
        try:
            self.files.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.files).close()
        except OSError as error:
            raise UserError(
                f"--workdir {self} cannot be written ({error.strerror}); choose another folder"
            ) from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager that locks the folder against other processes."""
        locks = extra_module("heinsen_jax.storage.locks")
        lock = locks.locked(self.files) if self.remote is None else buckets.locked(self.remote)
        with lock:
            self.fetch()  # again: the previous owner may have changed files until now
            yield


@contextlib.contextmanager
def open_run(workdir: str | Path) -> Iterator[RunFolder]:
    """Context manager that opens a run's folder, and downloads its files from a bucket.

    Args:
      workdir: path or gs:// address of the folder.

    Raises:
      UserError: the folder is in a bucket of another kind, or the extra `gcs` is missing; or a
        file in it is a pipe or a device.
    """
    if not buckets.is_remote(workdir):
        folder = Path(workdir)
        for path in folder.iterdir() if folder.is_dir() else ():
            if not path.is_dir():
                check_regular(path)
        yield RunFolder(folder)
        return
    remote = buckets.bucket_path(str(workdir), "--workdir")
    with tempfile.TemporaryDirectory(prefix="heinsen_jax-") as temporary:
        run = RunFolder(Path(temporary) / remote.name, remote)
        run.files.mkdir()
        run.fetch()
        yield run


def check_folder(run: RunFolder, *, restart: bool) -> None:
    """Check that a folder is new, empty or a run's, before anything is written into it.

    Raises:
      UserError: it has other files; or it has checkpoints without `config.json`, and `restart` is
        false.
    """
    if not run.shared.is_dir():
        return
    if has_weights(run.files):
        raise UserError(
            f"--workdir {run} holds the weights of a model, which checkpoints would hide; give a "
            "new or an empty folder"
        )
    try:
        if read_config(run.files) is not None:
            return
    except UserError:
        if not restart:
            raise
    newest = newest_saved(run.files / SAVED_FILE)
    steps = run.checkpoints.is_dir() and any(map(_is_step, run.checkpoints.iterdir()))
    if newest == 0 and not steps:  # a run that has begun, and was killed before its first update
        return
    if steps or newest is not None:
        if restart:
            return
        raise UserError(
            f"--workdir {run} has checkpoints without {CONFIG_FILE}, so the run's settings are "
            f"unknown; bring {CONFIG_FILE} back, or give --restart to set the run aside"
        )
    names = [path.name for path in run.shared.iterdir() if not _may_precede(path)]
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise UserError(
            f"--workdir {run} is not the folder of a run: it has {min(names)}{more}; give a new or "
            "an empty folder"
        )


def _is_step(path: AnyPath) -> bool:
    """Whether a path is the folder of a checkpoint, intact or set aside."""
    return path.name.removeprefix("damaged-").isdecimal()


def _may_precede(path: AnyPath) -> bool:
    """Whether a file or folder may be there before a run begins: a log to which its output is
    redirected, or a file that it writes before its record of the newest checkpoint."""
    name = path.name
    if name == CHECKPOINT_FOLDER:
        return not any(path.iterdir())
    is_log = name == "log.txt" or name.endswith((".log", ".out", ".err", ".partial"))
    return is_log or name.startswith((".", SET_ASIDE))


def set_aside(run: RunFolder) -> None:
    """Move the content of a run's folder into its subfolder `before-restart`.

    The file `.restart` names that folder meanwhile, so that `complete_restart` can end a move that
    was interrupted.
    """
    shared = run.shared
    paths = [path for path in shared.iterdir() if not path.name.startswith((".", SET_ASIDE))]
    intent = shared / RESTART_FILE
    if not (paths or intent.exists()):
        return
    with storage_errors(run.files):
        if not intent.exists():
            intent.write_text(free_name(shared / SET_ASIDE).name)
        aside = shared / intent.read_text()
        aside.mkdir(exist_ok=True)
        for path in sorted(paths, key=lambda path: path.name == CONFIG_FILE):  # the settings last
            move(path, aside / path.name)
        for path in run.files.iterdir() if run.remote else ():  # copies of moved objects
            path.unlink()
        intent.unlink()


def complete_restart(run: RunFolder) -> None:
    """Complete a `set_aside` that was interrupted, if any."""
    if (run.shared / RESTART_FILE).exists():
        set_aside(run)


def _version(file: Path) -> tuple[int, int]:
    """(mtime, size) of a file, to notice changes."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size
