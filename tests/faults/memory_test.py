"""Training that does not fit into memory is refused before it allocates; what fits is named."""

import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import pytest

from heinsen_jax import data
from heinsen_jax.config import override
from heinsen_jax.errors import UserError
from heinsen_jax.training import memory, prepare_run, program, train
from heinsen_jax.training.memory import Limits, Memory, Setting, cgroup_memory, check_memory
from tests.training.conftest import corpus, small  # noqa: F401

GB = 10**9


def limits(monkeypatch, host: int | None, device: int | None = None) -> Limits:
    """Limits of a host whose state has 2 GB; with `device`, also of accelerators."""
    monkeypatch.setattr(memory, "available_host_memory", lambda: host)
    state = jax.ShapeDtypeStruct((GB // 2,), "float32")
    found = Limits(state)
    if device is not None:
        found._on_cpu, found.device = False, device
    return found


def measured(setting: Setting):
    """An update with 2 GB of state and 1 GB of gradients; a sequence needs 1 GB of activations, or
    0.25 GB if they are recomputed."""

    def measure(accumulation_steps: int, remat: bool) -> Memory:
        chosen = setting._replace(accumulation_steps=accumulation_steps, remat=remat)
        return Memory(2 * GB, GB + chosen.rows * GB // (4 if remat else 1))

    return measure


@pytest.mark.parametrize(
    ("host", "device", "wanted"),
    [
        (80, None, None),
        (None, None, None),  # unknown
        (37, None, None),
        (36, None, "training.accumulation_steps=2, or data.batch_size=16 with"),
        (14, None, "training.accumulation_steps=4, or data.batch_size=8 with"),
        (5.5, None, "set model.remat=True and training.accumulation_steps=32, or model.remat=Tr"),
        (5, None, "a smaller data.sequence_length"),
        (40, 12, "training.accumulation_steps=4, or data.batch_size=8 with"),
        (1, 80, "another 2 GB of the memory of this host, which has 1 GB available"),
        (40, 3, "another 35 GB of the memory of each device, which has 3 GB available"),
    ],
)
def test_settings_that_fit_are_named(monkeypatch, host, device, wanted):
    setting = Setting(32, 1, 1, remat=False)
    measure = measured(setting)
    host, device = (None if x is None else int(x * GB) for x in (host, device))
    allowed = limits(monkeypatch, host, device)
    if wanted is None:
        assert check_memory(allowed, measure(1, False), setting, measure) == setting
        return
    with pytest.raises(UserError, match=re.escape(wanted)):
        check_memory(allowed, measure(1, False), setting, measure)


@pytest.mark.parametrize(("host", "steps"), [(81, 1), (60, 2), (40, 4), (8, 32)])
def test_settings_are_chosen_for_the_estimated_peak(monkeypatch, host, steps):
    """On CPUs, 1.15 (4 GB + 2 workspaces); the least that may fit, if no setting allows for it."""
    setting = Setting(32, 1, 1, remat=False)
    measure = measured(setting)
    allowed = limits(monkeypatch, host * GB)
    chosen = check_memory(allowed, measure(1, False), setting, measure, may_change=True)
    assert chosen.accumulation_steps == steps


def test_an_estimate_warns_and_does_not_refuse(monkeypatch):
    """The workspace may be allocated twice on CPUs."""
    update = Memory(2 * GB, 3 * GB)
    for host, is_warning in ((11 * GB, False), (9 * GB, True)):
        line = limits(monkeypatch, host).describe(update)
        assert line.startswith("warning: ") is is_warning
        assert ("training.accumulation_steps" in line) is is_warning


class Allocates(Exception):
    """Training has begun to allocate."""


def test_training_is_refused_before_it_allocates(small, tmp_path, monkeypatch):  # noqa: F811
    """And the settings that the message names are accepted."""

    def compiled(run, accumulation_steps=None, model=None):
        steps = accumulation_steps or run.training.accumulation_steps
        setting = Setting(run.data.batch_size, steps, 1, (model or run.model).remat)
        size = measured(setting)(steps, setting.remat)
        sizes = {"output_size_in_bytes": 0, "alias_size_in_bytes": 0}
        sizes |= {"argument_size_in_bytes": size.arguments, "temp_size_in_bytes": size.workspace}
        return MagicMock(jax.stages.Compiled, memory_analysis=lambda: SimpleNamespace(**sizes))

    def allocate(*_):
        raise Allocates

    monkeypatch.setattr(program.Program, "compile", compiled)
    monkeypatch.setattr(program, "describe", lambda *_: [])
    monkeypatch.setattr(program, "init_sharded", allocate)
    monkeypatch.setattr(memory, "available_host_memory", lambda: 9 * GB)
    dataset, workdir = data.load(small.data), tmp_path / "run"
    workdir.mkdir()
    with pytest.raises(UserError, match=r"data\.batch_size=8 with .*: training needs") as error:
        train(prepare_run(small, workdir, dataset=dataset))
    assert not list((workdir / "checkpoints").glob("[0-9]*"))
    named = re.search(
        r"training\.accumulation_steps=(\d+), or data\.batch_size=(\d+)", str(error.value)
    )
    for field, value in zip(
        ("training.accumulation_steps", "data.batch_size"), named.groups(), strict=True
    ):
        with pytest.raises(Allocates):
            train(prepare_run(override(small, [f"--{field}", value]), workdir, dataset=dataset))
    with pytest.raises(Allocates):
        train(prepare_run(override(small, ["--model.remat"]), workdir, dataset=dataset))


@pytest.mark.parametrize(
    ("line", "files", "wanted"),
    [
        ("0::/a/b", {"a/b/memory.max": 100, "a/b/memory.current": 30}, [80]),
        ("0::/a/b", {"a/memory.max": 70, "a/memory.current": 30}, [50]),
        ("0::/", {"memory.max": "max", "memory.current": 30}, []),
        (
            "4:memory:/x",
            {"memory/x/memory.limit_in_bytes": 9, "memory/x/memory.usage_in_bytes": 3},
            [16],
        ),
        (
            "4:memory:/x",
            {"memory/memory.limit_in_bytes": 1 << 62, "memory/memory.usage_in_bytes": 3},
            [],
        ),
        ("4:cpu:/x", {"cpu/x/memory.limit_in_bytes": 9}, []),
    ],
)
def test_limits_of_control_groups_are_read(tmp_path, line, files, wanted):
    groups = tmp_path / "cgroup"
    groups.write_text(line + "\n")
    for name, content in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
        (path.parent / "memory.stat").write_text("inactive_file 10\ntotal_inactive_file 10\n")
    assert cgroup_memory(groups, tmp_path / "sys") == wanted


def test_devices_tell_what_is_left(monkeypatch):
    stats = [{"bytes_limit": 100, "bytes_in_use": 30}, {"bytes_limit": 100}]
    devices = [SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    monkeypatch.setattr(memory.jax, "local_devices", lambda: devices)
    assert memory.available_device_memory() == 70
    devices.append(SimpleNamespace(memory_stats=lambda: None))
    assert memory.available_device_memory() is None
