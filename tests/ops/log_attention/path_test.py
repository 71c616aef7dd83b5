"""From a public function to the innermost product of the fast tier: at most 8 calls, in 4 files."""

import inspect
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import heinsen_jax
from heinsen_jax.attention import heinsen_attention, log_attention
from heinsen_jax.ops.log_attention import Chunked, fast

PACKAGE = str(Path(heinsen_jax.__file__).parent)


@pytest.mark.parametrize("op", [log_attention, heinsen_attention])
@pytest.mark.parametrize("block_size", [None, 16], ids=["one block", "blocks"])
def test_calls_down_to_a_product(op, block_size, monkeypatch):
    paths, code = [], inspect.unwrap(op).__code__

    def einsum(pattern, *factors):
        frame, path = sys._getframe(1), []
        while frame.f_code is not code:
            if frame.f_code.co_filename.startswith(PACKAGE):
                path.append(frame.f_code.co_filename)
            frame = frame.f_back
        paths.append([*path, code.co_filename])
        return jnp.einsum(pattern, *factors)

    monkeypatch.setattr(fast, "einsum", einsum)
    x = jnp.zeros((48, 1, 3))  # a shape that no other test compiles
    op(x, x, x, implementation=Chunked(chunk_size=16, block_size=block_size))
    assert paths
    longest = max(paths, key=len)
    assert len(longest) - 1 <= 8, longest
    assert len({*longest}) <= 4, longest
