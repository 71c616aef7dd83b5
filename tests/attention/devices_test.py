"""Mechanisms on a mesh of devices that do not exist: the part of each one; tests/multi_device
computes with virtual devices."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments
from heinsen_jax.ops import LinearAttentionState, linear_attention

ROWS, LENGTH, HEADS, DEPTH = 4, 6, 4, 3
SIZES = {"data": 2, "tensor": 2, "context": 3}
TOKENS = jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS, DEPTH), jnp.float32)
EMPTY = LinearAttentionState.empty((ROWS,), HEADS, DEPTH, DEPTH)


def shapes_of(calls: list, x: jax.Array, segment_ids: jax.Array | None, state=None):
    """Call linear attention; append the shapes of its queries and segments on each device."""

    def op(query, *others, **options):
        if options["is_causal"]:  # not to compute a state alone
            ids = options.get("segment_ids")
            calls.append((query.shape, None if ids is None else ids.shape))
        return linear_attention(query, *others, **options)

    call = CallArguments(segment_ids=segment_ids, state=state)
    return devices.recur(call, op, x, x, x, empty=EMPTY)


def on_mesh(sizes: dict[str, int], function, *arguments):
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(function, *arguments)


def test_each_device_has_its_own_rows_tokens_heads_and_segments():
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    calls: list = []
    y, state = on_mesh(SIZES, partial(shapes_of, calls), TOKENS, ids)
    assert set(calls) == {((2, 2, 2, DEPTH), (2, 2))}
    assert (y.shape, state) == (TOKENS.shape, None)
    calls.clear()
    y, state = on_mesh(SIZES, partial(shapes_of, calls), TOKENS, None, EMPTY)
    assert set(calls) == {((2, 2, 2, DEPTH), None)}
    assert y.shape == TOKENS.shape
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, EMPTY)


def test_heads_that_devices_do_not_divide_are_refused():
    message = "3 devices that split heads do not divide 4 heads"
    with pytest.raises(ValueError, match=message):
        on_mesh({"tensor": 3}, partial(shapes_of, []), TOKENS, None)
