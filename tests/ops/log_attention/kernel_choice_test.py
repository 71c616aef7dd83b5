"""GPU kernels in programs: where they are the default, on meshes, and for other devices."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax import ops
from heinsen_jax.ops import log_attention
from heinsen_jax.ops.log_attention import mosaic
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.mosaic import parts

KERNEL = "custom_call @mosaic_gpu"
by_kernel = partial(log_attention, implementation="gpu")
GPU = {"device_kind": "NVIDIA H200", "compute_capability": "9.0", "platform": "gpu"}
MEASURED = {"batch": 64, "length": 1024, "heads": 16, "depth": 32, "dtype": "bfloat16"}
MEASURED |= {"op": "log_attention", "gpus": 1, "switch": "1", "keyword": None, **GPU}
KEYWORDS = {
    "return_state": lambda x: True,
    "is_causal": lambda x: False,
    "local_window_size": lambda x: 20,
    "segment_ids": lambda x: jnp.zeros(x.shape[:2], jnp.int32),
    "log_decay": lambda x: jnp.zeros(x.shape[:3]),
}


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "is_available", lambda: True)


def kernels_in(function: Callable, *arrays: Any) -> int:
    """Number of kernels in a program for an NVIDIA GPU."""
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count(KERNEL)


def total(op: Callable) -> Callable:
    return lambda x: jnp.sum(op(x, x, x).astype(jnp.float32))


def explicit(x: jax.Array, mesh: jax.sharding.Mesh) -> int:
    with jax.set_mesh(mesh):
        return kernels_in(jax.grad(total(by_kernel)), jax.device_put(x, jax.P("data")))


def manual(x: jax.Array, mesh: jax.sharding.Mesh) -> int:
    split = jax.shard_map(
        lambda x: by_kernel(x, x, x), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
    )
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    return kernels_in(jax.grad(lambda x: jnp.sum(split(x).astype(jnp.float32))), x)


@pytest.mark.parametrize("program", [explicit, manual])
@pytest.mark.parametrize("length", [128, 1024], ids=["whole", "in parts"])
@pytest.mark.usefixtures("available")
def test_kernels_on_a_mesh(program, length):
    mesh = jax.make_mesh((1,), ("data",))
    assert program(jnp.zeros((2, length, 2, 32), jnp.bfloat16), mesh) == 3


@pytest.mark.usefixtures("available")
def test_kernels_under_vmap():
    x = jnp.zeros((2, 3, 128, 2, 32), jnp.bfloat16)
    assert kernels_in(jax.vmap(lambda x: by_kernel(x, x, x), in_axes=1), x) == 1


@pytest.mark.usefixtures("available")
def test_programs_for_other_devices_have_no_kernels():
    """Not even the program for a CPU on a machine with a GPU."""
    x = jax.random.normal(jax.random.key(0), (2, 70, 2, 32))

    def gradients(op: Callable) -> Callable:
        return jax.jit(jax.value_and_grad(total(op)))

    for have, want in zip(gradients(by_kernel)(x), gradients(log_attention)(x), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "is_chosen"),
    [
        ({}, True),
        ({"depth": 64}, True),
        ({"depth": 128}, False),
        ({"batch": 7, "length": 8192}, False),
        ({"batch": 32}, False),
        ({"batch": 65, "length": 1023}, False),
        ({"dtype": "float32"}, False),
        ({"switch": "0"}, False),
        ({"device_kind": "NVIDIA B200"}, False),
        ({"gpus": 2}, False),
        ({"op": "heinsen_attention"}, False),
        *(({"keyword": name}, name == "return_state") for name in KEYWORDS),
    ],
    ids=str,
)
def test_kernels_are_the_default_where_they_were_measured_to_be_faster(
    changes, is_chosen, monkeypatch
):
    case = MEASURED | changes
    gpu = SimpleNamespace(**{name: case[name] for name in GPU})
    monkeypatch.setattr(mosaic.jax, "devices", lambda *_: [gpu] * case["gpus"])
    monkeypatch.setenv(mosaic.SWITCH, case["switch"])
    shape = case["batch"], case["length"], case["heads"], case["depth"]
    x = jax.ShapeDtypeStruct(shape, case["dtype"])
    op, name = getattr(ops, case["op"]), case["keyword"]

    def call(x: jax.Array) -> Any:
        return op(x, x, x, **({name: KEYWORDS[name](x)} if name else {}))

    assert kernels_in(call, x) == is_chosen


def test_grouped_heads_have_no_kernels_by_default(monkeypatch):
    monkeypatch.setattr(mosaic.jax, "devices", lambda *_: [SimpleNamespace(**GPU)])
    shapes = (64, 1024, 16, 32), (64, 1024, 8, 32), (64, 1024, 8, 32)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    assert kernels_in(log_attention, *arrays) == 0


def test_gpus_of_other_makers_are_no_error(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="MI300X")
    monkeypatch.setattr(mosaic.jax, "devices", lambda *_: [gpu])
    assert not mosaic.is_available()
    x = jax.ShapeDtypeStruct((64, 1024, 16, 32), jnp.bfloat16)
    assert jax.eval_shape(log_attention, x, x, x).shape == x.shape


@pytest.mark.parametrize("heads", [1, 8])
def test_all_numbers_of_tokens_can_be_split(heads, available):
    """Into parts of whole chunks, as many in the forward as in the backward pass."""

    def gradients(inputs: Inputs, state: Averages) -> Any:
        call = partial(mosaic.Fused().causal, is_log=True)
        outputs, pullback = jax.vjp(call, inputs, state)
        return outputs, pullback(outputs)

    for length in (1, 1921, 2881, 5200):
        tokens = jax.ShapeDtypeStruct((1, length, heads, 32), jnp.float32)
        query = jax.ShapeDtypeStruct((1, length, heads, 1, 32), jnp.float32)
        sizes = (1, heads, 32), (1, heads, 32, 32)
        state = Averages(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in sizes))
        inputs = Inputs(query, tokens, tokens)
        number = parts.number_of_parts(inputs)
        assert number * heads <= max(parts.PROGRAMS, heads)
        (y, _, _), (d_inputs, _) = jax.eval_shape(gradients, inputs, state)
        assert y.shape == query.shape
        assert d_inputs.key.shape == tokens.shape
