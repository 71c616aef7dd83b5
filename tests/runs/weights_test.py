"""Weights in files: shards hold every array once, and damage is detected."""

import jax
import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.runs.weights import check_finite, load_weights, save_weights

ARRAYS = {f"layer {n}": np.arange(n, n + 4, dtype=np.float32) for n in range(5)}  # of 16 bytes
SHAPES = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in ARRAYS.items()}


@pytest.mark.parametrize(("shard_bytes", "files"), [(79, 2), (80, 1), (32, 3), (1, 5)])
def test_shards_have_at_most_their_size_and_all_arrays(shard_bytes, files, tmp_path):
    save_weights(tmp_path, ARRAYS, step=7, shard_bytes=shard_bytes)
    assert len([*tmp_path.glob("*.safetensors")]) == files
    arrays, step = load_weights(tmp_path, SHAPES)
    assert step == 7
    assert arrays.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], x)


def test_a_changed_byte_is_detected(tmp_path):
    save_weights(tmp_path, ARRAYS, step=7)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="its content has another hash"):
        load_weights(tmp_path, SHAPES)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value, tmp_path):
    check_finite(np.ones(3), "w", tmp_path, "")
    with pytest.raises(UserError, match="tensor w has NaN or infinite values"):
        check_finite(np.array([1.0, value]), "w", tmp_path, "")
