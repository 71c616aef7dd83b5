"""Packaging: wheel, source archive, changelog, workflows."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import heinsen_jax

ROOT = Path(__file__).resolve().parents[1]
CACHES = re.compile(
    r"__pycache__|\.pyc$|\.egg-info|(^|/)\.(venv|pytest_cache|ruff_cache|hypothesis)"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return a folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_the_wheel_contains_types_and_configurations_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(x.relative_to(ROOT)) for x in (ROOT / "heinsen_jax").rglob("*.py")}
    files = (x for kind in ("*.py", "*.json") for x in (ROOT / "configs").rglob(kind))
    configs = {f"heinsen_jax/{x.relative_to(ROOT)}" for x in files}
    assert len(configs) > 10
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == package | configs | {"heinsen_jax/py.typed"}


def run_from(wheel, folder, *arguments: str) -> str:
    """Run the installed trainer outside a checkout; return its output."""
    zipfile.ZipFile(wheel).extractall(folder / "site")
    done = subprocess.run(
        [sys.executable, "-m", "heinsen_jax.train", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_finds_its_configurations_outside_a_checkout(wheel, tmp_path):
    said = run_from(wheel, tmp_path, "--config", "quickstart", "--help")
    assert "--model.num-layers 4" in said


@pytest.mark.nightly
def test_the_wheel_trains_outside_a_checkout(wheel, tmp_path):
    (tmp_path / "words.txt").write_text("abc de f " * 1000)
    small = "--model.num_layers 1 --model.model_dim 16 --data.corpus words.txt"
    short = "--training.steps 2 --training.evaluate_every 2 --optimizer.warmup_steps 1"
    said = run_from(wheel, tmp_path, "--config", "quickstart", *small.split(), *short.split())
    assert "step 2/2" in said
    assert (tmp_path / "runs/quickstart/checkpoints/2").is_dir()


def test_the_source_archive_is_the_checkout(built):
    (archive,) = built.glob("*.tar.gz")
    top = f"heinsen_jax-{heinsen_jax.__version__}/"
    with tarfile.open(archive) as opened:
        names = {name.removeprefix(top) for name in opened.getnames()}
    assert not [name for name in names if CACHES.search(name)]
    needed = {"README.md", "LICENSE", "pyproject.toml", "constraints.txt", "train.py", ".ci/run"}
    assert names >= needed | {"PKG-INFO", "heinsen_jax/py.typed", "docs/training.md"}
    for folder in ("tests", "configs", "benchmarks", "notebooks", "scripts", "heinsen_jax"):
        here = {str(x.relative_to(ROOT)) for x in (ROOT / folder).rglob("*") if x.is_file()}
        assert {name for name in here if not CACHES.search(name)} <= names


def test_the_changelog_has_this_version():
    headings = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {"Unreleased", heinsen_jax.__version__} & {name for name, _ in headings}
    for name, rest in headings:
        if name != "Unreleased":
            assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d{2}-\d{2}", f"{name}{rest}")
    assert f"version: {heinsen_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_imported_packages_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {normal(re.split(r"[\[<>=;]", line)[0]) for lines in lists for line in lines}
    imported = set()
    for path in (ROOT / "heinsen_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    providers = importlib.metadata.packages_distributions()
    for name in imported - sys.stdlib_module_names - {"heinsen_jax"}:
        assert {normal(distribution) for distribution in providers[name]} & declared, name


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_continuous_integration_runs_the_documented_commands():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = [x.rpartition(" ")[2] for x in project["classifiers"] if ":: Python ::" in x]
    assert [job["python"] for job in jobs] == promised
    for page in ("README.md", "docs/install.md"):
        assert f"Python {promised[0]} to {promised[-1]}" in (ROOT / page).read_text()
    for job in jobs:
        (script,) = (word for word in job["command"].split() if word.startswith(".ci/"))
        assert os.access(ROOT / script, os.X_OK)
    yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
