"""Refusals of ops on explicit axes, and the axes that annotations name; results are in
tests/multi_device/explicit_test.py."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from heinsen_jax import ops
from heinsen_jax.ops import dot_product_attention, linear_attention, log_attention
from heinsen_jax.ops.devices import Axis, annotations_of, leaf_axes
from tests.ops.catalogue import near_edges

MESH = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
ELSEWHERE = {"edge_counts", "orthogonal_features", "over_context", "sharded_log_attention"}
"""Functions without sequences, or for the inside of `jax.shard_map`."""
BY_ELEMENT = {"taylor_features", "log_linear_recurrence"}
"""Functions that JAX's own operations split."""
WITH_FUNCTIONS = {"conditional_attention", "conditional_feed_forward", "segment_recurrence"}
"""Ops that call functions of the user, whose arrays keep their types."""


def heads(count: int, *spec: str | None) -> jax.ShapeDtypeStruct:
    where = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct((8, 16, count, 4), jnp.float32, sharding=where)


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        (
            heads(8, None, "a"),
            heads(8),
            r"query \[8, .* is split over a along axis 1; only",
        ),
        (heads(8), heads(8, None, None, None, "b"), "key .* is split over b along axis 3; only"),
        (
            heads(8, "a"),
            heads(8, "b"),
            "key .* over b along axis 0, another argument over a;",
        ),
        (heads(8, "b"), heads(8, None, None, "b"), "b splits two axes, such as sequences and"),
        (heads(8, None, None, "b"), heads(2), "4 devices of b do not divide 2 key/value heads"),
        (heads(8, None, None, "b"), heads(8, None, None, "a"), "query heads .* over b, .* over a"),
    ],
)
def test_other_splits_are_refused(query, key, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(linear_attention, query, key, key)


def test_shapes_that_do_not_fit_are_refused_by_the_op():
    query, key = heads(8, "a"), heads(8, "a")
    key = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32, sharding=key.sharding)
    with pytest.raises(ValueError, match=r"batch axes .* equal: query .*, key \(8, 16, 4\)"):
        jax.eval_shape(linear_attention, query, key, key)


def test_arguments_that_are_whole_are_split_like_the_others():
    query, key = heads(8, "a", None, "b"), heads(4)
    y, state = jax.eval_shape(
        lambda query, key: linear_attention(query, key, key, return_state=True), query, key
    )
    assert y.sharding.spec == PartitionSpec("a", None, "b", None)
    assert state.s.sharding.spec == PartitionSpec("a", "b", None, None)


def test_one_key_value_head_serves_all_devices():
    y = jax.eval_shape(log_attention, heads(8, None, None, "b"), heads(1), heads(1))
    assert y.sharding.spec == PartitionSpec(None, None, "b", None)


def test_a_state_of_shared_heads_is_equal_on_all_devices():
    query, key = heads(8, "a", None, "b"), heads(1, "a")
    _, state = jax.eval_shape(
        lambda query, key: log_attention(query, key, key, return_state=True), query, key
    )
    assert state.log_s.sharding.spec == PartitionSpec("a", None, None, None)


def test_arguments_that_change_are_not_remembered():
    mesh = jax.make_mesh((1,), ("a",))
    x = jax.device_put(np.ones((2, 4, 1, 4), np.float32), NamedSharding(mesh, PartitionSpec("a")))
    positions = np.arange(4)
    before = ops.rotary(x, positions)
    positions += 5
    assert not np.allclose(ops.rotary(x, positions), before)
    places = [0]
    options = {"local_window_size": 1, "global_positions": places, "is_causal": True}
    value = x * jnp.arange(4.0).reshape(1, 4, 1, 1)
    before = ops.longformer_attention(x, x, value, **options)
    places.append(1)
    assert not np.allclose(ops.longformer_attention(x, x, value, **options), before)


