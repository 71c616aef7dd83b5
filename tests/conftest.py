"""What every test runs under: no implicit rank promotion; float64 and golden cases on request.

Nearly all the time of tests is compilation. So what is compiled is kept, also for further runs, in
`.pytest_cache/jax` (`rm -r .pytest_cache` clears it), and it is compiled with few optimisations,
but for modules that use `as_users_compile`. JAX 0.10 still has older emitters of fusions, which
compile log-attention in a quarter of the time: there tests use them, elsewhere the newer ones.
Garbage is collected seldom, for tracing makes many objects that live on.
"""

import gc
import lzma
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

CHECKED = [
    "heinsen_jax.attention",
    "heinsen_jax.config",
    "heinsen_jax.data",
    "heinsen_jax.distributed",
    "heinsen_jax.environment",
    "heinsen_jax.evaluate",
    "heinsen_jax.generate",
    "heinsen_jax.interop",
    "heinsen_jax.models",
    "heinsen_jax.on_ray",
    "heinsen_jax.ops",
    "heinsen_jax.sharding",
    "heinsen_jax.study",
    "heinsen_jax.training",
    "heinsen_jax.typing",
]
TYPECHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
jaxtyping.install_import_hook(CHECKED, TYPECHECKER)

ROOT = Path(__file__).resolve().parents[1]
GOLDEN_FOLDER = ROOT / "tests" / "golden"

MOST_MEMORY_MAPS = 20_000  # Linux allows 65,530

SETTINGS = {
    "jax_compilation_cache_dir": str(ROOT / ".pytest_cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_disable_most_optimizations": True,
}
for setting, chosen in SETTINGS.items():
    jax.config.update(setting, chosen)
    os.environ[setting.upper()] = str(chosen)  # of processes that tests start

if jax.__version_info__ < (0, 11):  # read when the first function is compiled
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(200_000, 20, 50)

# The first example of a test pays for its compilation.
hypothesis.settings.register_profile("compiled", deadline=None)
hypothesis.settings.load_profile("compiled")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups first: at the end one worker would be left alone with a long one."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(autouse=True)
def forget_compiled_functions() -> Iterator[None]:
    """Thousands of compiled CPU functions exhaust a process's memory maps: XLA then crashes."""
    yield
    if memory_maps() > MOST_MEMORY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_functions_of_a_module() -> Iterator[None]:
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def as_users_compile() -> Iterator[None]:
    """For modules about numbers, which optimisations may change."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def memory_maps() -> int:
    """How many this process has; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Runs a test as users run the package, without checks of annotations: for errors that the
    package itself raises for values of wrong types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def x64() -> Iterator[None]:
    """Runs a test with 64-bit types. Inside a test, `with jax.enable_x64(True)` does the same."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Mapping[str, np.ndarray]]:
    """`golden(name)`: the arrays of one file of results of the original implementations."""

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
