"""Sizes of meshes; tests/multi_device covers sharding."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from heinsen_jax.attention import build
from heinsen_jax.errors import UserError
from heinsen_jax.sharding import MeshConfig, make_mesh, shardings, spec

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


@pytest.mark.parametrize("name", ["mla", "rwkv7", "kda", "mamba2"])
def test_hardly_any_parameters_are_replicated(name):
    """Products of low rank, keys of one group and matrices of heads are split, too."""
    mesh = AbstractMesh((1, 2, 1, 1), ("data", "fsdp", "tensor", "context"))
    layer = nnx.eval_shape(lambda: build(name, model_dim=256, num_heads=4, rngs=nnx.Rngs(0)))
    state = nnx.state(layer, nnx.Param)
    split = jax.tree.leaves(shardings(state, mesh))
    sizes = [x.size for x in jax.tree.leaves(state)]
    replicated = [size for size, x in zip(sizes, split, strict=True) if x.is_fully_replicated]
    assert sum(replicated) < 0.02 * sum(sizes)


def test_a_rank_that_devices_do_not_divide_is_replicated():
    mesh = AbstractMesh((1, 3, 1, 1), ("data", "fsdp", "tensor", "context"))
    variable = nnx.Param(jnp.zeros((4, 6)), logical_axes=("rank", None))
    (split,) = jax.tree.leaves(shardings(variable, mesh))
    assert split.is_fully_replicated
    variable = nnx.Param(jnp.zeros((4, 6)), logical_axes=("embed", None))
    with pytest.raises(UserError, match=r"mesh\.fsdp=3 does not divide a parameter axis of 4"):
        shardings(variable, mesh)
