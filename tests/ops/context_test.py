"""Sequences that are split over devices, which `jax.vmap` stands in for: three parts of them give
the values, the state and the gradients of the whole; tests/multi_device has real devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from heinsen_jax.ops import LogAttentionState, context, log_attention
from heinsen_jax.ops.log_attention import sharded_log_attention

DEVICES, LENGTH, AXIS = 3, 4, "context"
SEGMENTS = {
    "a part within a segment": [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2],
    "a segment that begins a part": [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2],
    "an id again": [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0],
}


def split(x: np.ndarray) -> np.ndarray:
    return x.reshape(DEVICES, LENGTH, *x.shape[1:])


@pytest.fixture
def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (2, 2), (1, 2), (1, 3)  # queries, keys, values
    return [rng.standard_normal((DEVICES * LENGTH, *x)).astype(np.float32) for x in shapes]


@pytest.fixture(autouse=True)
def gather_in_vmap(monkeypatch):
    """Types of `shard_map` do not exist in `vmap`."""

    def gather(tree, axis_name: str, to: str):
        return jax.tree.map(lambda x: lax.all_gather(x, axis_name), tree)

    monkeypatch.setattr(context, "_all_gather", gather)


def results(arrays, *, is_split: bool, is_causal: bool = True, **given):
    """Values, the state after them, and gradients with respect to the arrays."""
    options = {"is_causal": is_causal, "return_state": True, "implementation": "reference"}
    state = given.pop("initial_state", None)

    def call(arrays, given):
        return log_attention(*arrays, **given, **options, initial_state=state)

    def call_split(arrays, given):
        arrays, given = jax.tree.map(split, (arrays, given))
        one = partial(sharded_log_attention, axis_name=AXIS, initial_state=state, **options)
        y, after = jax.vmap(lambda arrays, given: one(*arrays, **given), axis_name=AXIS)(
            arrays, given
        )
        return y.reshape(-1, *y.shape[2:]), jax.tree.map(lambda x: x[0], after)

    def loss(arrays, given):
        y, after = (call_split if is_split else call)(arrays, given)
        return jnp.sum(jnp.sin(y)) + jnp.sum(after.log_z), (y, after)

    return jax.jit(jax.grad(loss, has_aux=True))(arrays, given)


def assert_split_equals_whole(arrays, **given):
    have, want = (results(arrays, is_split=x, **given) for x in (True, False))
    for one, other in zip(*map(jax.tree.leaves, (have, want)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_parts_continue_from_the_initial_state(arrays, is_causal):
    _, key, value = arrays
    state = LogAttentionState.empty((), 1, 2, 3).absorb(key[:2], value[:2])
    assert_split_equals_whole(arrays, is_causal=is_causal, initial_state=state)


def test_parts_decay_an_initial_state_without_its_own_decay(arrays):
    _, key, value = arrays
    state = LogAttentionState.empty((), 1, 2, 3).absorb(key[:2], value[:2])
    log_decay = np.full(key.shape[:2], -0.2, np.float32)
    assert_split_equals_whole(arrays, initial_state=state, log_decay=log_decay)


def test_parts_keep_the_decay_of_an_initial_state(arrays):
    """The tokens themselves have none."""
    _, key, value = arrays
    state = LogAttentionState.empty((), 1, 2, 3, has_decay=True)
    state = state.absorb(key[:2], value[:2], np.full(key[:2].shape[:2], -0.2, np.float32))
    assert_split_equals_whole(arrays, initial_state=state)


def test_parts_keep_the_dtype_of_an_initial_state(arrays):
    state = LogAttentionState.empty((), 1, 2, 3, jnp.bfloat16)
    states = [results(arrays, is_split=x, initial_state=state)[1][1] for x in (True, False)]
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        np.testing.assert_allclose(*(np.float32(x) for x in (one, other)), rtol=1e-2)


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_may_span_parts(arrays, name):
    assert_split_equals_whole(arrays, segment_ids=np.array(SEGMENTS[name]))


def test_decays_of_later_parts_apply_to_earlier_ones(arrays):
    log_decay = -np.random.default_rng(1).exponential(1, (DEVICES * LENGTH, 1))
    assert_split_equals_whole(arrays, log_decay=log_decay.astype(np.float32))
