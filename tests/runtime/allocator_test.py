"""Memory that is freed by the CPU client is kept for its next computation."""

import os
import subprocess
import sys

import pytest

from heinsen_jax.runtime.allocator import keep_freed_memory

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from heinsen_jax.runtime.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if "keep" in sys.argv:
    assert keep_freed_memory()
x = jnp.ones((10, 1 << 20))  # 40 MiB
step = jax.jit(lambda x: jnp.cumsum(jnp.tanh(x), 0).T @ jnp.ones((10, 10)))
for _ in range(3):
    step(x).block_until_ready()
before = faults()
for _ in range(10):
    step(x).block_until_ready()
print(faults() - before)
"""


def faults(*arguments: str) -> int:
    """Page faults of 10 computations in a new process."""
    names = "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"
    environment = {x: value for x, value in os.environ.items() if not x.startswith(names)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_computations_reuse_memory():
    assert faults("keep") < faults() / 2


def test_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()