@pytest.mark.parametrize("shape", [(8, 8, 16, 16), (1, 1, 16, 16), (8, 16, 16), (16, 16), (16,)])
def test_a_mask_broadcasts_over_sequences_and_heads(shape):
    query = heads(8, "a", None, "b")
    mask = jax.ShapeDtypeStruct(shape, bool, sharding=NamedSharding(MESH, PartitionSpec()))
    y = jax.eval_shape(lambda x, mask: dot_product_attention(x, x, x, mask=mask), query, mask)
    assert y.sharding.spec == PartitionSpec("a", None, "b", None)


def test_axes_follow_from_annotations():
    annotations = annotations_of(linear_attention)
    x = jnp.zeros((2, 3, 5, 4, 8))
    assert leaf_axes(x, annotations["query"], 2) == [
        (Axis("B", 0), Axis("B", 1), Axis("T"), Axis("N"), Axis("K"))
    ]
    assert leaf_axes(jnp.zeros((2, 3, 2), int), annotations["key_value_seq_lengths"], 2)[0][:2] == (
        Axis("B", 0),
        Axis("B", 1),
    )


@pytest.mark.parametrize("name", sorted(BY_ELEMENT))
def test_functions_of_elements_keep_the_sharding(name):
    x = heads(8, "a", None, "b")
    options = {"taylor_features": {"num_terms": 3, "scale": 1.0}}.get(name, {"axis": 1})
    arguments = (x,) if name == "taylor_features" else (x, x)
    y = jax.eval_shape(lambda *x: getattr(ops, name)(*x, **options), *arguments)
    assert y.sharding.spec == PartitionSpec("a", None, "b", None)


def test_a_recurrence_splits_the_initial_state_like_its_inputs():
    y = jax.eval_shape(recurrence, heads(8, "a", None, "b"), heads(8, "a", None, "b"), heads(8))
    assert y.sharding.spec == PartitionSpec("a", None, "b", None)


def test_branches_of_the_user_keep_their_arrays():
    x = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32, sharding=heads(8, "a").sharding)
    weight = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=heads(8).sharding)

    def apply(x: jax.Array, weight: jax.Array) -> jax.Array:
        routing = ops.route(x.sum(-1), 4)
        y = ops.conditional_feed_forward(x, lambda x: x, lambda x: x @ weight, routing)
        y = ops.conditional_attention(y, lambda x: x, lambda x, *_: x @ weight, routing, routing)
        return ops.segment_recurrence(lambda x: x @ weight, y, weight[:2], segment_length=4)

    assert jax.eval_shape(apply, x, weight).sharding.spec == PartitionSpec("a", None, None)


def scan(query: jax.Array, key: jax.Array, log_decay: jax.Array) -> jax.Array:
    return log_attention(query, key, key, log_decay=-log_decay[..., 0], implementation="scan")


def recurrence(log_inputs: jax.Array, log_coefficients: jax.Array, initial: jax.Array) -> jax.Array:
    initial = initial[:, 0]
    y = ops.log_linear_recurrence(log_coefficients, log_inputs, initial=initial, axis=1)
    return y + ops.log_linear_recurrence(log_coefficients, log_inputs, axis=1)


@pytest.mark.parametrize(
    "op", [recurrence, scan, near_edges, dot_product_attention, linear_attention]
)
@pytest.mark.parametrize("index", range(3))
def test_devices_may_share_arguments(op, index):
    """Inside the user's `jax.shard_map`, where types say which arrays vary over devices."""
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 16, 4, 4), jnp.float32)
    specs = [PartitionSpec("a") if index == i else PartitionSpec() for i in range(3)]
    arrays = [
        x if index == i else jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for i in range(3)
    ]

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *x: jnp.sum(op(*x)), argnums=(0, 1, 2))(*arrays)

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=tuple(specs), out_specs=tuple(specs))
    assert [x.shape for x in jax.eval_shape(mapped, *arrays)] == [x.shape for x in arrays]


def test_every_op_is_decorated():
    functions = {x for x in map(partial(getattr, ops), ops.__all__) if inspect.isfunction(x)}
    plain = {x.__name__ for x in functions if not inspect.getsource(x).startswith("@")}
    assert plain == ELSEWHERE | BY_ELEMENT | WITH_FUNCTIONS - {"segment_recurrence"}
