"""Command lines: train, kill, resume, generate, and errors."""

import base64
import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from flax import nnx

from heinsen_jax import evaluate
from heinsen_jax.generate.__main__ import main as write
from heinsen_jax.runs.load import load_run
from heinsen_jax.runtime import distributed
from heinsen_jax.train import main

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
from heinsen_jax.config import *

def get_config():
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=264, model_dim=16, num_layers=1, num_heads=2, attention="linear",
        ),
        data=DataConfig(corpus="words.txt", sequence_length=16, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        training=TrainingConfig(
            steps=200, evaluate_every=100, checkpoint_every=10, evaluation_batches=2,
            sample_tokens=5,
        ),
    )
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text and a configuration."""
    folder = tmp_path_factory.mktemp("place")
    draw = random.Random(0)
    (folder / "words.txt").write_text(
        " ".join(draw.choice(["abc", "de", "f"]) for _ in range(5000))
    )
    (folder / "tiny.py").write_text(CONFIG)
    return folder


def command(place: Path, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(place: Path, *arguments: str) -> tuple[int, str, str]:
    process = command(place, *arguments)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def train(*arguments: str) -> tuple[str, ...]:
    return (str(ROOT / "train.py"), "--config", "tiny.py", *arguments)


def test_help_lists_options_and_fields(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    assert main() == 0
    assert "--workdir" in (options := capsys.readouterr().out)
    assert "--model.num" not in options
    monkeypatch.setattr(sys, "argv", [*train("--help")])
    assert main() == 0
    shown = capsys.readouterr().out
    assert shown.startswith(options)
    assert len(shown) < 5300
    assert "--model.num-layers 1\n      Number of residual blocks." in shown
    assert "--model.key-depth" not in shown
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [*train("--help", "model")])
    assert main() == 0
    of_model = capsys.readouterr().out
    assert "--model.key-depth" in of_model
    assert "--workdir" not in of_model
    assert "decay: as standard" in of_model  # on different lines in the source
    assert "--data.corpus" not in of_model
    monkeypatch.setattr(sys, "argv", [*train("--help", "model.attention.gated_deltanet")])
    assert main() == 0
    of_mechanism = capsys.readouterr().out
    assert "arXiv:2412.06464" in of_mechanism
    assert "  convolution_size=4\n      Kernel size" in of_mechanism
    monkeypatch.setattr(sys, "argv", [*train("--help", "model.attention.deltanett")])
    assert main() == 2
    assert "choose one of log, softmax" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*train("--help", "modle")])
    assert main() == 2
    assert "choose one of model, data" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["train.py", "--dry-run"])
    assert main() == 2
    assert "--config is missing; give a name" in capsys.readouterr().err


def test_a_bucket_of_another_kind_is_refused(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", [*train("--workdir", "s3://bucket/run")])
    assert main() == 2
    assert "only buckets of Google Cloud Storage" in capsys.readouterr().err
    assert not (place / "s3:").exists()


def train_here(place: Path, workdir: str) -> str:
    """Run the command in this process; return its output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(distributed, "initialize", lambda *_, **__: None)  # only at the start
        patch.chdir(place)
        patch.setattr(sys, "argv", [*train("--workdir", workdir)])
        assert main() == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(place) -> str:
    return train_here(place, "whole")


