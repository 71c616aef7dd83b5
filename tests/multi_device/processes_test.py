"""Runs of several processes, and runs that resume on other devices."""

import json
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runtime import distributed
from tests.multi_device.apart import ROOT, finish, free_port, start, train

STEPS = 30
CONFIG = f"""
from heinsen_jax.config import *

def get_config():
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=264, model_dim=16, num_layers=1, num_heads=2, attention="linear",
        ),
        data=DataConfig(corpus="words.txt", sequence_length=16, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        training=TrainingConfig(
            steps={STEPS}, log_every=1, evaluate_every=10, evaluation_batches=2, sample_tokens=5,
            keep_checkpoints=9, checkpoint_every=5,
        ),
    )
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "words.txt").write_text("attention at constant cost per token " * 500)
    (folder / "tiny.py").write_text(CONFIG)
    return folder


def run(place: Path, workdir: str, *arguments: str, **sizes: int) -> list[str]:
    """Return the output of each process."""
    ends = finish(train(place, "--workdir", workdir, *arguments, **sizes))
    for code, _, err in ends:
        assert code == 0, err
    return [out for _, out, _ in ends]


def losses(workdir: Path) -> list[float]:
    return [row[name] for row in read_metrics(workdir) for name in row if name.endswith("/loss")]


def parameters(workdir: Path) -> list[np.ndarray]:
    model, _, step = load_run(workdir, best=False)
    assert step == STEPS
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


REFUSED = {
    "--mesh.context 2 --model.num_layers 2 --model.attention softmax log": (
        "mesh.context=2: model.attention='softmax'"
    ),
    "--mesh.context 4 --data.sequence_length 18": "does not divide data.sequence_length=18",
    "--mesh.tensor 4": "mesh.tensor=4 does not divide model.num_heads=2",
    "--mesh.fsdp 2 --data.batch_size 2": "data.batch_size=2 must be a multiple",
}
SHORT = "--mesh.tensor 4"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] * (case[0] != SHORT))
        for case in REFUSED.items()
    ],
)
def test_invalid_arguments_are_refused_immediately(place, arguments, words):
    processes = train(place, "--workdir", "refused", *arguments.split(), devices=4)
    ((code, _, err),) = finish(processes)
    assert code == 2
    assert err.startswith("error: ")
    assert words in err
    assert not (place / "refused" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("here", None, None), "--coordinator, --num-processes and --process-id go together"),
        (("here", 2, 0), "--coordinator here must be host:port"),
        (("here:1", 2, 2), "--process-id 2 must be in 0 .. 1"),
    ],
)
def test_processes_that_cannot_connect_end(arguments, message):
    with pytest.raises(UserError, match=message):
        distributed.initialize(*arguments)


@pytest.fixture(scope="module")
def alone(place) -> Path:
    """A run of one process with four devices."""
    run(place, "alone", "--mesh.data", "2", "--mesh.fsdp", "2", devices=4)
    return place / "alone"


@pytest.mark.nightly
def test_two_processes_of_two_devices_equal_one_of_four(place, alone):
    said = run(place, "both", "--mesh.data", "2", "--mesh.fsdp", "2", devices=2, processes=2)
    assert "4 cpu device(s) in 2 process(es): data 2 x fsdp 2" in said[0]
    assert "step" not in said[1], "process 0 alone speaks"
    np.testing.assert_allclose(losses(place / "both"), losses(alone), rtol=1e-6)
    for ours, theirs in zip(parameters(place / "both"), parameters(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.nightly
def test_processes_connect_under_slurm(place):
    """By the environment variables of Slurm."""
    command = str(ROOT / "train.py"), "--config", "tiny.py", "--workdir", "slurm", "--dry-run"
    job = {
        "SLURM_JOB_ID": 1,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": 2,
        "JAX_COORDINATOR_PORT": free_port(),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": 1,
    }
    processes = [
        start(*command, cwd=place, **job, SLURM_PROCID=index, SLURM_LOCALID=index)
        for index in range(2)
    ]
    (code, out, err), (other, _, _) = finish(processes)
    assert code == other == 0, err
    assert "2 cpu device(s) in 2 process(es): data 2" in out


@pytest.mark.nightly
def test_sequences_may_be_split_over_two_processes(place, alone):
    run(place, "split", "--mesh.data", "1", "--mesh.context", "2", devices=1, processes=2)
    np.testing.assert_allclose(losses(place / "split"), losses(alone), rtol=1e-4)


@pytest.mark.nightly
def test_sigterm_to_one_of_two_stops_both_at_the_same_saved_step(place):
    long = "--training.steps", "100000"
    options = "--workdir", "stopped", *long, "--mesh.fsdp", "2"
    processes = train(place, *options, devices=2, processes=2)
    deadline = time.monotonic() + 200
    while not (place / "stopped/checkpoints/5").is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    ends = finish(processes)
    assert [code for code, _, _ in ends] == [143, 143], ends
    said = int(ends[0][1].split("after step ")[1].split(",")[0])
    steps = [int(path.name) for path in (place / "stopped/checkpoints").iterdir()]
    assert max(steps) == said == load_run(place / "stopped", best=False)[2]


def as_of(place: Path, workdir: str, step: int) -> str:
    """Return the name of a copy of a run's folder as of a step."""
    copy = place / f"{workdir} at {step}"
    shutil.copytree(place / workdir, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return copy.name


@pytest.mark.nightly
def test_a_run_resumes_on_other_devices_and_processes(place, alone):
    """From 8 devices to 2 processes of 2, then to one: same batches, and losses equal up to
    rounding."""
    eight = "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.context", "2"
    run(place, "eight", *eight, devices=8)
    four = as_of(place, "eight", 10)
    run(place, four, "--mesh.data", "2", "--mesh.tensor", "2", devices=2, processes=2)
    one = as_of(place, four, 20)
    run(place, one, devices=1)
    assert losses(place / one)[:10] == losses(place / "eight")[:10]
    np.testing.assert_allclose(losses(place / one), losses(alone), rtol=1e-3)


@pytest.mark.nightly
def test_damage_in_the_share_of_any_process_is_found(place, alone):
    """Each process verifies every second file of arrays; the files of steps 30 and 25 are damaged
    in different shares."""
    shutil.copytree(alone, place / "shares")
    for step, share in ((30, 0), (25, 1)):
        folder = place / "shares/checkpoints" / str(step)
        names = (path.relative_to(folder) for path in folder.rglob("d/*"))
        path = folder / sorted(map(str, names))[share]
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    more = "--mesh.data", "2", "--training.steps", "31", "--allow-change"
    said, _ = run(place, "shares", *more, processes=2)
    for step in (30, 25):
        assert f"checkpoints/{step} is damaged (default/" in said
    assert "continuing shares from step 20" in said


@pytest.mark.nightly
def test_a_killed_process_ends_the_others(place):
    options = "--workdir", "killed", "--training.steps", "100000", "--heartbeat-timeout", "10"
    processes = train(place, *options, devices=1, processes=2)
    while not (place / "killed/checkpoints/5").is_dir():
        assert processes[0].poll() is None
        time.sleep(0.05)
    processes[1].kill()
    (code, _, err), _ = finish(processes)
    assert code not in (0, 2), f"as of something that a restart fixes: {err}"


@pytest.mark.nightly
def test_two_processes_linearize_like_one(place, alone):
    """With a sharded teacher, in attention transfer and distillation."""
    del alone  # the teacher
    chosen = "--model alone --attention log:features=hedgehog --mesh.data 1"
    chosen += " --mesh.fsdp -1 --transfer-steps 3 --steps 3 --training.checkpoint_every None"
    chosen += " --no-baselines"
    tables = []
    for processes in (1, 2):
        workdir, address = f"linear-{processes}", f"localhost:{free_port()}"
        command = ["-m", "heinsen_jax.linearize", *chosen.split(), "--workdir", workdir]
        command += ["--coordinator", address, "--num-processes", str(processes), "--process-id"]
        started = [
            start(*command, str(i), cwd=place, JAX_PLATFORMS="cpu") for i in range(processes)
        ]
        for code, _, err in finish(started):
            assert code == 0, err
        tables.append(json.loads((place / workdir / "linearized.json").read_text())["results"])
    one, two = ([[*row["loss"].values()] for row in table] for table in tables)
    assert one[2][0] < one[1][0]
    np.testing.assert_allclose(two, one, rtol=1e-5)
    for stage in ("-transfer", ""):
        expected = losses(place / f"linear-1{stage}")
        assert expected[-2] < expected[0]  # of training
        np.testing.assert_allclose(losses(place / f"linear-2{stage}"), expected, rtol=1e-5)
