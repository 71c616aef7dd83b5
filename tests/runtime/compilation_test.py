"""Compiled functions are cached on disk."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from heinsen_jax.runtime import compilation
from heinsen_jax.runtime.compilation import cache_compilations

NAMES = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    """Start as a user's program does, and restore the settings of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation, "MIN_SECONDS", 0.0)
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_something(number: int) -> None:
    def something(x):
        return x + number

    jax.jit(something).lower(jnp.ones(number)).compile()


def test_functions_are_cached_in_the_users_folder_by_default(tmp_path):
    compile_something(3)  # the first compilation must not disable the cache
    cache_compilations()
    compile_something(5)
    assert len([*tmp_path.glob("heinsen_jax/*/jit_something-*-cache")]) == 1


def test_entries_of_a_killed_process_are_removed(tmp_path):
    cache_compilations()
    compile_something(7)
    (entry,) = tmp_path.glob("heinsen_jax/*/jit_something-*-cache")
    entry.with_name(entry.name.replace("-cache", "-atime")).unlink()
    jax.config.update("jax_compilation_cache_dir", None)
    cache_compilations()
    assert not entry.exists()
    jax.clear_caches()
    compile_something(7)
    assert entry.exists()


def test_a_folder_that_is_set_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    cache_compilations()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    cache_compilations(tmp_path / "given")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "heinsen_jax").write_text("a file")
    with pytest.warns(match=r"heinsen_jax/.* cannot be written .*: compiled functions are not"):
        cache_compilations()
    assert jax.config.jax_compilation_cache_dir is None
