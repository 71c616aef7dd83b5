"""Sizes of meshes; tests/multi_device covers sharding."""

import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.sharding import MeshConfig, make_mesh


def test_minus_one_means_the_remaining_devices():
    for axis in ("data", "fsdp", "tensor", "context"):
        mesh = make_mesh(MeshConfig(**{"data": 1, axis: -1}))
        assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}


@pytest.mark.parametrize("sizes", [(3, 1), (-1, 2), (0, 1), (-1, -1)])
def test_sizes_that_do_not_match_the_devices_are_refused(sizes):
    data, context = sizes
    with pytest.raises(UserError, match=r"do not multiply to 1, the number of devices"):
        make_mesh(MeshConfig(data=data, context=context))
