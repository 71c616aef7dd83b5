"""Scripts for clusters, and the Dockerfile: they are valid, and do what the documentation says."""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jupytext
import pytest
import yaml

from heinsen_jax.config import load_config, override

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(x for x in (ROOT / "scripts").iterdir() if x.suffix in {".sh", ".yaml"})
PAGES = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("pods", "install"))
PILE = "--config configs/heinsen_125m_pile.py --workdir /runs/pile --mesh.fsdp 8"


def usage(path: Path) -> list[str]:
    """Return the commands of the comment at the start of a file."""
    head = path.read_text().partition("\n\n")[0]
    return re.findall(r"^#     (.*)$", head, re.MULTILINE)


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Write programs for a test, and return an environment that finds them."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_shell_scripts_have_no_findings():
    shells = [path for path in SCRIPTS if path.suffix == ".sh"]
    command = [Path(sys.executable).with_name("shellcheck"), *shells, *(ROOT / ".ci").iterdir()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert all(os.access(path, os.X_OK) for path in shells)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_documentation_has_the_command_of_each_script(path):
    command = usage(path)[0]
    assert f"\n{command}\n" in PAGES
    assert f"scripts/{path.name}" in command


def test_commands_of_the_documentation_are_valid():
    for command in re.findall(r"^(?:sbatch )?scripts/\S+ .*$", PAGES, re.MULTILINE):
        _, _, options = command.partition("--config ")
        config, *overrides = shlex.split(options)
        i = overrides.index("--workdir")
        override(load_config(ROOT / config), overrides[:i] + overrides[i + 2 :])


@pytest.mark.parametrize(("code", "queued"), [(143, True), (124, False)])
def test_slurm_queues_a_run_again_that_was_saved_at_the_time_limit(tmp_path, code, queued):
    env = programs(
        tmp_path / "bin",
        srun=f'echo "$@" > arguments; trap "exit {code}" TERM; echo $$ > pid; sleep 60 & wait',
        scancel='echo "$@" > cancelled; kill -TERM "$(cat pid)"',
        scontrol='echo "$@" > control',
    )
    command = ["bash", ROOT / "scripts/slurm.sh", *PILE.split()]
    env["SLURM_JOB_ID"] = "17"
    job = subprocess.Popen(command, cwd=tmp_path, env=env)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == code
    assert (tmp_path / "arguments").read_text() == f".venv/bin/python train.py {PILE}\n"
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 17\n"
    assert (tmp_path / "control").exists() == queued
    if queued:
        assert (tmp_path / "control").read_text() == "requeue 17\n"


@pytest.mark.parametrize("code", [0, 2, 143])
def test_slurm_does_not_queue_other_runs_again(tmp_path, code):
    env = programs(tmp_path / "bin", srun=f"exit {code}", scontrol="touch control")
    command = ["bash", ROOT / "scripts/slurm.sh", *PILE.split()]
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == code
    assert not (tmp_path / "control").exists()


def test_the_tpu_script_installs_the_commit_and_trains_on_all_hosts(tmp_path):
    call = "import json, sys; print(json.dumps(sys.argv[1:]))"
    record = f'{shlex.quote(sys.executable)} -c "{call}" "$@" >> "$CALLS"'
    env = programs(tmp_path / "bin", gcloud=record, git='echo "$@" > "$CALLS.git"')
    env["CALLS"] = str(tmp_path / "calls")
    arguments = "v6", "zone-a", *PILE.split(), "--training.sample_prompt", "it's $HOME"
    subprocess.run([ROOT / "scripts/tpu_vm.sh", *arguments], env=env, check=True)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    copied, installed, trained = calls
    assert copied[3] == "scp"
    assert (tmp_path / "calls.git").read_text().startswith("archive --prefix=heinsen_jax/")
    for call in calls:
        assert {"--zone=zone-a", "--worker=all"} <= {*call}
    assert '-c constraints.txt -e ".[tpu,gcs]"' in installed[-1]
    command = trained[-1].removeprefix("--command=").partition(" && ")[2]
    assert shlex.split(command) == [".venv/bin/python", "train.py", *arguments[2:]]


def test_the_jobset_has_one_process_per_host_and_stops_at_invalid_input():
    spec = yaml.safe_load((ROOT / "scripts/gke_jobset.yaml").read_text())["spec"]
    (group,) = spec["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"] * job["parallelism"]
    width, height = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert chips == int(width) * int(height)
    assert job["completions"] == job["parallelism"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    config, *overrides = (argument.split("=") for argument in container["args"])
    assert config[0] == "--config"
    flags = [word for flag in overrides if flag[0] != "--workdir" for word in flag]
    assert override(load_config(config[1]), flags).mesh.fsdp == chips


def test_the_dockerfile_installs_the_pinned_package_and_trains_the_quickstart():
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    steps = [tuple(line.split(" ", 1)) for line in lines]
    assert {name for name, _ in steps} == {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "CMD"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [x for name, rest in steps if name == "COPY" for x in rest.split()[:-1]]
    kept = (ROOT / ".dockerignore").read_text().split()
    assert kept == ["*", *(f"!{name}" for name in copied), "**/__pycache__"]
    assert {"pyproject.toml", "constraints.txt", project["readme"], "LICENSE"} <= {*copied}
    assert all((ROOT / name).exists() for name in copied)
    version = dict(x.split("=") for name, x in steps if name == "ARG")["PYTHON"]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    for extra in re.findall(r"EXTRAS=(\w+)", text):
        assert extra in project["optional-dependencies"]
    command = json.loads(dict(steps)["CMD"])
    assert command == ["python", "-m", "heinsen_jax.train", "--config", "quickstart"]
    for line in usage(ROOT / "Dockerfile")[:2]:
        assert line in PAGES


def test_badges_open_each_notebook_in_colab_and_are_replaced(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    add_badges = importlib.import_module("colab_badges").add_badges
    script = tmp_path / "1_by_hand.py"
    before = (ROOT / "notebooks" / script.name).read_text()
    script.write_text(before)
    add_badges("someone/first", tmp_path)
    add_badges("someone/second", tmp_path)
    text = script.read_text()
    assert "first" not in text.partition("# # 1. The mechanism")[0]
    header, own = before.split("\n# ---\n\n")
    assert text.startswith(header)
    assert text.endswith(own)
    badge, install, title = jupytext.read(script.with_suffix(".ipynb")).cells[:3]
    assert f"github/someone/second/blob/main/notebooks/{script.stem}.ipynb" in badge.source
    assert "git clone --quiet --depth 1 https://github.com/someone/second" in install.source
    exec(install.source, {})  # does nothing here
    assert title.source.startswith("# 1. The mechanism by hand")
    with pytest.raises(ValueError, match="must be of the form OWNER/NAME"):
        add_badges("heinsen_jax", tmp_path)
