"""Files of PyTorch itself, if installed; `torch_test` uses files written by its specification."""

import jax
import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.interop.pickled import read_pickled
from heinsen_jax.interop.torch import from_file, from_state_dict, to_file, to_state_dict
from tests.interop.torch_test import arrays, assert_same

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
torch_files = pytest.importorskip("safetensors.torch")

WHOLE = torch.arange(48, dtype=torch.float32).reshape(6, 8)
TENSORS = {
    "whole": WHOLE,
    "transposed": WHOLE.t(),
    "every other": WHOLE[1:4, ::2],
    "one row many times": WHOLE[2].expand(3, 2, 8),
    "parameter": torch.nn.Parameter(WHOLE[0]),
    "one number": torch.tensor(3.0),
    "nothing": torch.zeros(0, 3),
    **{
        str(dtype): torch.tensor([1, 0, 2]).to(dtype)
        for dtype in (
            *(torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
            *(torch.int8, torch.int16, torch.int32, torch.int64),
        )
    },
}


@pytest.mark.parametrize("protocol", [2, 5])
def test_tensors(protocol, tmp_path):
    torch.save({"model": TENSORS, "step": 3}, tmp_path / "all.pt", pickle_protocol=protocol)
    found = read_pickled(tmp_path / "all.pt")
    assert found["step"] == 3
    for name, want in TENSORS.items():
        have = found["model"][name]
        assert (have.shape, f"torch.{have.dtype}") == (tuple(want.shape), str(want.dtype))
        np.testing.assert_array_equal(have.astype(float), want.detach().double(), err_msg=name)


def test_a_state_dict_survives_conversion(tmp_path):
    tensors = {name: torch.from_numpy(x) for name, x in arrays().items()}
    torch.save(tensors, tmp_path / "model.pt")
    model = from_file(tmp_path / "model.pt", num_heads=2)
    assert_same(to_state_dict(model), arrays())
    to_file(model, tmp_path / "model.safetensors")
    written = torch_files.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written.pop(name), x) for name, x in tensors.items())
    assert not written


def test_tensors_are_arrays():
    with jax.enable_x64(True):
        tensors = {name: torch.from_numpy(x).double() for name, x in arrays().items()}
        found = to_state_dict(from_state_dict(tensors, num_heads=2))
    assert_same(found, {name: x.numpy() for name, x in tensors.items()})


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(3, dtype=torch.complex64), "ComplexFloatStorage"),
        (torch._neg_view(WHOLE), "neg"),
        (torch.nn.Linear(2, 2), "Linear"),
    ],
    ids=["sparse", "complex", "negated", "module"],
)
def test_other_objects_are_refused(tensor, name, tmp_path):
    torch.save({"x": tensor}, tmp_path / "other.pt")
    with pytest.raises(UserError, match=rf"other\.pt holds .*{name}.*, which is not read; save"):
        read_pickled(tmp_path / "other.pt")