def final_parameters(workdir: Path) -> list[bytes]:
    """Return the result of a finished run."""
    model, _, step = load_run(workdir, best=False)
    assert step == 200
    return [x.tobytes() for x in jax.tree.leaves(nnx.state(model))]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def validation_rows(workdir: Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    return [row for row in rows if "validation/loss" in row]


def test_training_prints_the_next_commands(trained):
    assert "compiling the update\ncompiled in " in trained
    assert "step 200/200  validation" in trained
    assert "a sample:" in trained
    assert "python -m heinsen_jax.generate --workdir whole" in trained


def test_the_readme_shows_what_training_prints(trained):
    readme = (ROOT / "README.md").read_text()
    lines = readme.partition("<!-- train-output -->\n```text\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 2

    def without_figures(text: str) -> str:
        return re.sub(r"\d[\d.,]*( [kMG]?B)?", "#", text)

    printed = without_figures(trained)
    for line in lines:
        assert without_figures(line) in printed, line


@pytest.mark.nightly
def test_a_killed_run_resumes_bit_for_bit(place, trained):
    workdir = place / "killed"
    process = command(place, *train("--workdir", "killed"))
    deadline = time.monotonic() + 200
    while not (workdir / "checkpoints" / "20").is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    out, _ = process.communicate()
    assert process.returncode == -9, "the run must have been killed, not have ended"
    assert "step 200/200" not in out
    said = train_here(place, "killed")
    assert "continuing killed from step" in said
    assert "changed since the last start" not in said
    assert final_parameters(workdir) == final_parameters(place / "whole")
    assert validation_rows(workdir) == validation_rows(place / "whole")


@pytest.mark.nightly
def test_sigterm_saves_and_exits_with_143(place, trained):
    process = command(place, *train("--workdir", "stopped"))
    while not (place / "stopped/checkpoints/10").is_dir():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "stopped by SIGTERM after step" in out
    assert "give the same command again" in out
    said = int(out.split("after step ")[1].split(",")[0])
    assert load_run(place / "stopped", best=False)[2] == said


@pytest.mark.nightly
def test_a_recorded_run_is_repeated_by_its_config(place, trained):
    module = ("-m", "heinsen_jax.train")  # run by train.py, and available without a clone
    arguments = (*module, "--config", "whole/config.json", "--workdir", "again")
    code, _, err = finish(place, *arguments)
    assert code == 0, err
    assert final_parameters(place / "again") == final_parameters(place / "whole")


def said_by(main, place, monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line, called in this process."""
    monkeypatch.setattr(distributed, "initialize", lambda *_, **__: None)  # only at the start
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def generate(*arguments: str) -> tuple[str, ...]:
    return ("--workdir", "whole", *arguments)


def test_generate_continues_a_prompt_the_same_way_for_the_same_seed(
    place, trained, monkeypatch, capsys
):
    texts = []
    for seed in ("1", "1", "2"):
        options = generate("--prompt", "abc d", "--max-new-tokens", "40", "--seed", seed)
        code, out, _ = said_by(write, place, monkeypatch, capsys, *options)
        assert code == 0
        assert out.startswith("abc d")
        assert len(out) == 5 + 40 + 1
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("option", ["--max-batches", "--sequence-length", "--batch-size"])
def test_evaluate_checks_its_options_before_it_reads_a_model(place, monkeypatch, capsys, option):
    arguments = "--workdir", "nowhere", option, "0"
    code, _, error = said_by(evaluate.main, place, monkeypatch, capsys, *arguments)
    assert code == 2
    assert f"{option} 0 must be at least 1" in error


def test_evaluate_measures_what_training_did(place, trained, monkeypatch, capsys):
    last = validation_rows(place / "whole")[-1]
    arguments = "--workdir", "whole", "--latest", "--max-batches", "2"
    code, out, _ = said_by(evaluate.main, place, monkeypatch, capsys, *arguments)
    assert code == 0
    where = "the validation text of words.txt, 1,501 tokens, of which the first 2 batches"
    assert f"whole, step 200, on {where}:" in out
    for name in ("loss", "perplexity", "bits_per_byte"):
        said = float(out.split(f"{name.replace('_', ' ')}: ")[1].split()[0])
        assert said == pytest.approx(last[f"validation/{name}"], abs=1e-4)
    again = *arguments, "--data", str(place / "words.txt")  # what it was trained on
    assert said_by(evaluate.main, place, monkeypatch, capsys, *again)[1] == out
    (place / "other.txt").write_text("abc de f " * 100)
    arguments = "--workdir", "whole", "--latest", "--data", "other.txt"
    code, out, _ = said_by(evaluate.main, place, monkeypatch, capsys, *arguments)
    assert code == 0
    assert "on other.txt, 901 tokens:" in out  # all of it, and an end


TINY = "--config", "tiny.py"


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (main, (*TINY, "--model.num_heads", "3"), ["num_heads=3 does not divide model_dim=16"]),
        (
            main,
            (*TINY, "--model.num_layers", "two"),
            ["error: --model.num-layers two: not an integer; give digits"],
        ),
        (
            main,
            (*TINY, "--training.steps", "0"),
            ["error: --training.steps: Input should be greater than 0"],
        ),
        (
            main,
            (*TINY, "--training.stepz", "9"),
            ["options: --training.stepz, 9; perhaps --training.steps", "is meant"],
        ),
        (
            main,
            (*TINY, "--training.stepz", "9", "--model.layerz", "3"),
            ["--training.steps", "--model.num-layers", "is meant"],
        ),
        (main, (*TINY, "--learning_rate", "3"), ["perhaps --optimizer.learning-rate is meant"]),
        (main, (*TINY, "--optimizer.learning_rate", "-1"), ["--optimizer.learning-rate: "]),
        (main, (*TINY, "--wrong", "3"), ["options: --wrong, 3; --help SECTION lists"]),
        (
            main,
            (*TINY, "--model.attention", "lgo"),
            ["--model: attention mechanism 'lgo': unknown"],
        ),
        (main, (*TINY, "--model.remat", "False"), ["a switch has no value: ", "--model.no-remat"]),
        (main, (*TINY, "--data.sequence_length", "20000"), ["sequence_length=20000 needs 20001"]),
        (main, (*TINY, "--data.corpus", "missing.txt"), ["missing.txt"]),
        (main, (*TINY, "--data.corpus", "empty.txt"), ["empty.txt"]),
        (main, (*TINY, "--model.vocab_size", "100"), ["model.vocab_size=100", "at least 257"]),
        (
            main,
            (*TINY, "--workdir", "whole", "--model.num_layers", "3"),
            ["num_layers is 3 here, 1 there"],
        ),
        (
            main,
            (*TINY, "--workdir", "whole", "--data.tokenizer", "few.tiktoken"),
            ["tokenizer"],
        ),
        (
            main,
            (*TINY, "--workdir", "words.txt/run"),
            ["words.txt/run", "cannot be written"],
        ),
        (main, ("--config", "none.py"), ["none.py", "no such file"]),
        (main, ("--config", "quick"), ["quick: no such file", "quickstart"]),
        (write, generate("--prompt", ""), ["--prompt is empty"]),
        (write, generate("--prompt", "a", "--temperature", "0"), ["temperature=0"]),
        (write, generate("--prompt", "a", "--top-k", "300"), ["top_k=300"]),
        (write, ("--workdir", "no no", "--prompt", "a"), ["no no holds no run", "'no no'`"]),
        (write, ("--workdir", ".", "--prompt", "a"), ["give one of the folders in it", "whole"]),
        (write, ("--workdir", "words.txt", "--prompt", "a"), ["words.txt is a file; give"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(
    place, trained, main, arguments, words, monkeypatch, capsys
):
    (place / "empty.txt").write_text("")
    (place / "few.tiktoken").write_text(
        "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in reversed(range(256)))
    )
    before = contents(place / "whole")
    code, _, err = said_by(main, place, monkeypatch, capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert contents(place / "whole") == before
    assert not (place / "runs" / "tiny" / "config.json").exists()


def test_a_run_of_a_recorded_configuration_is_named_after_that_run(
    place, trained, monkeypatch, capsys
):
    arguments = "--config", "whole/config.json", "--training.steps", "10"
    code, _, err = said_by(main, place, monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert (place / "runs/whole/config.json").exists()
    shutil.rmtree(place / "runs")


def test_a_mistake_in_a_separate_process_prints_no_traceback(place):
    code, out, err = finish(place, *train("--model.num_layer", "2"))
    assert code == 2
    assert out == ""
    assert err.startswith(
        "error: Unrecognized options: --model.num_layer, 2; perhaps --model.num-l"
    )
    assert err.count("\n") == 1
