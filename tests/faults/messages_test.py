"""Mistakes of the user and hostile input end with one line that names the fix, and exit code 2."""

import errno
import io
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from heinsen_jax import chat, evaluate
from heinsen_jax.config import ExperimentConfig, load_config, override
from heinsen_jax.errors import UserError, command_line, printable
from heinsen_jax.generate import __main__ as generate
from heinsen_jax.runs.folder import open_run
from heinsen_jax.runtime import distributed
from heinsen_jax.storage.locks import locked
from heinsen_jax.training.metrics import Reporter
from studies import __main__ as study
from studies import runs
from studies.results import Recorded


class PanicException(BaseException):
    """Stands for the exception of libraries in Rust, which is no Exception."""


SLIPS = {  # mistaken arguments, and what the message must have
    # other names
    "--lr 1": "--optimizer.learning-rate is meant",
    "--optimizer.lr 1": "--optimizer.learning-rate is meant",
    "-lr 1": "--optimizer.learning-rate is meant",
    "--batch-size 8": "--data.batch-size is meant",
    "--bs 8": "--data.batch-size is meant",
    "--n-layers 2": "--model.num-layers is meant",
    "--n_layer 2": "--model.num-layers is meant",
    "--num-hidden-layers 2": "--model.num-layers is meant",
    "--seq-len 64": "--data.sequence-length is meant",
    "--max_seq_length 64": "--data.sequence-length is meant",
    "--block-size 64": "--data.sequence-length is meant",
    "--max-steps 5": "--training.steps is meant",
    "--training.max_iters 5": "--training.steps is meant",
    "--num-epochs 5": "--training.steps is meant",
    "--wd 0": "--optimizer.weight-decay is meant",
    "--max-grad-norm 1": "--optimizer.clip-norm is meant",
    "--gradient-accumulation-steps 2": "--training.accumulation-steps is meant",
    "--d-model 8": "--model.model-dim is meant",
    "--hidden-size 8": "--model.model-dim is meant",
    "--n-heads 2": "--model.num-heads is meant",
    "--warmup 5": "--optimizer.warmup-steps is meant",
    "--dataset text.txt": "--data.corpus is meant",
    "--data text.txt": "--data.corpus is meant",
    "--eval-steps 5": "--training.evaluate-every is meant",
    "--save-steps 5": "--training.checkpoint-every is meant",
    "--bf16": "--model.dtype is meant",
    "--random-seed 1": "--seed is meant",
    "--output-dir runs": "--workdir is meant",
    "--optimizer.betas 0.9 0.95": "--optimizer.beta1 or --optimizer.beta2 is meant",
    "--dropout 0.1": "models have no dropout",
    "--resume": "the same command resumes a run",
    "--model.window 5": "--model.attention gqa:num_kv_heads=2",
    # British spelling, abbreviations and misspellings
    "--optimiser.learning-rate 1": "--optimizer.learning-rate is meant",
    "--optimiser adamw": "--optimizer.name is meant",
    "--data.tokeniser bytes": "--data.tokenizer is meant",
    "--train.steps 5": "--training.steps is meant",
    "--optim.lr 1": "--optimizer.learning-rate is meant",
    "--model.attn softmax": "--model.attention is meant",
    "--data.sequence_lenght 5": "--data.sequence-length is meant",
    "--workdi runs": "--workdir is meant",
    # the wrong section, or none
    "--learning-rate 1": "perhaps --optimizer.learning-rate is meant",
    "--training.learning-rate 1": "perhaps --optimizer.learning-rate is meant",
    "--model.batch-size 1": "perhaps --data.batch-size is meant",
    "--steps 5": "perhaps --training.steps is meant",
    "--training-steps 5": "perhaps --training.steps is meant",
    "--Training.Steps 5": "perhaps --training.steps is meant",
    # the wrong form
    "optimizer.learning_rate=1": "perhaps --optimizer.learning-rate 1 is meant",
    "foo": "options have the form --section.field VALUE",
    "--training.steps 5 6": "--training.steps has one value: leave out 6",
    "--training.steps": "--training.steps: the value is missing; write --training.steps 1000",
    "--model.remat True": "a switch has no value",
    "--model.remat=1": "a switch has no value",
    "--no-model.remat": "--model.no-remat is meant",
    # wrong types and choices
    "--training.steps ten": "--training.steps ten: not an integer; give digits",
    "--training.steps 1e3": "not an integer; write --training.steps 1000",
    "--training.steps 1,000": "not an integer; write --training.steps 1000",
    "--training.evaluation-batches x": "--training.evaluation-batches x: not an integer or None",
    "--optimizer.learning-rate fast": "--optimizer.learning-rate fast: not a number",
    "--optimizer.learning-rate inf": "--optimizer.learning-rate: ",
    "--optimizer.ema-decay x": "--optimizer.ema-decay x: not a number or None",
    "--optimizer.name adam": "choose one of adamw, muon, lion; perhaps adamw is meant",
    "--optimizer.schedule cosine": "perhaps one_cycle is meant",
    "--model.dtype bf16": "perhaps bfloat16 is meant",
    "--data.test-lengths a": "--data.test-lengths a: a value has the wrong type",
    "--data.mixture a 0.7 b": "pairs of a corpus and its weight, as in --data.mixture A 0.7 B 0.3",
    "--data.mixture a=0.7": "--data.mixture: a=0.7: must be pairs",
    "--data.mixture-stages 1": "--data.mixture-stages cannot be given on a command line",
    # out of range
    "--training.steps 99999999999999999999": "--training.steps: ",
    "--model.num-layers 99999999999999999999": "model.num_layers=99999999999999999999 is out of",
    "--seed 9223372036854775808": "seed=9223372036854775808 is out of range",
    "--seed -1": "--seed: ",
}


