"""Signals, closed terminals, and processes whose parent or peer has ended."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from heinsen_jax import data
from heinsen_jax.config import load_config
from heinsen_jax.errors import UserError
from heinsen_jax.runs.load import load_run
from heinsen_jax.runtime import distributed
from heinsen_jax.runtime.distributed import check_alike
from heinsen_jax.runtime.signals import Signals
from heinsen_jax.training.prepare import identity
from tests.faults.conftest import ENDLESS, assert_one_line, has_checkpoint, wait_until
from tests.multi_device.apart import ROOT, finish, free_port, start, train


def read_until(process: subprocess.Popen, words: str) -> None:
    """Read the output of a process up to these words."""
    assert process.stdout is not None
    too_late = threading.Timer(120, process.kill)
    too_late.start()
    try:
        assert any(words in line for line in process.stdout), f"it never said {words!r}"
    finally:
        too_late.cancel()


@pytest.mark.nightly
def test_sigterm_during_compilation_ends_immediately(place, tmp_path):
    """The update of log-attention takes seconds to compile; nothing needs saving yet."""
    options = (
        "--model.attention",
        "log",
        "--model.num_layers",
        "3",
        "--training.shutdown_timeout",
        "600",
    )
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    command = str(ROOT / "train.py"), "--config", "tiny.py", "--workdir", str(tmp_path / "run")
    process = start(*command, *options, cwd=place, JAX_PLATFORMS="cpu", **uncached)
    read_until(process, "compiling the update")
    time.sleep(0.5)  # into it: the result must not depend on the time of the signal
    process.terminate()
    asked = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 5
    assert process.returncode == 143
    assert "compiled in" not in out, "it was over already"
    assert err == "\nstopped by SIGTERM: nothing to save\n"


@pytest.mark.parametrize("program", ["train", pytest.param("generate", marks=pytest.mark.nightly)])
def test_ctrl_c_during_compilation_ends_immediately(place, tmp_path, program):
    """A second one changes nothing."""
    commands = {
        "train": ("--config", "tiny.py", "--workdir", str(tmp_path / "run")),
        "generate": ("--workdir", "finished", "--prompt", "abc", "--max-new-tokens", "1000000"),
    }
    module = "-m", f"heinsen_jax.{program}"
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    process = start(*module, *commands[program], cwd=place, JAX_PLATFORMS="cpu", **uncached)
    if program == "train":
        read_until(process, "compiling the update")
    else:  # the prompt is printed before the model's functions are compiled
        assert process.stdout is not None
        assert process.stdout.read(3) == "abc"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "\nstopped by SIGINT: nothing to save\n"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)]
)
def test_a_signal_saves_and_the_exit_code_names_it(place, tmp_path, number):
    workdir = tmp_path / "run"
    (process,) = train(place, "--workdir", str(workdir), *ENDLESS)
    wait_until(lambda: has_checkpoint(workdir))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"stopped by {number.name} after step" in out
    step = int(out.split("after step ")[1].split(",")[0])
    assert load_run(workdir, best=False)[2] == step


def test_a_closed_pipe_acts_as_a_closed_terminal(place, tmp_path):
    workdir = tmp_path / "run"
    (process,) = train(place, "--workdir", str(workdir), *ENDLESS)
    assert process.stdout is not None
    read_until(process, "step 10/")
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP, err
    assert err == ""
    assert load_run(workdir, best=False)[2] >= 10


def test_signals_are_left_alone_outside_the_main_thread():
    entered = []

    def enter() -> None:
        with Signals(60) as signals:
            entered.append(signals.first)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [0]


TERMINAL = """
import os, pty, signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
number, terminal = pty.fork()
if number == 0:
    os.execv(sys.argv[2], sys.argv[2:])
while not any(path.name.isdecimal() for path in Path(sys.argv[1]).glob("checkpoints/*")):
    os.read(terminal, 1 << 16)
