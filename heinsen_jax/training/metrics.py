"""Metrics of a run: progress bar, metrics.jsonl and TensorBoard events."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from heinsen_jax.errors import UserError, printable
from heinsen_jax.runs.metrics_file import METRICS_FILE, describe_damage, keep_lines, read_lines
from heinsen_jax.storage.files import storage_errors
from heinsen_jax.training.event_file import EventFile

BOARD_FOLDER = "tensorboard"
SHOWN_FIRST = "loss", "tokens_per_second"
SHORT_NAMES = {"tokens_per_second": "tokens/s"}


class Reporter:
    """Context manager that writes a run's metrics, on process 0 only.

    Every row is also passed to `log`, as a step and metrics. Rows of metrics.jsonl after
    `start_step`, from a process that was killed before its next checkpoint, are removed, since the
    run resumes from that step. Damaged lines are reported and skipped.

    Raises:
      UserError: metrics.jsonl cannot be read or written.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        start_step: int,
        steps: int,
        console: Console | None = None,
        log: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    ):
        self.active = jax.process_index() == 0
        self.console = console or _Console()
        self._steps, self._log = steps, log
        if not self.active:
            return
        self._workdir, path = workdir, workdir / METRICS_FILE
        with storage_errors(workdir):
            rows, damaged = read_lines(path)
            keep_lines(path, [line for line, row in rows if row["step"] <= start_step])
            self._board = EventFile(workdir / BOARD_FOLDER, start_step)
            self._file = path.open("a", encoding="utf-8")
        if damaged:
            self.line(f"{describe_damage(path, damaged)}: left out")
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = Progress(
            TextColumn("step", table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=rest),
            expand=True,
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start_step)
        self._start_step = start_step
        self.begin()

    def __enter__(self) -> "Reporter":
        if self.active:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.active:
            return
        self._bar.stop()
        with contextlib.ExitStack() as files:
            if kind is not None:  # the error that is raised already, not a further one
                files.enter_context(contextlib.suppress(UserError))
            files.enter_context(storage_errors(self._workdir))
            files.callback(self._board.close)
            files.callback(self._file.close)

    def begin(self) -> None:
        """Start the clock for the estimate of the remaining time, after compilation."""
        self._started = time.monotonic()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Context manager for a block that does not count in that estimate."""
        start = time.monotonic()
        yield
        self._started += time.monotonic() - start

    def training(self, step: int, metrics: dict[str, float]) -> None:
        """Record training metrics."""
        self._record("train", step, metrics)
        if not self.active:
            return
        shown = {name: metrics[name] for name in SHOWN_FIRST if name in metrics} | metrics
        if not shown.get("skipped"):
            shown.pop("skipped", None)
        text = _described(shown)
        self._bar.update(self._task, completed=step, description=text)
        if not self.console.is_terminal:
            elapsed = time.monotonic() - self._started
            left = elapsed / max(1, step - self._start_step) * (self._steps - step)
            self.line(f"step {step}/{self._steps}  {text}  {left:.0f} s left")

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """Record validation metrics."""
        self._record("validation", step, metrics)
        self.line(f"step {step}/{self._steps}  validation  {_described(metrics)}")

    def sample(self, step: int, text: str) -> None:
        """Record a sample, also in a separate file."""
        if not self.active:
            return
        with storage_errors(self._workdir):
            self._board.add_text(step, "sample", text)
            folder = self._workdir / "samples"
            folder.mkdir(exist_ok=True)
            (folder / f"step_{step:08d}.txt").write_text(text, encoding="utf-8")

    def line(self, text: str) -> None:
        """Print a line."""
        if self.active:
            text = printable(text, lines=True)
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _record(self, group: str, step: int, metrics: dict[str, float]) -> None:
        if not self.active:
            return
        named = {f"{group}/{name}": value for name, value in metrics.items()}
        with storage_errors(self._workdir):
            self._file.write(json.dumps({"step": step} | named) + "\n")
            self._file.flush()
            for name, value in named.items():
                self._board.add_scalar(step, name, value)
        self._log(step, named)


class _Console(Console):
    """A console whose reader may exit, as in `... | head`: treated as a closed terminal, so that
    the run is saved and exits."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # a closed terminal, before its SIGHUP arrives
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        number = getattr(signal, "SIGHUP", signal.SIGTERM)
        if signal.getsignal(number) is signal.SIG_DFL:  # nothing to save
            raise SystemExit(141)
        signal.raise_signal(number)


def _described(metrics: dict[str, float]) -> str:
    return "  ".join(
        f"{SHORT_NAMES.get(name, name.replace('_', ' '))} {_short(x)}"
        for name, x in metrics.items()
    )


def _short(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"
