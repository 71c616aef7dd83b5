"""Sizes of meshes; tests/multi_device covers sharding."""

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from heinsen_jax.errors import UserError
from heinsen_jax.sharding import MeshConfig, make_mesh, spec

MESH = AbstractMesh((2, 4, 2, 1), ("data", "fsdp", "tensor", "context"))


def test_minus_one_means_the_remaining_devices():
    for axis in ("data", "fsdp", "tensor", "context"):
        mesh = make_mesh(MeshConfig(**{"data": 1, axis: -1}))
        assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}


@pytest.mark.parametrize("sizes", [(3, 1), (-1, 2), (0, 1), (-1, -1)])
def test_sizes_that_do_not_match_the_devices_are_refused(sizes):
    data, context = sizes
    with pytest.raises(UserError, match=r"do not multiply to 1, the number of devices"):
        make_mesh(MeshConfig(data=data, context=context))


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((16, 5, 6), ("batch", None, "heads"), (("data", "fsdp"), None, ("tensor",))),
        ((12, 6), ("batch", "embed"), (None, None)),  # 8 parts of 12 rows; 4 of 6 features
        ((8, 7), ("embed", "vocab"), (("fsdp",), None)),
        ((16, 8), ("tokens", "mlp"), (None, ("tensor",))),  # no axis of size 1 splits
    ],
)
def test_axes_are_split_if_devices_divide_them(shape, axes, expected):
    assert spec(MESH, shape, axes) == PartitionSpec(*expected)
