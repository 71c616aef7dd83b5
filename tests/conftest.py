"""Settings and fixtures of all tests: no implicit rank promotion; float64 and golden files on
request.

Tests spend most time on compilation. Compiled functions are therefore cached across runs in
`.pytest_cache/jax` (`rm -r .pytest_cache` clears it), and compiled with few optimizations, except
in modules that use `as_users_compile`. JAX 0.10 still has older fusion emitters, which compile
log-attention in a quarter of the time: tests use them there, without parallel code generation, as
all cores run tests, and the newer ones elsewhere. A file runs in one process, in which its tests
share compiled functions. Garbage is collected rarely, since tracing creates many long-lived
objects.
"""

import gc
import lzma
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

from tests.changed import affected, changed_files
from tests.multi_device.apart import free_port

CHECK_TYPES = "CHECK_TYPES"
"""Environment variable with which annotations are checked at run time, for about 15% more time."""
CHECKED = [
    *(f"heinsen_jax.{name}" for name in ("attention", "config", "data", "evaluate", "generate")),
    *(f"heinsen_jax.{name}" for name in ("goom", "interop", "linearize", "models", "objectives")),
    *(
        f"heinsen_jax.{name}"
        for name in ("ops", "runs", "runtime", "sharding", "storage", "training")
    ),
    *("heinsen_jax.training", "heinsen_jax.typing", "studies"),
]
TYPECHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
if os.environ.get(CHECK_TYPES):
    jaxtyping.install_import_hook(CHECKED, TYPECHECKER)

ROOT = Path(__file__).resolve().parents[1]
GOLDEN_FOLDER = ROOT / "tests" / "golden"

REPOSITORY = {
    *("docs", "docstrings_test", "language_test", "site_test", "notebooks_test", "mutations_test"),
    *("packaging_test", "scripts_test", "benchmarks_test", "compile_size_test"),
}
"""Files and folders of tests about the repository more than about what the package computes."""

SLOW = {*(ROOT / "tests/slow_tests.txt").read_text().splitlines()}
"""Tests that need 0.5 s and more, and that no fault of `fault_catalogue.py` needs."""
LONGEST = {"linearize_test", "transformers_test", "explicit_test", "engine_test", "packaging_test"}
"""Files with the longest tests."""
ALL_TESTS = pytest.StashKey[set[str]]()
"""Names of all tests that were collected."""
SHORT_TESTS = pytest.StashKey[int]()
"""Number of short tests."""

MAX_MEMORY_MAPS = 20_000  # Linux allows 65,530

SETTINGS = {
    "jax_compilation_cache_dir": str(ROOT / ".pytest_cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_disable_most_optimizations": True,
}
for setting, chosen in SETTINGS.items():
    jax.config.update(setting, chosen)
    os.environ[setting.upper()] = str(chosen)  # for processes that tests start

if jax.__version_info__ < (0, 11):  # read at the first compilation
    flags = "--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(200_000, 20, 50)

# The first example of a test pays for its compilation.
hypothesis.settings.register_profile("compiled", deadline=None)
hypothesis.settings.load_profile("compiled")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed",
        action="store_true",
        help="only tests that depend on the files changed since main",
    )


@cache
def affected_files() -> set[str]:
    try:
        return affected(changed_files("main"))
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError(f"--changed needs git and a branch main ({error})") from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--changed") or collection_path.is_dir():
        return None
    return str(collection_path.relative_to(ROOT)) not in affected_files() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests and repository tests. Run long files first: otherwise one worker may run one
    of them alone at the end."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker("nightly")
        if REPOSITORY & {*item.path.relative_to(ROOT).with_suffix("").parts}:
            item.add_marker("repository")
    marks = ({mark.name for mark in item.iter_markers()} for item in items)
    config.stash[ALL_TESTS] = {item.nodeid for item in items}
    config.stash[SHORT_TESTS] = sum(not names & {"nightly", "repository"} for names in marks)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Thousands of compiled CPU functions exhaust a process's memory maps: XLA then crashes."""
    is_new_module = nextitem is None or nextitem.path != item.path
    if is_new_module or memory_maps() > MAX_MEMORY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def as_users_compile() -> Iterator[None]:
    """Compile with all optimizations: for modules about numerics, which these may change."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def memory_maps() -> int:
    """Return the number of memory maps of this process; 0 if unknown."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Run a test without checks of annotations, as users do: for errors that the package itself
    raises."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def x64() -> Iterator[None]:
    """Run a test with 64-bit types, like `with jax.enable_x64(True)` inside a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Mapping[str, np.ndarray]]:
    """Return `golden(name)`: the arrays of one file with results of the original
    implementations."""

    def load(name: str) -> Mapping[str, np.ndarray]:
        with np.load(GOLDEN_FOLDER / f"{name}.npz") as arrays:
            return dict(arrays)

    return load


@pytest.fixture(scope="session")
def published_data(tmp_path_factory) -> Path:
    """A folder with the corpus `tinyshakespeare.txt` and GPT-2's vocabulary `gpt2.tiktoken`."""
    folder = tmp_path_factory.mktemp("published")
    for file in GOLDEN_FOLDER.glob("*.xz"):
        (folder / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
    return folder


@pytest.fixture(scope="session")
def emulator() -> Iterator[dict[str, str]]:
    """Yield the environment variables that lead clients to an emulator of Google Cloud Storage."""
    port = free_port()
    command = [sys.executable, str(ROOT / "tests/emulator.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        address, deadline = f"http://localhost:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/storage/v1/b?project=test").close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the emulator did not start"
                time.sleep(0.1)
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GOOGLE_CLOUD_PROJECT": "test",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # needs credentials
        }
        server.kill()


@pytest.fixture
def bucket(emulator, monkeypatch, tmp_path) -> str:
    """Return the address of an empty folder in a bucket, for this process and its children."""
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    return f"gs://bucket/{tmp_path.name}"
