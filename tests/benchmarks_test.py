"""The benchmarks of the GPU suite, on a small model without a GPU; the cases of others."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from heinsen_jax.interop.transformers import import_model
from studies import Comparison
from tests.conftest import ALL_TESTS, GOLDEN_FOLDER, SHORT_TESTS, SLOW

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, output: Path, *arguments: str) -> dict:
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--output", str(output)]
    command += ["--config", str(ROOT / "configs/quickstart.py"), "--repeats", "1", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(output.read_text())


@pytest.mark.nightly
def test_training_steps(tmp_path):
    record = run(
        "gpu_training.py", tmp_path / "record.json", "--rows", "2", "--remat-policies", "all"
    )
    chunked, fused, softmax = record["steps"]
    assert chunked["tokens_per_second"] > 0
    assert "Hopper" in fused["refused"] or fused["tokens_per_second"] > 0
    assert "GPU" in softmax["refused"] or softmax["tokens_per_second"] > 0
    assert sum(record["profile"]["share_of_time"].values()) == pytest.approx(1)


@pytest.mark.nightly
def test_generation(tmp_path):
    sizes = ["--batches", "1", "--contexts", "10", "3000", "--tokens", "4", "--memory", "1e7"]
    record = run("gpu_decoding.py", tmp_path / "record.json", *sizes)
    rows = {(row["model"], row["context"]): row for row in record["rows"]}
    assert rows["log", 10]["bytes"] == rows["log", 3000]["bytes"]
    assert rows["log", 3000]["seconds"] > 0
    assert rows["softmax", 10]["seconds"] > 0
    assert "GB of states" in rows["softmax", 3000]["refused"]


@pytest.mark.nightly
def test_gated_rules(tmp_path):
    output = tmp_path / "record.json"
    sizes = {"batch": "1", "length": "128", "heads": "2", "depth": "16", "dtype": "float32"}
    sizes |= {"repeats": "1", "sizes": "32:4", "output": str(output)}
    command = [sys.executable, str(ROOT / "benchmarks/gpu_gated.py"), "--rules", "kda", "gla"]
    command += [part for name, value in sizes.items() for part in (f"--{name}", value)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rules = json.loads(output.read_text())["rules"]
    assert [*rules] == ["kda", "gla"]
    for results in rules.values():
        for name in ("ours", "ours 32:4"):
            assert results[name]["seconds"]["both"] > 0
            assert results[name]["relative_error"] < 1e-5


def test_a_time_limit_stops_a_part_and_omits_later_ones():
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--seconds", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "attention: stopped by the time limit" in result.stdout
    assert "tests: no time is left" in result.stdout


@pytest.mark.nightly
def test_linearizations(tmp_path):
    teacher = import_model(str(GOLDEN_FOLDER / "transformers/qwen2"), tmp_path / "teacher")
    labels = "window of 92, 4 sinks", "log, Hedgehog, decay"
    sizes = {"tokens": 1024, "sequence-length": 64, "batch-size": 8, "dtype": "float32"}
    command = [sys.executable, str(ROOT / "benchmarks/gpu_linearize.py"), "--labels", *labels]
    for option, value in sizes.items():
        command += [f"--{option}", str(value)]
    text, output = tmp_path / "text.txt", tmp_path / "record.json"
    text.write_text("attention of constant cost\n" * 1000)
    folders = {"model": teacher, "data": text, "workdir": tmp_path / "runs", "output": output}
    for option, value in folders.items():
        command += [f"--{option}", str(value)]
    subprocess.run(command, check=True, timeout=600)
    runs = json.loads(output.read_text())["runs"]
    names = {label: [row["name"] for row in runs[label]["results"]] for label in labels}
    assert names[labels[0]][2:] == ["teacher trained further", "windows alone"]
    assert names[labels[1]] == ["teacher", "linearized"]
    assert runs[labels[1]]["results"][1]["tokens"] == 1024


def test_unknown_parts_are_named():
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--parts", "nonsense"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "attention, training, gated" in result.stdout


def skip_unless_all_are_collected(request: pytest.FixtureRequest) -> None:
    is_part = {Path(name).name for name in request.config.args} != {"tests"}
    if is_part or request.config.getoption("--changed"):
        pytest.skip("these are not all tests")


def test_slow_tests_exist(request):
    skip_unless_all_are_collected(request)
    assert not SLOW - request.config.stash[ALL_TESTS]


def test_the_recorded_time_of_tests_is_recent(request):
    """The number of tests has changed by less than a quarter since."""
    skip_unless_all_are_collected(request)
    record = json.loads((ROOT / "benchmarks/results/tests.json").read_text())
    recorded, now = record["now"]["passed"]["tests"], request.config.stash[SHORT_TESTS]
    assert abs(now - recorded) < recorded / 4, "run benchmarks/test_time.py"


def module(name: str, monkeypatch) -> ModuleType:
    """The module of benchmarks/<name>.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    path = ROOT / f"benchmarks/{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def test_losses_at_equal_budgets_are_those_of_the_same_seeds(monkeypatch):
    equal_budgets = module("equal_budgets", monkeypatch)

    def result(**losses: float | None) -> Comparison:
        found = {seed: {"metrics": {"loss": x}} if x else {} for seed, x in losses.items()}
        rows = [{"labels": {"seed": seed}} | row for seed, row in found.items()]
        return Comparison({}, {}, rows)

    results = {
        100: result(a=4.0, b=3.0),
        200: result(b=2.0, c=5.0, d=6.0),
        400: result(a=None, b=1.0, c=7.0),
    }
    assert equal_budgets.by_seed(results, 200) == [pytest.approx(2.0)]