os.close(terminal)
print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
"""


@pytest.mark.nightly
def test_a_closed_terminal_saves(place, tmp_path):
    """The terminal can no longer be written to."""
    workdir = tmp_path / "run"
    command = str(ROOT / "train.py"), "--config", "tiny.py", "--workdir", str(workdir), *ENDLESS
    ended = start("-c", TERMINAL, str(workdir), sys.executable, *command, cwd=place)
    out, err = ended.communicate(timeout=120)
    assert out == f"{128 + signal.SIGHUP}\n", err
    assert load_run(workdir, best=False)[2] > 5


GONE = """
import errno, io, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
from heinsen_jax.training.metrics import _Console
from heinsen_jax.runtime.signals import Signals

class Gone(io.StringIO):
    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")

with Signals(60) as signals:
    _Console(file=Gone()).print("step 1")
print(signals.first, file=sys.stderr)
"""


def test_a_terminal_that_is_closed_while_it_is_written_to():
    """Its write fails before the signal arrives."""
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True)
    assert done.stderr == f"{int(signal.SIGHUP)}\n"


STILL_OPEN = """
import os, pty, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
number, terminal = pty.fork()
if number == 0:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    from heinsen_jax.training.metrics import _Console
    from heinsen_jax.runtime.signals import Signals
    with Signals(60) as signals:
        _Console().print("step 1")
    print(f"heard {signals.first}", file=sys.stderr, flush=True)
    os._exit(0)
said = b""
try:
    while part := os.read(terminal, 1 << 16):
        said += part
except OSError:  # its end
    pass
print(said.decode())
"""


def test_a_terminal_that_is_open_still_shows_errors():
    """Only the reader of the standard output has ended."""
    done = subprocess.run([sys.executable, "-c", STILL_OPEN], capture_output=True, text=True)
    assert f"heard {int(signal.SIGHUP)}" in done.stdout, done.stderr


@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_signals_ignored_by_nohup_or_a_shell_stay_ignored(number, ignored):
    program = f"""
import os, signal
signal.signal({number:d}, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
from heinsen_jax.runtime.signals import Signals
with Signals(60) as signals:
    os.kill(os.getpid(), {number:d})
    print(signals.first)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    kept = ignored and number != signal.SIGTERM  # sent by batch systems before they end a run
    assert done.stdout == f"{0 if kept else int(number)}\n"


def test_a_deadline_holds_while_python_is_blocked():
    """A blocked main thread, as in a collective operation, cannot handle signals."""
    program = """
import os, signal, threading, time
from heinsen_jax.runtime.signals import Signals
with Signals(0.3):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    lock = threading.Lock()
    lock.acquire()
    import ctypes
    ctypes.CDLL(None).sleep(20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 124  # and not 0, after 20 s


def test_a_preparation_that_is_interrupted_is_one_line_and_resumes(tmp_path):
    with (tmp_path / "text.jsonl").open("w") as file:
        for number in range(300_000):
            file.write(f'{{"text": "words of document {number}"}}\n')
    command = "-m", "heinsen_jax.data.prepare", "text.jsonl", "--output", "out"
    process = start(*command, cwd=tmp_path)
    wait_until(lambda: any((tmp_path / "out").glob("*.partial")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "\ninterrupted\n"
    assert not list((tmp_path / "out").glob("*.partial"))
    ((code, out, err),) = finish([start(*command, cwd=tmp_path)])
    assert code == 0, err
    assert sum(int(number) for number in re.findall(r"(\d+) documents", out)) == 300_000


STUDY = """
from dataclasses import replace
from tests.studies.small import BASE, SMALLER

def get_study():
    training = replace(BASE.training, steps={steps}, evaluate_every={steps}, checkpoint_every=5)
    return replace(SMALLER, base=replace(BASE, training=training))
"""


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


def children(parent: int) -> set[int]:
    """Return all descendants of a process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found |= {int(path.name), *children(int(path.name))}
    return found


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGKILL, -9, id="killed"),
        pytest.param(signal.SIGTERM, 143, id="stopped"),
    ],
)
def test_the_processes_of_a_study_end_with_it_and_it_resumes(tmp_path, number, code):
    (tmp_path / "small.py").write_text(STUDY.format(steps=200_000))
    command = "-m", "studies", "small.py", "--output", "out"
    study = start(*command, cwd=tmp_path, JAX_PLATFORMS="cpu")
    wait_until(lambda: any(map(has_checkpoint, (tmp_path / "out").glob("runs/*"))))
    left = children(study.pid)
    assert left
    study.send_signal(number)
    _, err = study.communicate(timeout=60)
    assert study.returncode == code, err
    assert "Traceback" not in err
    wait_until(lambda: not any(map(is_alive, left)), 20)
    again = start(*command, cwd=tmp_path, JAX_PLATFORMS="cpu")
    logs = [*(tmp_path / "out").glob("runs/*/log.txt")]
    wait_until(lambda: any("continuing" in log.read_text() for log in logs))
    again.terminate()
    again.communicate(timeout=60)
    assert again.returncode == 143


