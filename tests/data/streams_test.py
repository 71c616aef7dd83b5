"""The limit of what a compressed file expands to counts all of it."""

import io
from contextlib import nullcontext

import pytest

from heinsen_jax.data import streams
from heinsen_jax.data.streams import Expansion
from heinsen_jax.errors import UserError


@pytest.mark.parametrize(("size", "is_refused"), [(999, False), (1000, False), (1001, True)])
def test_blocks_add_up_to_the_limit(monkeypatch, size, is_refused):
    monkeypatch.setattr(streams, "UNLIMITED_BYTES", 100)
    monkeypatch.setattr(streams, "MAX_EXPANSION", 10)
    expansion = Expansion("a.gz", lambda: 100)
    for _ in range(9):
        expansion.add(100)
    refusal = pytest.raises(UserError, match="expands to more than 10 times its size")
    with refusal if is_refused else nullcontext():
        expansion.limit(io.BytesIO(b"x" * (size - 900))).read()


def test_a_small_file_may_expand_without_a_limit(monkeypatch):
    monkeypatch.setattr(streams, "UNLIMITED_BYTES", 100)
    Expansion("a.gz", lambda: 0).add(100)
    with pytest.raises(UserError, match="expands"):
        Expansion("a.gz", lambda: 0).add(101)
