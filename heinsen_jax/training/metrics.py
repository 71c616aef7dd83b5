"""Metrics of a run: progress bar, metrics.jsonl, TensorBoard events, and a plot of the loss."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import jax
import matplotlib.figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from heinsen_jax.data.files import writing
from heinsen_jax.errors import UserError, parse_json, printable

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"
BOARD_FOLDER = "tensorboard"
SHOWN_FIRST = "loss", "tokens_per_second"
SHORT_NAMES = {"tokens_per_second": "tokens/s"}
FLUSH_SECONDS = 30
"""Maximum delay of TensorBoard events."""

PEAK_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA B100": 1750e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 5090": 209e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,  # a chip is two devices
}
"""Peak dense bfloat16 FLOP/s of a device by `device_kind`, with float32 accumulation, from the
vendors' datasheets."""


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float | None
) -> float | None:
    """Model FLOPs utilization (MFU): model FLOP/s divided by the peak; None if one is unknown."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    if peak is None or flops_per_token is None:
        return None
    return tokens_per_second * flops_per_token / (peak * jax.device_count())


def without_peak() -> list[str]:
    """A warning if the devices are accelerators with an unknown peak."""
    device = jax.devices()[0]
    if device.platform == "cpu" or device.device_kind in PEAK_FLOPS:
        return []
    return [
        f"warning: mfu is not reported, since the peak FLOP/s of {device.device_kind} are unknown; "
        "add them to heinsen_jax.training.metrics.PEAK_FLOPS"
    ]


class Reporter:
    """Context manager that writes a run's metrics, on process 0 only.

    Every row is also passed to `log`, as a step and metrics. Rows of metrics.jsonl after
    `start_step`, from a process that was killed before its next
    checkpoint, are removed, since the run resumes from that step. Damaged lines are reported and
    skipped.

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
        with writing(workdir):
            rows, damaged = _read(path)
            _keep(path, [line for line, row in rows if row["step"] <= start_step])
            self._board = _Board(workdir / BOARD_FOLDER, start_step)
            self._file = path.open("a", encoding="utf-8")
        if damaged:
            self.line(f"{_damage(path, damaged)}: left out")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.active:
            return
        self._bar.stop()
        with contextlib.ExitStack() as files:
            if kind is not None:  # the error that is raised already, not a further one
                files.enter_context(contextlib.suppress(UserError))
            files.enter_context(writing(self._workdir))
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
        with writing(self._workdir):
            self._board.add(step, summary.text("sample", text))
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
        with writing(self._workdir):
            self._file.write(json.dumps({"step": step} | named) + "\n")
            self._file.flush()
            for name, value in named.items():
                self._board.add(step, summary.scalar(name, value))
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


class _Board:
    """TensorBoard events, written synchronously. The writer thread of tensorboardX's
    `SummaryWriter` dies when a disk is full, and its caller then blocks forever."""

    def __init__(self, folder: Path, start_step: int):
        folder.mkdir(exist_ok=True)
        for path in folder.glob("events.out.tfevents.*"):
            _drop_after(path, start_step)
        suffix = uuid.uuid4().hex[:8]  # the name's time is in seconds
        self._writer = EventsWriter(str(folder / "events"), f".{suffix}")
        self._flushed = time.monotonic()
        # Hides later events of a killed run where files stay, as in a bucket.
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=start_step + 1, session_log=start)
        self._writer.write_event(event)

    def add(self, step: int, values: Summary) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=values))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


def _drop_after(path: Path, step: int) -> None:
    """Remove events after a step from a file, which TensorBoard's default loader would show: they
    are of a process that was killed before its next checkpoint. A record is its length (8 bytes),
    a checksum (4), the event, and a checksum (4)."""
    content, kept, start = path.read_bytes(), [], 0
    while start < len(content):
        end = start + 16 + int.from_bytes(content[start : start + 8], "little")
        if end > len(content):  # truncated by a kill
            break
        try:
            event = Event.FromString(content[start + 12 : end - 4])
        except Exception:  # the DecodeError of protobuf: TensorBoard ends here, too
            break
        if event.step <= step or event.HasField("session_log"):
            kept.append(content[start:end])
        start = end
    _keep(path, kept)


def read_metrics(workdir: Path) -> list[dict[str, float]]:
    """Read the rows of a run's metrics.jsonl.

    A last line truncated by a killed process is skipped, and so, with a warning, is any other line
    that is not a JSON object of numbers with an integer `step`.
    """
    path = workdir / METRICS_FILE
    rows, damaged = _read(path)
    if damaged:
        warnings.warn(f"{_damage(path, damaged)}: left out", stacklevel=2)
    return [row for _, row in rows]


def read_evaluations(workdir: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of each evaluation from a run's metrics.jsonl, by step."""
    group, found = "validation/", {}
    for row in read_metrics(workdir):
        metrics = {x.removeprefix(group): row[x] for x in row if x.startswith(group)}
        if metrics:
            found[row["step"]] = metrics
    return found


def _read(path: Path) -> tuple[list[tuple[bytes, dict[str, float]]], list[int]]:
    """The valid lines with their rows, and the numbers, from 1, of the damaged lines."""
    rows, damaged = [], []
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int and _are_numbers(row):
            rows.append((line.rstrip(b"\r\n") + b"\n", row))
        elif number < len(lines) or line.endswith(b"\n"):
            damaged.append(number)
    return rows, damaged


def _are_numbers(row: dict[str, object]) -> bool:
    return all(isinstance(x, int | float) for x in row.values())


def _keep(path: Path, lines: list[bytes]) -> None:
    """Replace the lines of a file atomically."""
    content = b"".join(lines)
    if path.exists() and path.read_bytes() == content:
        return
    aside = path.with_name(f"{path.name}.partial")
    aside.write_bytes(content)
    aside.replace(path)


def _damage(path: Path, lines: list[int]) -> str:
    return f"{path}: line(s) {', '.join(map(str, lines))} cannot be read"


def plot_losses(workdir: Path) -> Path:
    """Plot training and validation loss into the run's folder."""
    rows = read_metrics(workdir)
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train/loss", "-"), ("validation/loss", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=workdir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(workdir):
        figure.savefig(workdir / PLOT_FILE, dpi=150)
    return workdir / PLOT_FILE


def _described(metrics: dict[str, float]) -> str:
    return "  ".join(
        f"{SHORT_NAMES.get(name, name.replace('_', ' '))} {_short(x)}"
        for name, x in metrics.items()
    )


def _short(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"