@pytest.mark.nightly
def test_a_folder_that_is_not_shared_is_refused(place, tmp_path):
    """Each host has a different folder under the same name."""
    for number in range(2):
        shutil.copytree(place, tmp_path / str(number), ignore=shutil.ignore_patterns("finished"))
    address = f"localhost:{free_port()}"
    processes = [
        start(
            *(str(ROOT / "train.py"), "--config", "tiny.py", "--workdir", "run"),
            *("--coordinator", address, "--num-processes", "2", "--process-id", str(number)),
            cwd=tmp_path / str(number),
            JAX_PLATFORMS="cpu",
        )
        for number in range(2)
    ]
    for code, _, err in finish(processes, timeout=120):
        assert code == 2
        assert_one_line(cleaned(err), "--workdir run is not shared by all processes")


DIFFERENT = {
    "--optimizer.learning_rate 0.5": "optimizer.learning_rate (0.5, not 0.01)",
    "--seed 7": "seed (7, not 0)",
    "--data.batch_size 16": "data.batch_size (16, not 8)",
    "--data.corpus other.txt": "the tokens of data.corpus",
    "--training.steps 50": "training.steps (50, not 40)",
    "--training.evaluate_every 7": "training.evaluate_every (7, not 20)",
    "--model.model_dim 32": "model.model_dim (32, not 16)",
    "--dry-run": "--dry-run (True, not False)",
}
SHORT = "--optimizer.learning_rate 0.5"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(*case, id=case[0], marks=[pytest.mark.nightly] * (case[0] != SHORT))
        for case in DIFFERENT.items()
    ],
)
def test_processes_that_differ_are_refused(place, tmp_path, arguments, words):
    (place / "other.txt").write_text("fed cba " * 1000)
    for code, _, err in pair(place, tmp_path, *arguments.split()):
        assert code == 2
        assert_one_line(cleaned(err), f"process 1 differs from process 0 in {words}")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data.corpus missing.txt", "input missing.txt does not exist"),
        pytest.param("--model.widht 3", "Unrecognized options", marks=pytest.mark.nightly),
    ],
)
def test_a_process_reports_why_its_peer_failed(place, tmp_path, arguments, words):
    (code, _, err), (other, _, own) = pair(place, tmp_path, *arguments.split())
    assert code == other == 2
    assert_one_line(cleaned(err), f"process 1 ended with: {words}")
    assert "process 1" not in own


def pair(place: Path, folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Run two processes, of which the second one has further arguments."""
    command = "--workdir", str(folder / "run")
    return finish(train(place, *command, processes=2, only_last=arguments), timeout=120)


def cleaned(err: str) -> str:
    """Remove messages of JAX's coordination service."""
    return "".join(x for x in err.splitlines(keepends=True) if not x.startswith(("I", "W")))


def test_source_and_versions_are_compared(place, monkeypatch):
    monkeypatch.chdir(place)
    config = load_config("tiny.py")
    names = identity(config, data.load(config.data)).keys()
    assert {"jax", "flax", "the source of heinsen_jax", "the tokens of data.corpus"} <= names
    assert "data.cache" not in names
    found = ['{"jax": "0.10.2", "seed": 0}', '{"jax": "0.12.0", "seed": 0}']
    monkeypatch.setattr(distributed, "gather", lambda text: found)
    with pytest.raises(UserError, match=r"process 1 .* in jax \('0.12.0', not '0.10.2'\)"):
        check_alike({})
