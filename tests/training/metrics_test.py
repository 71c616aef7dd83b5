"""Metrics and messages of runs."""

import errno
import io
import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from heinsen_jax.errors import UserError
from heinsen_jax.runs.metrics_file import METRICS_FILE, read_metrics
from heinsen_jax.training.loss_plot import plot_losses
from heinsen_jax.training.metrics import Reporter
from heinsen_jax.training.utilization import model_flops_utilization, without_peak


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_rows_are_written_immediately_and_lines_are_plain(tmp_path):
    screen = console()
    with Reporter(tmp_path, start_step=0, steps=10, console=screen) as reporter:
        reporter.training(5, {"loss": 2.5, "tokens_per_second": 12345.6})
        reporter.validation(10, {"loss": 2.0})
        assert read_metrics(tmp_path) == [
            {"step": 5, "train/loss": 2.5, "train/tokens_per_second": 12345.6},
            {"step": 10, "validation/loss": 2.0},
        ]
    text = screen.file.getvalue()
    assert "step 5/10  loss 2.5  tokens/s 12,346" in text
    assert "step 10/10  validation  loss 2" in text
    assert "\x1b" not in text
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_rows_after_the_resumed_step_are_removed(tmp_path):
    rows = [json.dumps({"step": step, "train/loss": 1.0}) for step in (5, 10, 15)]
    (tmp_path / METRICS_FILE).write_text("\n".join(rows) + '\n{"step": 20, "tra')
    with Reporter(tmp_path, start_step=10, steps=30, console=console()) as reporter:
        reporter.training(15, {"loss": 0.5})
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [1.0, 1.0, 0.5]


DAMAGED = {
    "cut": b'{"step": 10, "train/lo\n',
    "not UTF-8": b'{"step": 10, "train/loss": "\xff"}\n',
    "no step": b'{"train/loss": 1.0}\n',
    "a number": b"17\n",
    "no number": b'{"step": 10, "train/loss": "low"}\n',
    "nested": b"[" * 100_000 + b"\n",
}


def test_a_damaged_last_row_is_named(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 5, "train/loss": 1.0}\n{"step": 10, "tra\n')
    with pytest.warns(match=r"line\(s\) 2 cannot be read"):
        assert [row["step"] for row in read_metrics(tmp_path)] == [5]


def test_events_after_the_resumed_step_are_removed(tmp_path):
    for _ in range(2):  # the second begins again after step 10
        with Reporter(tmp_path, start_step=10, steps=30, console=console()) as reporter:
            reporter.training(11, {"loss": 0.5})
    first, second = sorted((tmp_path / "tensorboard").iterdir(), key=lambda x: x.stat().st_size)
    assert (b"train/loss" in first.read_bytes(), b"train/loss" in second.read_bytes()) == (
        False,
        True,
    )


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_row_is_named_and_no_other_is_lost(tmp_path, damage):
    path = tmp_path / METRICS_FILE
    rows = [json.dumps({"step": step, "train/loss": 1.0}).encode() + b"\n" for step in (5, 15)]
    path.write_bytes(rows[0] + damage + rows[1])
    with pytest.warns(match=r"line\(s\) 2 cannot be read"):
        assert [row["step"] for row in read_metrics(tmp_path)] == [5, 15]
    screen = console()
    with Reporter(tmp_path, start_step=15, steps=30, console=screen):
        assert path.read_bytes() == b"".join(rows)
    assert "line(s) 2 cannot be read: left out" in " ".join(screen.file.getvalue().split())


def test_rows_are_kept_if_the_file_cannot_be_rewritten(tmp_path, monkeypatch):
    path = tmp_path / METRICS_FILE
    text = "".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in (5, 10, 15))
    path.write_text(text)

    def no_space(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("heinsen_jax.storage.files.os.fsync", no_space)
    with pytest.raises(UserError, match=r"cannot be written .*No space"):
        Reporter(tmp_path, start_step=10, steps=30, console=console())
    assert path.read_text() == text


def test_the_time_left_excludes_compilation(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.time = lambda: clock.now
    monkeypatch.setattr("heinsen_jax.training.metrics.time", clock)
    screen = console()
    with Reporter(tmp_path, start_step=0, steps=10, console=screen) as reporter:
        clock.now += 100  # to compile
        reporter.begin()
        clock.now += 10
        with reporter.untimed():
            clock.now += 50
        reporter.training(5, {"loss": 2.5})
    assert "10 s left" in screen.file.getvalue()


def test_a_narrow_terminal_shows_the_step_and_the_time_left(tmp_path):
    screen = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Reporter(tmp_path, start_step=0, steps=12345, console=screen) as reporter:
        names = "loss", "accuracy", "gradient_norm", "skipped", "learning_rate", "tokens_per_second"
        reporter.training(6789, dict.fromkeys(names, 2.5))
    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.file.getvalue()).split("\r")
    last = next(line for line in reversed(shown) if "6789" in line).splitlines()[0]
    assert re.fullmatch(
        r"step +6789/12345 \S+ +(\d+:\d\d:\d\d|-:--:--) loss 2.5  tokens/s 2.5.*…", last
    ), last
    assert len(last) <= 80


def test_a_plot_is_drawn(tmp_path):
    tmp_path /= "a$b_{$c"  # no mathematics
    tmp_path.mkdir()
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0, "validation/loss": 2.5}]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_losses(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_utilization_needs_a_known_peak():
    assert model_flops_utilization(1e6, 1e9, 1) is None


def test_utilization_is_a_fraction_of_the_peak(monkeypatch):
    monkeypatch.setattr("heinsen_jax.training.utilization.PEAK_FLOPS", {"cpu": 1e15})
    assert model_flops_utilization(1e6, 2e8, 2) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("platform", "kind", "warned"),
    [("gpu", "NVIDIA T4", True), ("gpu", "NVIDIA B200", False), ("cpu", "cpu", False)],
)
def test_an_accelerator_without_a_known_peak_is_named(platform, kind, warned, monkeypatch):
    device = SimpleNamespace(platform=platform, device_kind=kind)
    monkeypatch.setattr("jax.devices", lambda: [device])
    warnings = without_peak()
    assert bool(warnings) == warned
    assert not warned or f"peak FLOP/s of {kind} are unknown" in warnings[0]
