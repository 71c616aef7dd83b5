"""TensorBoard events of a run."""

import time
import uuid
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from heinsen_jax.runs.metrics_file import keep_lines

FLUSH_SECONDS = 30
"""Maximum delay of TensorBoard events."""


class EventFile:
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

    def add_scalar(self, step: int, name: str, value: float) -> None:
        self._add(step, summary.scalar(name, value))

    def add_text(self, step: int, name: str, text: str) -> None:
        self._add(step, summary.text(name, text))

    def _add(self, step: int, values: Summary) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=values))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


def _drop_after(path: Path, step: int) -> None:
    """Remove events after a step from a file, which TensorBoard's default loader would show: they
    come from a process that was killed before its next checkpoint. A record is its length (8
    bytes), a checksum (4), the event, and a checksum (4)."""
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
    keep_lines(path, kept)
