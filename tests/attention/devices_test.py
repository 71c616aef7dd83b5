"""Mechanisms on a mesh of devices that do not exist: the part of each one; tests/multi_device
computes with virtual devices."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import CallArguments
from heinsen_jax.attention.matrix_state import delta_rule
from heinsen_jax.ops import LinearAttentionState, MatrixState, linear_attention
from heinsen_jax.ops.gated_delta_rule import matrix_summary

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


@pytest.mark.parametrize(("key_heads", "on_device"), [(1, 1), (2, 1), (4, 2)])
def test_heads_of_values_share_queries_and_keys_on_each_device(key_heads, on_device):
    keys = jax.ShapeDtypeStruct((ROWS, LENGTH, key_heads, DEPTH), jnp.float32)
    empty = MatrixState.empty((ROWS,), HEADS, DEPTH, DEPTH)
    calls = []

    def op(query, key, value, *, is_causal, **options):
        del is_causal
        calls.append((query.shape[-2], key.shape[-2], value.shape[-2]))
        return delta_rule(query, key, value, **options)

    def attend(key, value):
        call = CallArguments(segment_ids=None, state=empty)
        return devices.recur(call, op, key, key, value, empty=empty, summary=matrix_summary)

    y, state = on_mesh({"data": 2, "tensor": 2}, attend, keys, TOKENS)
    assert set(calls) == {(on_device, on_device, HEADS // 2)}
    assert (y.shape, state.matrix.shape) == (TOKENS.shape, empty.matrix.shape)


def test_heads_that_devices_do_not_divide_are_refused():
    message = "3 devices that split heads do not divide 4 heads"
    with pytest.raises(ValueError, match=message):
        on_mesh({"tensor": 3}, partial(shapes_of, []), TOKENS, None)


@pytest.mark.parametrize(("length", "on_device"), [(6, 6), (8, 2)])
def test_tokens_of_several_steps_are_split_by_whole_tokens(length, on_device):
    """Four devices divide the 12 steps of 6 tokens, but not these."""
    query = jax.ShapeDtypeStruct((ROWS, length, HEADS, DEPTH), jnp.float32)
    steps = jax.ShapeDtypeStruct((ROWS, 2 * length, HEADS, DEPTH), jnp.float32)
    calls = []

    def op(query, key, value, *, is_causal, **options):
        del is_causal
        calls.append((query.shape[1], key.shape[1]))
        return delta_rule(query, key, value, num_steps=2, **options)

    def attend(query, key):
        empty = MatrixState.empty((ROWS,), HEADS, DEPTH, DEPTH)
        call = CallArguments(segment_ids=None, state=None)
        summary = partial(matrix_summary, num_steps=2)
        return devices.recur(call, op, query, key, key, empty=empty, summary=summary)

    on_mesh({"data": 1, "context": 4}, attend, query, steps)
    assert set(calls) == {(on_device, 2 * on_device)}