@pytest.mark.parametrize("arguments", SLIPS)
def test_a_slip_is_answered_with_the_fix(arguments):
    with pytest.raises(UserError) as caught:
        override(ExperimentConfig(), arguments.split())
    message = str(caught.value)
    assert SLIPS[arguments] in message
    assert "\n" not in message
    assert len(message) < 250
    assert "Got errors" not in message


def test_a_name_without_a_likely_field_gets_no_suggestion():
    with pytest.raises(UserError, match=r"Unrecognized options: --foo, 3; --help SECTION lists"):
        override(ExperimentConfig(), ["--foo", "3"])


HOSTILE = "a\x1b[31mb\x07\x7f\x9b\u202e\u2066\r\udcff"
ESCAPED = r"a\x1b[31mb\x07\x7f\x9b\u202e\u2066\r\udcff"


def exits(monkeypatch, capsys, main, *arguments: str) -> tuple[int, str]:
    """The exit code and the error of a command."""
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    code = main()
    return code, capsys.readouterr().err


def fails_with(error: BaseException):
    @command_line
    def main() -> None:
        raise error

    return main


def test_control_characters_are_escaped():
    assert printable(HOSTILE) == ESCAPED
    assert printable("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
    assert printable("a\n\tb") == r"a\n\tb"
    assert printable("é → 日本 \u200f") == "é → 日本 \u200f"


def test_errors_and_warnings_are_printed_without_control_characters(monkeypatch, capsys):
    @command_line
    def main() -> None:
        warnings.simplefilter("always")
        warnings.warn(HOSTILE, stacklevel=1)
        raise UserError(f"{HOSTILE}\n: wrong")

    code, err = exits(monkeypatch, capsys, main)
    assert code == 2
    assert err == f"warning: {ESCAPED}\nerror: {ESCAPED}\\n: wrong\n"


def test_the_owner_of_a_lock_is_printed_without_control_characters(monkeypatch, capsys, tmp_path):
    @command_line
    def main() -> None:
        with locked(tmp_path):
            pass

    with locked(tmp_path):
        (tmp_path / ".lock").write_text('{"pid": 1, "host": "\\u001b[2J", "start": "\\u202e"}')
        code, err = exits(monkeypatch, capsys, main)
    assert code == 2
    assert r"process 1 on \x1b[2J, since \u202e" in err
    assert "\x1b" not in err


def test_lines_of_a_run_are_printed_without_control_characters(capsys, tmp_path):
    with Reporter(tmp_path, start_step=0, steps=1) as reporter:
        reporter.line(f"a sample:\n\t{HOSTILE}")
    out = capsys.readouterr().out
    assert "a sample:\n" in out
    assert f"{ESCAPED}\n" in out


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            type("PanicException", (BaseException,), {})("index out of bounds"),
            "index out of bounds",
        ),
        (MemoryError("Unable to allocate 9 TiB"), "out of memory (Unable to allocate 9 TiB)"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"), "out of memory (RESOURCE"),
        (RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm"), "out of memory (RESOURCE"),
        (RecursionError("maximum recursion depth"), "nested too deeply"),
        (OverflowError("Python int too large to convert to C long"), "out of range"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "give UTF-8"),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", "\x1bx"),
            r"\x1bx: Is a directory; give",
        ),
        (PermissionError(errno.EACCES, "Permission denied", b"x"), "x: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), "a: File name too long"),
        (OSError(errno.ENOSPC, "No space left on device"), "free space, and try again"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "",
)
def test_errors_of_input_are_one_line(monkeypatch, capsys, error, words):
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    code, err = exits(monkeypatch, capsys, fails_with(error))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    "error", [TypeError("bug"), OSError(errno.EIO, "I/O error"), SystemExit(3)]
)
def test_other_errors_keep_their_tracebacks(error):
    with pytest.raises(type(error)):
        fails_with(error)()


def test_a_panic_in_one_process_ends_the_others(monkeypatch):
    sent = []
    monkeypatch.setattr(distributed, "gather", sent.append)
    with pytest.raises(PanicException), distributed.together():
        raise PanicException("index")
    with pytest.raises(KeyboardInterrupt), distributed.together():
        raise KeyboardInterrupt
    assert sent == ["PanicException('index')"]


def test_a_panic_in_a_run_of_a_study_is_an_error_of_that_run(monkeypatch, tmp_path):
    def fail(*_):
        raise PanicException("index")

    monkeypatch.setattr(runs, "run_one", fail)
    with pytest.raises(UserError, match=r"cannot process the input \(index\)"):
        runs._run_in_pool([], tmp_path)


def test_a_closed_pipe_is_noticed_although_the_output_is_buffered(monkeypatch):
    @command_line
    def main() -> None:
        print("a line")

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main() == 141


def test_characters_that_stdout_lacks_are_escaped(monkeypatch):
    @command_line
    def main() -> None:
        print("→ \udcff")

    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, "ascii"))
    assert main() == 0
    assert content.getvalue() == b"\\u2192 \\udcff\n"


@pytest.fixture
def special(tmp_path) -> list[Path]:
    """A pipe, a device and a folder, with names of files."""
    paths = [tmp_path / name for name in ("pipe.py", "zero.py", "folder.py")]
    os.mkfifo(paths[0])
    paths[1].symlink_to("/dev/zero")
    paths[2].mkdir()
    return paths


def test_pipes_devices_and_folders_are_no_files(special, tmp_path, monkeypatch, capsys):
    """Reading them would not end, or fail with a traceback."""
    for path in special:
        for read in (load_config, Recorded):
            with pytest.raises(UserError, match="not a file; give a file"):
                read(path)
        code, err = exits(monkeypatch, capsys, study.main, str(path))
        assert (code, err.count("\n")) == (2, 1)
    for path in special[:2]:
        folder = tmp_path / path.stem
        folder.mkdir()
        (folder / "config.json").symlink_to(path)
        with (
            pytest.raises(UserError, match=r"config\.json is a pipe or a device"),
            open_run(folder),
        ):
            pass
        for main, more in ((generate.main, ("--prompt", "a")), (evaluate.main, ())):
            code, err = exits(monkeypatch, capsys, main, "--workdir", str(folder), *more)
            assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"def get_config(:", "line 1: SyntaxError"),
        (b"x = '\xff'", "line 1: SyntaxError"),
        (b"import nothing_here", "line 1: ModuleNotFoundError: No module named 'nothing_here'"),
        (b"def get_config():\n    return 1 / 0", "line 2: ZeroDivisionError"),
    ],
)
def test_an_error_in_a_configuration_file_is_one_line(tmp_path, source, words):
    path = tmp_path / "config.py"
    path.write_bytes(source)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}, {words}")


def test_a_prompt_that_is_not_utf8_is_refused(monkeypatch, capsys):
    arguments = "--workdir", "missing", "--prompt", "a\udcff"
    code, err = exits(monkeypatch, capsys, generate.main, *arguments)
    assert (code, err) == (
        2,
        "error: --prompt: byte 0xff at character 2 is not UTF-8; leave it out\n",
    )


@pytest.mark.parametrize(
    ("main", "option"),
    [
        (generate.main, "--seed"),
        (generate.main, "--max-new-tokens"),
        (generate.main, "--num-samples"),
        (chat.main, "--seed"),
        (chat.main, "--max-new-tokens"),
        (evaluate.main, "--sequence-length"),
        (evaluate.main, "--max-batches"),
        (evaluate.main, "--batch-size"),
    ],
)
def test_integers_out_of_range_are_named(monkeypatch, capsys, main, option):
    arguments = ["--workdir", "missing", option, "9" * 20]
    arguments += ["--prompt", "a"] if main is generate.main else []
    code, err = exits(monkeypatch, capsys, main, *arguments)
    assert code == 2
    assert re.fullmatch(rf"error: {option} 9{{20}} is (too large|out of range); give .*\n", err)


def test_results_replace_no_file(monkeypatch, capsys, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text("mine")
    for path in (tmp_path, mine):
        arguments = "--workdir", "missing", "--tasks", "x", "--output", str(path)
        code, err = exits(monkeypatch, capsys, evaluate.main, *arguments)
        assert (code, err) == (2, f"error: --output {path} exists; give the name of a new file\n")


def test_too_many_jobs_are_refused(monkeypatch, capsys):
    code, err = exits(monkeypatch, capsys, study.main, "recall", "--jobs", "5000")
    assert code == 2
    assert err.startswith("error: --jobs 5000: each is a process of JAX, and this machine has ")
    assert "give at most " in err


def test_processes_are_at_most_the_runs(monkeypatch):
    """No process waits until a pipe is read."""
    pools = []

    class Pool:
        def __init__(self, jobs, context, initializer, arguments) -> None:
            pools.append((jobs, arguments[1]))

        def __enter__(self):
            raise InterruptedError

        def __exit__(self, *_) -> None: ...

    monkeypatch.setattr(runs, "ProcessPoolExecutor", Pool)
    run = object.__new__(runs.Run)
    with pytest.raises(InterruptedError):
        next(runs.in_processes([run] * 3, lambda _: Path(), 10**6))
    assert pools == [(3, 3)]
